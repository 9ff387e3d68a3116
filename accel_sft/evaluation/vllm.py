"""Generates answers with vLLM. It pins its own torch and transformers, so it is installed in a separate environment,
whose Python runs `vllm_script`."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.chat.encoded import Encoded
from accel_sft.evaluation.backend import Generated
from accel_sft.evaluation.vllm_process import run_script
from accel_sft.io.files import read_json
from accel_sft.launch.collectives import long_work_by_main
from accel_sft.launch.environment import ALLOCATOR, allocator_settings
from accel_sft.models.source import Source
from accel_sft.tracking.system import GIB

PROGRAM, OPTIONS = "ACCEL_SFT_VLLM", "ACCEL_SFT_VLLM_OPTIONS"
"""Environment variables: PROGRAM has the path of `vllm` or `python` in vLLM's environment, OPTIONS the arguments of
vllm.LLM as a JSON object."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `max_lora_rank`."""
CPU_CACHE_GIB = "4"
"""GiB of KV cache when vLLM runs on a CPU; vLLM's default is nearly all of the machine's memory."""
MEMORY_SHARE, MEMORY_SPARE = 0.9, 0.03
"""Shares of a GPU's total memory: the most that vLLM may take, and how much of the free memory it must leave."""

_LAUNCHER = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|OMP_NUM_THREADS"
    r"|(TORCHELASTIC|ACCELERATE|FSDP)_.*)"
)


