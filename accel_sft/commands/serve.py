"""`accel-sft serve`: prints and runs the command of a server that others maintain, with the flags that a run needs."""

import dataclasses
import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from accel_sft.api.errors import UserError

EXAMPLES = """\b
For example:
  accel-sft serve runs/math-20261120-101500
  accel-sft serve runs/math-20261120-101500 --with llama.cpp --gguf model.gguf --print
  accel-sft serve runs/math-20261120-101500 -- --max-num-seqs 16
"""
_NEEDS = {
    "vllm": "install vLLM into an environment of its own, and name its `vllm` with --program",
    "transformers": "pip install 'transformers[serving]'",
    "llama.cpp": "build llama.cpp, and name its `llama-server` with --program",
}


@dataclasses.dataclass(frozen=True)
class Served:
    """What is served, and where.

    Attributes:
        name: what clients call the model.
        dtype: the type that the run computed in.
        thinking: the run's `--thinking`.
        length: the largest number of tokens of a prompt and its answer; None: as the server chooses.
    """

    folder: str
    name: str
    host: str
    port: int
    dtype: str
    thinking: str | None
    length: int | None
    trusted: bool


@click.command(epilog=EXAMPLES)
@click.argument("run", type=click.Path(), metavar="RUN")
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS]")
@click.option("--with", "program_kind", type=click.Choice([*_NEEDS]), default="vllm", show_default=True, help="Server.")
@click.option("--program", metavar="PATH", help="The server's program; default: the one on PATH.")
@click.option("--gguf", metavar="FILE", help="The file that llama.cpp serves, as `accel-sft merge --gguf` writes it.")
@click.option("--name", metavar="NAME", help="What clients call the model; default: the run's folder.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0: every one.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port to listen at.")
@click.option("--max-length", type=click.IntRange(2), help="Tokens of prompt and answer; default: the server's.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--print", "only_print", is_flag=True, help="Print the command, and do not run it.")
@click.pass_context
def serve(ctx: click.Context, run: str, more: tuple[str, ...], **options: Any) -> None:
    """Serve what was trained, by a server that others maintain.

    RUN is a run's folder (its best/ weights, or else final/), exported weights or an adapter. The command is printed,
    and run in place of this one; what stands behind -- is given to the server. It has the run's precision, template and
    thinking, so that answers are those of the run's evaluations.
    """
    from accel_sft.io.run_dir import RunDir

    record = RunDir.record_around(run)
    config = record["config"] if record else {}
    served = Served(
        str(Path(RunDir.weights_in(run)).resolve()),
        options["name"] or Path(run).resolve().name,
        options["host"],
        options["port"],
        _dtype(record),
        config.get("thinking"),
        options["max_length"],
        options["trust_remote_code"],
    )
    for line in RunDir.choice_in(run):
        click.echo(line, err=True)
    kind = options["program_kind"]
    if options["gguf"] and kind != "llama.cpp":
        raise UserError(f"--gguf: --with {kind} serves weights as they are; leave it out, or choose --with llama.cpp")
    words = [*_words(kind, served, options["gguf"]), *more]
    words[0] = options["program"] or words[0]
    click.echo(shlex.join(words))
    address = f"http://{served.host}:{served.port}/v1"
    named = served.folder if kind == "transformers" else served.name  # transformers' server knows only the folder
    hint = shlex.join(["accel-sft", "parity", run, "--url", address, "--model", named])
    click.echo(f"then hold it to the run: {hint}", err=True)
    if options["only_print"]:
        return
    program = shutil.which(words[0])
    if not program or (kind == "transformers" and not options["program"] and not importlib.util.find_spec("fastapi")):
        raise UserError(f"--with {kind}: {words[0]} cannot be run here; {_NEEDS[kind]}, or add --print")
    sys.stdout.flush()
    os.execv(program, words)


def _dtype(record: dict[str, Any] | None) -> str:
    from accel_sft.launch.precision import recorded

    names = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return names.get(recorded(record) or "", "auto") if record else "auto"


def _words(kind: str, served: Served, gguf: str | None) -> list[str]:
    """The words of the server's command."""
    where = ["--host", served.host, "--port", str(served.port)]
    off = '{"enable_thinking": false}'
    trusted = ["--trust-remote-code"] if served.trusted else []
    if kind == "llama.cpp":
        if not gguf:
            raise UserError("--with llama.cpp: name the file that `accel-sft merge RUN --gguf FILE` wrote, with --gguf")
        length = ["-c", str(served.length)] if served.length else []
        thinking = ["--chat-template-kwargs", off] if served.thinking == "off" else []
        return ["llama-server", "-m", gguf, "--alias", served.name, *where, "--jinja", *length, *thinking]
    if kind == "transformers":
        thinking = ["--reasoning", "off"] if served.thinking == "off" else []
        return ["transformers", "serve", served.folder, *where, "--dtype", served.dtype, *thinking, *trusted]
    return [
        *_vllm(served),
        *where,
        *(["--default-chat-template-kwargs", off] if served.thinking == "off" else []),
        *trusted,
    ]


def _vllm(served: Served) -> list[str]:
    from accel_sft.evaluation.vllm import adapter_arguments, check
    from accel_sft.models.source import find_source

    source = find_source(served.folder)
    check(source, "--with vllm", "merge it first (accel-sft merge), and serve the merged folder")
    words = ["vllm", "serve", source.weights, "--dtype", served.dtype, "--generation-config", "vllm"]
    words += ["--max-model-len", str(served.length)] if served.length else []
    if not source.adapter:
        return [*words, "--served-model-name", served.name]
    rank = str(adapter_arguments(source)["max_lora_rank"])
    words += ["--tokenizer", source.adapter, "--enable-lora", "--max-lora-rank", rank]
    return [*words, "--lora-modules", f"{served.name}={source.adapter}"]
