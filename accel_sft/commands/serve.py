"""`accel-sft serve`: prints and runs the command of a third-party server, with the flags that a run needs."""

import importlib.util
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from accel_sft.api.errors import UserError
from accel_sft.commands.trained import Trained
from accel_sft.io.files import read_json

_MERGE = "merge the adapter first (accel-sft merge), and serve the merged folder"
_NOT_IN_VLLM = "use_dora", "modules_to_save", "trainable_token_indices", "target_parameters"
"""Adapter features that vLLM cannot serve, by their keys in adapter_config.json."""
_LORA_RANKS = 8, 16, 32, 64, 128, 256, 320, 512
"""Values that vLLM accepts for --max-lora-rank."""
_NEEDS = {
    "vllm": "install vLLM into an environment of its own, and name its `vllm` with --program",
    "transformers": "pip install 'transformers[serving]'",
    "llama.cpp": "build llama.cpp, and name its `llama-server` with --program",
}


@click.command()
@click.argument("run", type=click.Path(), metavar="RUN")
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS]")
@click.option("--with", "program_kind", type=click.Choice([*_NEEDS]), default="vllm", show_default=True, help="Server.")
@click.option("--program", metavar="PATH", help="The server's program; default: the program on PATH.")
@click.option("--gguf", metavar="FILE", help="File for llama.cpp to serve, written by `accel-sft merge --gguf`.")
@click.option("--name", metavar="NAME", help="The model's name for clients; default: the run's folder.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0: all.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port to listen at.")
@click.option("--print", "only_print", is_flag=True, help="Print the command, and do not run it.")
def serve(run: str, more: tuple[str, ...], **options: Any) -> None:
    """Serve a trained model with a third-party server.

    For example: accel-sft serve runs/math-20261120-101500 -- --max-num-seqs 16

    RUN is a run's folder (its best/ weights, or else final/), exported weights or an adapter. The server's command is
    printed and replaces this process; arguments after -- are passed to the server. The command sets the run's
    precision, template and thinking, so that answers match those of the run's evaluations.
    """
    if not Path(run).is_dir():
        raise UserError(f"RUN {run}: no such folder; name a run's folder, exported weights or an adapter")
    trained, kind, program = Trained(run), options["program_kind"], options["program"]
    folder, name = str(Path(trained.weights).resolve()), options["name"] or Path(run).resolve().name
    for line in trained.notes:
        click.echo(line, err=True)
    if kind == "llama.cpp" and not options["gguf"]:
        raise UserError("--with llama.cpp needs --gguf FILE, which `accel-sft merge RUN --gguf FILE` writes")
    if kind != "llama.cpp" and options["gguf"]:
        raise UserError(f"--gguf: {kind} cannot serve this format; add --with llama.cpp")
    words = _words(kind, folder, name, trained, options["gguf"])
    words = [program or words[0], *words[1:], "--host", options["host"], "--port", str(options["port"]), *more]
    click.echo(shlex.join(words))
    if trained.raw_text:
        click.echo("The model was trained on raw text: use /v1/completions, which applies no chat template.", err=True)
    if options["only_print"]:
        return
    path = shutil.which(words[0])
    if not path or (kind == "transformers" and not program and not importlib.util.find_spec("fastapi")):
        raise UserError(f"--with {kind}: {words[0]} cannot be run here; {_NEEDS[kind]}, or only --print the command")
    sys.stdout.flush()
    try:
        os.execv(path, words)
    except OSError as error:  # not a program for this machine, or a script without #!
        raise UserError(f"{path}: cannot be run ({error.strerror}); name the server's program with --program") from None


def _words(kind: str, folder: str, name: str, trained: Trained, gguf: str | None) -> list[str]:
    """The words of the server's command, without its address."""
    dtype = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(trained.precision or "", "auto")
    off = trained.record is not None and trained.record["config"].get("thinking") == "off"
    no_thinking = '{"enable_thinking": false}'
    if kind == "llama.cpp":
        thinking = ["--chat-template-kwargs", no_thinking] if off else []
        return ["llama-server", "-m", str(gguf), "--alias", name, "--jinja", *thinking]
    if kind == "transformers":
        if Path(folder, "adapter_config.json").is_file():
            raise UserError(f"--with transformers cannot serve an adapter, such as {folder}; {_MERGE}")
        return ["transformers", "serve", folder, "--dtype", dtype, *(["--reasoning", "off"] if off else [])]
    thinking = ["--default-chat-template-kwargs", no_thinking] if off else []
    return [*_vllm(folder, name), "--dtype", dtype, "--generation-config", "vllm", *thinking]


def _vllm(folder: str, name: str) -> list[str]:
    from transformers import PreTrainedConfig

    from accel_sft.models.adapters import is_of_whole
    from accel_sft.models.source import errors_explained, find_source, other_base

    source = find_source(folder)
    words = ["vllm", "serve", source.weights]
    if not source.adapter:
        return [*words, "--served-model-name", name]
    if problems := other_base(source):
        raise UserError(*problems)
    adapter = read_json(Path(source.adapter) / "adapter_config.json")
    unserved = [key for key in _NOT_IN_VLLM if adapter.get(key)]
    unserved += [adapter["peft_type"]] if adapter["peft_type"] != "LORA" else []
    if unserved:
        raise UserError(f"--with vllm: vLLM cannot serve {unserved[0]}, which {source.adapter} has; {_MERGE}")
    with errors_explained(source.weights):
        multimodal = "text_config" in PreTrainedConfig.get_config_dict(source.weights)[0]
    # vLLM would match none of the adapter's weight names, and would not report it
    if multimodal and not is_of_whole(source.adapter):
        raise UserError(f"--with vllm: {source.adapter} adapts only the language model of its base; {_MERGE}")
    rank = max([adapter["r"], *(adapter.get("rank_pattern") or {}).values()])
    rank = next((most for most in _LORA_RANKS if most >= rank), rank)
    words += ["--tokenizer", source.adapter, "--enable-lora", "--max-lora-rank", str(rank)]
    module = json.dumps({"name": name, "path": source.adapter})  # not name=path: either may contain "="
    return [*words, "--lora-modules", module]