@dataclasses.dataclass(frozen=True)
class VllmBackend:
    """Answers prompts on rank 0, from the weights on disk; the other ranks wait.

    The caller's model must have left the device before: vLLM takes the memory that it finds free on rank 0's device.

    Attributes:
        dtype: the dtype that vLLM computes in, the same as the model's in transformers.
        stop_token_ids: tokens that each end an answer and are part of it.
        output_dir: the folder for vLLM's log; None: a temporary file, kept only if vLLM fails.
    """

    accelerator: Accelerator
    source: Source
    dtype: torch.dtype
    stop_token_ids: Iterable[int]
    output_dir: str | None
    trust_remote_code: bool
    uses_model = False

    def __call__(self, examples: Sequence[Encoded], max_new_tokens: int) -> Generated:
        """Return greedy answers to all examples on rank 0, and no answers on other ranks. Every rank must call this.

        Raises:
            UserError: vLLM was not found, has too little memory, or failed (the message has the last lines of its log);
                or a prompt has images.
        """
        if pictured := next((example.images for example in examples if example.images), None):
            where = pictured.origin.of(pictured)
            raise UserError(f"--generate-with vllm: {where} has images, which vLLM does not get; leave this option out")
        log = Path(self.output_dir, "vllm.log") if self.output_dir else None
        limit = max(example.prompt_length for example in examples) + max_new_tokens
        device = self.accelerator.device

        def answer() -> Generated:
            share = memory_share(*torch.cuda.mem_get_info(device)) if device.type == "cuda" else None
            request = {
                "prompts": [example.input_ids[: example.prompt_length] for example in examples],
                "llm": llm_arguments(self.source, self.dtype, limit, self.trust_remote_code, share),
                # answers end at the same tokens as in transformers; vLLM knows only those of the model's configuration
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

        self.accelerator.wait_for_everyone()  # a rank comes here once it has released its model
        generated = long_work_by_main(self.accelerator, answer)
        return generated if self.accelerator.is_main_process else Generated([], generated.seconds, generated.peaks)


def find_python() -> str:
    """The Python of vLLM's environment: what `$ACCEL_SFT_VLLM` names, or the one beside the `vllm` there or on PATH.

    Raises:
        UserError: none is found, or the variable names another program.
    """
    named = os.environ.get(PROGRAM)
    found = shutil.which(named or "vllm")
    if not found and named:
        raise UserError(f"--generate-with vllm: {PROGRAM}={named} cannot be run; correct or unset the variable")
    if not found:
        raise UserError(
            "--generate-with vllm: there is no vllm on PATH; install it into an environment of its own "
            "(python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm) and name it: "
            f"export {PROGRAM}=$PWD/.venv-vllm/bin/vllm"
        )
    if re.fullmatch(r"python[\d.]*", Path(found).name):
        return found
    paths = Path(found), Path(found).resolve()  # the program may be a link into an environment
    if "vllm" not in [path.name for path in paths]:  # a script around vLLM may pass options, which would be lost
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


_ROWS = {"trainable_token_indices": "embeddings of new tokens"}


def check(source: Source, option: str = "--generate-with vllm", else_: str = "leave this option out") -> None:
    """Raise UserError if vLLM cannot serve the adapter, or `$ACCEL_SFT_VLLM_OPTIONS` is not a JSON object.

    Args:
        option, else_: what errors begin with, and what they advise.
    """
    _options()
    for key, what in {"use_dora": "DoRA", "modules_to_save": "modules trained in full", **_ROWS}.items():
        if source.adapter and _adapter(source.adapter).get(key):
            raise UserError(f"{option}: vLLM cannot serve {what}, which {source.adapter} has; {else_}")
    if source.grown:
        raise UserError(
            f"{option}: it reads {source.weights} as they are stored, without embeddings of tokens that "
            f"--chat-template added; {else_}"
        )
    if source.adapter and (kind := _adapter(source.adapter)["peft_type"]) != "LORA":
        raise UserError(f"{option}: vLLM serves only LoRA, but {source.adapter} is {kind}; {else_}")


def adapter_arguments(source: Source) -> dict[str, Any]:
    """The arguments by which vLLM serves an adapter; none if there is no adapter."""
    if not source.adapter:
        return {}
    adapter = _adapter(source.adapter)
    rank = max([adapter["r"], *(adapter.get("rank_pattern") or {}).values()])
    return {"enable_lora": True, "max_lora_rank": next((most for most in LORA_RANKS if most >= rank), rank)}


def llm_arguments(
    source: Source, dtype: torch.dtype, max_model_len: int, trust_remote_code: bool = False, share: float | None = None
) -> dict[str, Any]:
    """Arguments of vllm.LLM; those in `$ACCEL_SFT_VLLM_OPTIONS` override the others.

    Args:
        max_model_len: tokens of the longest prompt plus the most that are generated.
        share: share of the GPU's memory that vLLM may take; None on a CPU.
    """
    arguments = {
        "model": source.weights,
        "dtype": str(dtype).removeprefix("torch."),  # by default vLLM would cast float32 to 16 bits
        "generation_config": "vllm",  # not the model's, which may set a repetition penalty
        "max_model_len": max_model_len,
        "skip_tokenizer_init": True,
        "trust_remote_code": trust_remote_code,
    }
    if share:
        arguments["gpu_memory_utilization"] = round(share, 2)
    return arguments | adapter_arguments(source) | _options()


def _options() -> dict[str, Any]:
    text = os.environ.get(OPTIONS) or "{}"
    try:
        options = json.loads(text)
    except ValueError as error:
        raise UserError(f"{OPTIONS}={text}: not JSON ({error})") from None
    if not isinstance(options, dict):
        raise UserError(f'{OPTIONS}={text}: give arguments of vllm.LLM as JSON, such as {{"tensor_parallel_size": 2}}')
    return options


def _adapter(folder: str) -> dict[str, Any]:
    return read_json(Path(folder) / "adapter_config.json")


def memory_share(free: int, total: int) -> float:
    """The share of a GPU's memory that vLLM may take, if `free` of its `total` bytes are free.

    Raises:
        UserError: nothing is left for vLLM.
    """
    share = min(MEMORY_SHARE, free / total - MEMORY_SPARE)
    if share < 0.01:
        told = f"{free / GIB:.1f} of the GPU's {total / GIB:.1f} GiB are free"
        raise UserError(f"--generate-with vllm: only {told}; end the other processes on this GPU")
    return share


def environment() -> dict[str, str]:
    """vLLM's environment variables: this process's, and `CPU_CACHE_GIB`. Those that the launcher set are left out: with
    them vLLM would take itself for a rank and wait for the others."""
    kept = {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}
    if kept.get(ALLOCATOR) == allocator_settings():  # vLLM's memory pools may fail with expandable segments
        del kept[ALLOCATOR]
    return {"VLLM_CPU_KVCACHE_SPACE": CPU_CACHE_GIB, **kept}
