"""Answers by vLLM, which pins its own torch and transformers: the Python of its environment runs `vllm_script`."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.chat.encoding import Encoded
from accel_sft.evaluation.backend import Generated
from accel_sft.evaluation.vllm_process import run_script
from accel_sft.io.files import read_json
from accel_sft.launch.collectives import long_work_by_main
from accel_sft.launch.environment import GAPS
from accel_sft.models.source import Source

PROGRAM, OPTIONS = "ACCEL_SFT_VLLM", "ACCEL_SFT_VLLM_OPTIONS"
"""Environment variables: the `vllm` or `python` of vLLM's environment; arguments of vllm.LLM as a JSON object."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `max_lora_rank`."""
CPU_CACHE_GIB = "4"
"""GiB for keys and values where vLLM runs on a CPU; by default it would take nearly all of the machine's memory."""
MEMORY_SHARE, MEMORY_SPARE = 0.9, 0.03
"""Shares of a GPU's memory: what vLLM may take, and what it leaves of what is free."""

_LAUNCHER = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|OMP_NUM_THREADS"
    r"|(TORCHELASTIC|ACCELERATE|FSDP)_.*)"
)


@dataclasses.dataclass(frozen=True)
class VllmBackend:
    """Answers prompts on rank 0, from the weights on disk; the other ranks wait.

    The caller's model must have left the device before: vLLM takes the memory that it finds free on rank 0's device.

    Attributes:
        dtype: the type that transformers computes in.
        stop_token_ids: tokens that each end an answer and are part of it.
    """

    accelerator: Accelerator
    config: TrainConfig
    source: Source
    dtype: torch.dtype
    stop_token_ids: Iterable[int]
    uses_model: ClassVar[bool] = False

    def __call__(self, examples: Sequence[Encoded], max_new_tokens: int) -> Generated:
        """Greedy answers to all examples on rank 0 and to none on the others; every rank calls it.

        Raises:
            UserError: there is no vLLM; its script failed, with the last lines of its log; or a prompt has images.
        """
        if pictured := next((example for example in examples if example.images), None):
            where = pictured.images.source.of(pictured)
            raise UserError(f"--generate-with vllm: {where} has images, of which it is told nothing; leave it out")
        log = Path(self.config.output_dir, "vllm.log") if self.config.output_dir else None
        limit = max(example.prompt_length for example in examples) + max_new_tokens
        device = self.accelerator.device

        def answer() -> Generated:
            share = memory_share(*torch.cuda.mem_get_info(device)) if device.type == "cuda" else None
            request = {
                "prompts": [example.input_ids[: example.prompt_length] for example in examples],
                "llm": llm_arguments(self.source, self.dtype, limit, self.config.trust_remote_code, share),
                # an answer ends where transformers ends it, and not at what the model's configuration alone names
                "sampling": {
                    "temperature": 0.0,
                    "max_tokens": max_new_tokens,
                    "stop_token_ids": sorted(self.stop_token_ids),
                    "ignore_eos": True,
                    "detokenize": False,
                },
                "adapter": str(Path(self.source.adapter).resolve()) if self.source.adapter else None,
            }
            answers, seconds, peaks = run_script(find_python(), request, environment(), log, device)
            return Generated(list(zip(examples, answers, strict=True)), seconds, peaks)

        self.accelerator.wait_for_everyone()  # until each has released its model
        generated = long_work_by_main(self.accelerator, answer)
        return generated if self.accelerator.is_main_process else Generated([], generated.seconds, generated.peaks)


