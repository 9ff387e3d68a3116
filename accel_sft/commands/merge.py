"""`accel-sft merge`: adds an adapter to its base, and writes weights that need no adapter."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import click

from accel_sft.api.errors import UserError
from accel_sft.commands import gguf as gguf_file
from accel_sft.commands.generate import one_process

MERGED = click.Choice(["bf16", "bfloat16", "float16", "float32"])
"""Types of merged weights; bf16 and bfloat16 are the same."""
GGUF = click.Choice(gguf_file.TYPES)


@click.command()
@click.argument("run", type=click.Path(), metavar="RUN")
@click.argument("out", type=click.Path(), metavar="[OUT]", required=False)
@click.option("--dtype", type=MERGED, help="Of the weights; default: as the base's files.")
@click.option("--gguf", metavar="FILE", help="Write a GGUF file for llama.cpp too; OUT may then be left out.")
@click.option("--gguf-type", type=GGUF, metavar=f"[{'|'.join(GGUF.choices)}]", default="auto", help="Of its weights.")
@click.option("--converter", metavar="PATH", help="llama.cpp's convert_hf_to_gguf.py; default: the one on PATH.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--debug", is_flag=True, help="Tracebacks, and the libraries' own messages.")
@click.pass_context
def merge(
    ctx: click.Context, run: str, out: str | None, dtype: str | None, trust_remote_code: bool, debug: bool, **gguf: Any
) -> None:
    """Add an adapter to its base, and write the sum as plain weights.

    For example: accel-sft merge runs/math-20261120-101500 merged --gguf merged.gguf

    RUN is a run's folder (its best/ adapter, or else final/) or an adapter's. The sum is made in float32 on the CPU,
    compared with base and adapter apart, rounded once, and written into OUT, a new folder, whole or not at all. With
    --gguf, RUN may have full weights too.
    """
    from accel_sft.io.run_dir import RunDir, absent_weights
    from accel_sft.launch.environment import prepare_environment
    from accel_sft.resilience.exit import ExitHandler

    ctx.ensure_object(ExitHandler).debug = debug
    if problems := [*one_process("merge"), *absent_weights(run, "RUN")]:
        raise UserError(*problems)
    prepare_environment(debug)
    from accel_sft.io import terminal
    from accel_sft.io.files import new_folder
    from accel_sft.io.run_record import names_files

    if not (out or gguf["gguf"]):
        raise UserError(f"OUT: name a new folder for the merged weights (accel-sft merge {run} merged), or --gguf FILE")
    file = gguf_file.check_target(gguf["gguf"]) if gguf["gguf"] else None
    converter = gguf_file.find_converter(gguf["converter"]) if file else ""
    with terminal.quiet(None, debug) as stream, contextlib.ExitStack() as stack:
        folder = RunDir.weights_in(run)
        for line in RunDir.choice_in(run):
            print(terminal.wrapped(line), file=stream)
        weights = folder
        if out or Path(folder, "adapter_config.json").is_file():
            beside = file.parent if file else None
            made = new_folder(out, "OUT") if out else tempfile.TemporaryDirectory(dir=beside)
            partial = stack.enter_context(made)
            for line in write_merged(folder, Path(str(partial)), dtype, trust_remote_code):
                print(terminal.wrapped(line, 9), file=stream)
            weights = str(partial)
        if file:
            with terminal.waiting(f"{gguf_file.CONVERTER} writes {file}"):
                gguf_file.write_gguf(weights, file, gguf["gguf_type"], converter)
    if out:
        click.echo(f"{out}: weights that plain transformers loads")
    if file:
        data = " --same-data" if names_files(RunDir.record_around(run)) else ""
        click.echo(f"{file}: serve it, then hold it to the run: accel-sft parity {run} --url URL{data}")


def write_merged(folder: str, target: Path, dtype: str | None, trust_remote_code: bool) -> list[str]:
    """Write an adapter's merged weights into the empty folder `target`; return lines that say what was done.

    Raises:
        UserError: the adapter cannot be merged; the message says why.
    """
    import shutil

    from transformers import PreTrainedConfig

    from accel_sft.io.exported import complete_config, save_tokenizer
    from accel_sft.models.merge import merge
    from accel_sft.models.pretrained import processor_files
    from accel_sft.models.source import find_source, other_base
    from accel_sft.models.tokenizer import load_tokenizer
    from accel_sft.results.model_card import of_merged

    source = find_source(folder)
    if found := other_base(source):
        raise UserError(*found)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code, templated=False)  # raw text needs none
    dtype = "bf16" if dtype == "bfloat16" else dtype
    made = merge(source, tokenizer, dtype, trust_remote_code=trust_remote_code)
    made.model.save_pretrained(target)
    base, _ = PreTrainedConfig.get_config_dict(source.weights)
    complete_config(target, str(made.model.dtype).removeprefix("torch."), base)
    save_tokenizer(tokenizer, target)
    for file in processor_files(source.weights, made.model):
        shutil.copyfile(file, target / file.name)
    lines = [f"adapter  {folder}", f"base     {source.weights}", f"merged   {made.dtype} weights"]
    card = Path(folder) / "README.md"
    text = of_merged(card.read_text(encoding="utf-8")) if card.is_file() else None
    if text is None:
        return [*lines, "note     README.md is not one of accel_sft's; the merged weights have none"]
    (target / "README.md").write_text(text, encoding="utf-8")
    return lines
