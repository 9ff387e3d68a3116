"""Answers by vLLM, which pins its own torch and transformers: the program of another environment, run as a server."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.data.chat import Encoded
from accel_sft.evaluation.server import Server, free_port
from accel_sft.io.files import read_json
from accel_sft.launch.collectives import long_work_by_main
from accel_sft.models.load import Source

VARIABLE = "ACCEL_SFT_VLLM"
AT_ONCE = 256
"""Questions asked at a time; the server batches them itself."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `--max-lora-rank`."""
CPU_CACHE_GIB = "4"
"""For keys and values where vLLM runs on a CPU; by itself it would take nearly all of the machine's memory."""
MEMORY_SHARE, MEMORY_SPARE = 0.9, 0.03
"""Shares of a GPU's memory: what the server may take, and what it leaves of what is free."""

_LAUNCHER = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|OMP_NUM_THREADS"
    r"|(TORCHELASTIC|ACCELERATE|FSDP)_.*)"
)


def find_program() -> str:
    """The program that `$ACCEL_SFT_VLLM` names, or the `vllm` on PATH.

    Raises:
        UserError: there is none.
    """
    named = os.environ.get(VARIABLE)
    if found := shutil.which(named or "vllm"):
        return found
    if named:
        raise UserError(f"--generate-with vllm: {VARIABLE}={named} is no program that can be run; correct or unset it")
    raise UserError(
        "--generate-with vllm: there is no vllm on PATH; install it into an environment of its own "
        "(python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm) and name it: "
        f"export {VARIABLE}=$PWD/.venv-vllm/bin/vllm"
    )


def refuse(source: Source) -> None:
    """What vLLM cannot serve, found before anything is loaded.

    Raises:
        UserError: the adapter is not LoRA.
    """
    if source.adapter and (kind := _adapter(source)["peft_type"]) != "LORA":
        raise UserError(
            f"--generate-with vllm: it serves LoRA adapters, and {source.adapter} is {kind}; leave the option out"
        )


def answer(
    accelerator: Accelerator,
    config: TrainConfig,
    source: Source,
    examples: Sequence[Encoded],
    *,
    dtype: torch.dtype,
    max_new_tokens: int,
    stop_token_ids: Iterable[int],
) -> tuple[list[tuple[Encoded, list[int]]], float]:
    """Greedy answers: this rank's share, that is all on rank 0 and none on others, and the seconds they took.

    Every rank calls it, having let go of its model: the server takes what memory there is on rank 0's device.

    Args:
        dtype: that transformers computes in.
        max_new_tokens: of an answer, the token that ends it included.
    Raises:
        UserError: there is no vLLM, it does not start, refuses a question, or ends early.
    """
    longest = max(example.prompt_length for example in examples) + max_new_tokens
    request = {"model": "tuned" if source.adapter else "base", "max_tokens": max_new_tokens, "temperature": 0}
    # ends where transformers ends, and not at what the model's configuration alone calls its end
    request |= {"stop_token_ids": sorted(stop_token_ids), "ignore_eos": True, "return_token_ids": True}

    log = Path(config.output_dir, "vllm.log") if config.output_dir else None

    def work() -> tuple[list[list[int]], float]:
        port, on_gpu = free_port(), accelerator.device.type == "cuda"
        share = memory_share(*torch.cuda.mem_get_info(accelerator.device)) if on_gpu else None
        words = command(find_program(), source, port, dtype, longest, config.trust_remote_code, share)
        threads = min(len(examples), AT_ONCE)
        with ThreadPoolExecutor(threads) as pool, Server(words, port, _environment(), log) as server:
            return server.answers(pool, request, examples)

    accelerator.wait_for_everyone()  # until each has let go of its model
    answers, seconds = long_work_by_main(accelerator, work)
    return list(zip(examples, answers, strict=True)) if accelerator.is_main_process else [], seconds


def command(
    program: str,
    source: Source,
    port: int,
    dtype: torch.dtype,
    max_model_len: int,
    trust_remote_code: bool = False,
    share: float | None = None,
) -> list[str]:
    """The server's command line.

    Args:
        max_model_len: tokens of the longest prompt with its answer.
        share: of the GPU's memory; None on a CPU.
    """
    words = [program, "serve", source.weights, "--host", "127.0.0.1", "--port", str(port)]
    # its own choice of a type halves float32
    words += ["--served-model-name", "base", "--dtype", str(dtype).removeprefix("torch.")]
    # no tokenizer: it is asked and answers in ids; no settings of the model's own: they may hold a repetition penalty
    words += ["--max-model-len", str(max_model_len), "--skip-tokenizer-init", "--generation-config", "vllm"]
    words += ["--gpu-memory-utilization", f"{share:.2f}"] if share else []
    words += ["--trust-remote-code"] if trust_remote_code else []
    if source.adapter:
        adapter = _adapter(source)
        rank = max([adapter["r"], *(adapter.get("rank_pattern") or {}).values()])
        words += ["--enable-lora", "--lora-modules", f"tuned={Path(source.adapter).resolve()}"]
        words += ["--max-lora-rank", str(next((most for most in LORA_RANKS if most >= rank), rank))]
    return words


def _adapter(source: Source) -> dict[str, Any]:
    return read_json(Path(source.adapter) / "adapter_config.json")


def memory_share(free: int, total: int) -> float:
    """The share of a GPU's memory that the server may take, of which `free` of `total` bytes are free."""
    return min(MEMORY_SHARE, free / total - MEMORY_SPARE)


def _environment() -> dict[str, str]:
    """This process's, without what a launcher tells its ranks: vLLM would take itself for one of them, and wait."""
    environment = {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}
    return {"VLLM_CPU_KVCACHE_SPACE": CPU_CACHE_GIB, **environment}