def find_python() -> str:
    """The Python beside the program that `$ACCEL_SFT_VLLM` names, or beside the `vllm` on PATH.

    Raises:
        UserError: there is none.
    """
    named = os.environ.get(PROGRAM)
    found = shutil.which(named or "vllm")
    if not found and named:
        raise UserError(f"--generate-with vllm: {PROGRAM}={named} is no program that can be run; correct or unset it")
    if not found:
        raise UserError(
            "--generate-with vllm: there is no vllm on PATH; install it into an environment of its own "
            "(python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm) and name it: "
            f"export {PROGRAM}=$PWD/.venv-vllm/bin/vllm"
        )
    if re.fullmatch(r"python[\d.]*", Path(found).name):
        return found
    paths = Path(found), Path(found).resolve()  # the latter: a link to an environment's program
    if "vllm" not in [path.name for path in paths]:  # a script whose options would be lost
        raise UserError(
            f"--generate-with vllm: {PROGRAM}={named} is neither vLLM's `vllm` nor its `python`: name one, and "
            f"give options as JSON in {OPTIONS}"
        )
    if python := shutil.which("python", path=os.pathsep.join(str(path.parent) for path in paths)):
        return python
    raise UserError(
        f"--generate-with vllm: there is no python beside {found}; name the one of vLLM's environment: "
        f"export {PROGRAM}=.../bin/python"
    )


def check(source: Source) -> None:
    """Raise UserError if vLLM cannot serve the adapter, or `$ACCEL_SFT_VLLM_OPTIONS` is no JSON object."""
    _options()
    for key, what in {"use_dora": "DoRA", "modules_to_save": "modules trained in full"}.items():
        if source.adapter and _adapter(source).get(key):
            raise UserError(
                f"--generate-with vllm: it serves no {what}, which {source.adapter} has; leave the option out"
            )
    if source.adapter and (kind := _adapter(source)["peft_type"]) != "LORA":
        raise UserError(
            f"--generate-with vllm: it serves LoRA adapters, and {source.adapter} is {kind}; leave the option out"
        )


def llm_arguments(
    source: Source, dtype: torch.dtype, max_model_len: int, trust_remote_code: bool = False, share: float | None = None
) -> dict[str, Any]:
    """Arguments of vllm.LLM; those in `$ACCEL_SFT_VLLM_OPTIONS` come last.

    Args:
        max_model_len: tokens of the longest prompt with its answer.
        share: share of the GPU's memory that vLLM may take; None on a CPU.
    """
    arguments = {
        "model": source.weights,
        "dtype": str(dtype).removeprefix("torch."),  # by default vLLM would halve float32
        "generation_config": "vllm",  # the model's own settings may hold a repetition penalty
        "max_model_len": max_model_len,
        "skip_tokenizer_init": True,
        "trust_remote_code": trust_remote_code,
    }
    if share:
        arguments["gpu_memory_utilization"] = round(share, 2)
    if source.adapter:
        adapter = _adapter(source)
        rank = max([adapter["r"], *(adapter.get("rank_pattern") or {}).values()])
        arguments |= {"enable_lora": True, "max_lora_rank": next((most for most in LORA_RANKS if most >= rank), rank)}
    return arguments | _options()


def _options() -> dict[str, Any]:
    text = os.environ.get(OPTIONS) or "{}"
    try:
        options = json.loads(text)
    except ValueError as error:
        raise UserError(f"{OPTIONS}={text}: not JSON ({error})") from None
    if not isinstance(options, dict):
        raise UserError(f'{OPTIONS}={text}: give arguments of vllm.LLM as JSON, such as {{"tensor_parallel_size": 2}}')
    return options


def _adapter(source: Source) -> dict[str, Any]:
    return read_json(Path(source.adapter) / "adapter_config.json")


def memory_share(free: int, total: int) -> float:
    """The share of a GPU's memory that vLLM may take, if `free` of its `total` bytes are free."""
    return min(MEMORY_SHARE, free / total - MEMORY_SPARE)


def environment() -> dict[str, str]:
    """This process's variables without its launch's, by which vLLM would take itself for a rank and wait for others."""
    kept = {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}
    if kept.get(GAPS[0]) == GAPS[1]:  # vLLM's own pools of memory may not take it
        del kept[GAPS[0]]
    return {"VLLM_CPU_KVCACHE_SPACE": CPU_CACHE_GIB, **kept}
