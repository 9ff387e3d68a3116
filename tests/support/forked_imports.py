"""Imports what command lines, launchers and ranks import at their start, then what most of them import later."""

import gc
import importlib
import os

from accel_sft.launch.environment import prepare_environment

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else DeepSpeed's search for GPUs would make them unusable in forks
prepare_environment()
for name in (
    *("accelerate.commands.launch", "torch.distributed.run", "accel_sft.commands.evaluate", "accel_sft.commands.train"),
    *("deepspeed.runtime.zero.stage3", "deepspeed.runtime.zero.stage_1_and_2", "peft", "torch.utils.tensorboard"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.models.qwen2.modeling_qwen2"),
    *("accel_sft.__main__", "accel_sft.commands.generate", "accel_sft.tools.check.command", "accel_sft_math"),
    *("deepspeed.ops.op_builder.all_ops", "deepspeed.module_inject.auto_ep_layer", "packaging.requirements"),
    *("pandas", "pyarrow.pandas_compat", "rich._emoji_codes", "scipy.stats", "torch.profiler"),
    *("transformers.models.qwen2.tokenization_qwen2", "transformers.models.llama.modeling_llama"),
):
    importlib.import_module(name)
gc.collect()
gc.freeze()  # DeepSpeed runs gc for each optimizer; every fork would otherwise traverse all of this
