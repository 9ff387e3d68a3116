"""`accel-sft merge`: merges an adapter into its base, and writes plain weights, or a GGUF file for llama.cpp."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from accel_sft.api.errors import UserError
from accel_sft.commands.trained import Trained, begin_command
from accel_sft.io import terminal
from accel_sft.io.files import new_folder
from accel_sft.io.run_dir import absent_weights
from accel_sft.io.text import LONGEST_ERROR, one_line

MERGED = click.Choice(["bf16", "bfloat16", "float16", "float32"])
"""Types of merged weights; bf16 and bfloat16 are the same."""
_GGUF = click.Choice(["auto", "f32", "f16", "bf16", "q8_0"])
"""Types of weights in a GGUF file; auto: 16 bits, as llama.cpp's converter chooses them."""
_CONVERTER = "convert_hf_to_gguf.py"


@click.command()
@click.argument("run", type=click.Path(), metavar="RUN")
@click.argument("out", type=click.Path(), metavar="[OUT]", required=False)
@click.option("--dtype", type=MERGED, help="Data type of the weights; default: that of the base's files.")
@click.option("--gguf", metavar="FILE", help="Write a GGUF file for llama.cpp too; OUT may then be left out.")
@click.option("--gguf-type", type=_GGUF, metavar=f"[{'|'.join(_GGUF.choices)}]", default="auto", help="GGUF data type.")
@click.option("--converter", metavar="PATH", help="llama.cpp's convert_hf_to_gguf.py; default: the one on PATH.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--debug", is_flag=True, help="Show tracebacks and the libraries' messages.")
@click.pass_context
def merge(ctx: click.Context, run: str, out: str | None, **options: Any) -> None:
    """Merge an adapter into its base, and write plain weights.

    For example: accel-sft merge runs/math-20261120-101500 merged --gguf merged.gguf

    RUN is a run's folder (its best/ adapter, or else final/) or an adapter's folder. The weights are merged in float32
    on the CPU, checked against the base with the unmerged adapter, and rounded once. OUT, a new folder, appears only
    when it is complete. With --gguf, RUN may also have full weights.
    """
    begin_command(ctx, debug=options["debug"], problems=absent_weights(run, "RUN"))
    gguf = options["gguf"]
    if not (out or gguf):
        raise UserError(f"OUT: name a new folder for the merged weights (accel-sft merge {run} merged), or --gguf FILE")
    with terminal.quiet(None, options["debug"]) as stream, contextlib.ExitStack() as stack:
        made_in = stack.enter_context(_beside(Path(gguf))) if gguf else Path()
        converter = _find_converter(options["converter"]) if gguf else ""
        trained = Trained(run)
        for line in trained.notes:
            print(terminal.wrapped(line), file=stream)
        weights = trained.weights
        if out or Path(weights, "adapter_config.json").is_file():
            target = stack.enter_context(new_folder(out, "OUT")) if out else made_in / "merged"
            for line in write_merged(weights, target, options["dtype"], options["trust_remote_code"]):
                print(terminal.wrapped(line, 9), file=stream)
            weights = str(target)
        if gguf:
            with terminal.waiting(f"{_CONVERTER} writes {gguf}"):
                _write_gguf(weights, made_in, Path(gguf), options["gguf_type"], converter)
    if out:
        click.echo(f"{out}: merged weights, which transformers loads without peft")
    if gguf:
        click.echo(f"{gguf}: serve it with accel-sft serve {run} --with llama.cpp --gguf {gguf}")


def write_merged(folder: str, target: Path, dtype: str | None, trust_remote_code: bool) -> list[str]:
    """Write an adapter's merged weights into the new or empty folder `target`; return lines that say what was done."""
    from transformers import PreTrainedConfig

    from accel_sft.io.exported import complete_config, save_tokenizer
    from accel_sft.models.merge import merge
    from accel_sft.models.pretrained import processor_files
    from accel_sft.models.source import find_source, other_base
    from accel_sft.models.tokenizer import load_tokenizer, sentencepiece_file
    from accel_sft.results.model_card import of_merged

    source = find_source(folder)
    if problems := other_base(source):
        raise UserError(*problems)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code, templated=False)  # may have no template
    dtype = "bf16" if dtype == "bfloat16" else dtype
    model, dtype = merge(source, tokenizer, dtype, trust_remote_code=trust_remote_code)
    model.save_pretrained(target)
    base, _ = PreTrainedConfig.get_config_dict(source.weights)
    complete_config(target, str(model.dtype).removeprefix("torch."), base)
    save_tokenizer(tokenizer, target)
    for file in (*processor_files(source.weights, model), *sentencepiece_file(source)):
        shutil.copyfile(file, target / file.name)
    lines = [f"adapter  {folder}", f"base     {source.weights}", f"merged   {dtype} weights"]
    card = Path(folder) / "README.md"
    text = of_merged(card.read_text(encoding="utf-8")) if card.is_file() else None
    if text is None:
        return [*lines, "note     README.md is not a model card of accel_sft; the merged weights get no card"]
    (target / "README.md").write_text(text, encoding="utf-8")
    return lines


def _find_converter(named: str | None) -> str:
    """The path of llama.cpp's converter: `named` (a file or its folder) or, if None, the converter on PATH."""
    if named:
        path = Path(named, _CONVERTER) if Path(named).is_dir() else Path(named)
        if path.is_file():
            return str(path)
        raise UserError(f"--converter {named}: no such file; name llama.cpp's {_CONVERTER}, or its folder")
    if on_path := shutil.which(_CONVERTER, mode=os.F_OK):  # the script need not be executable
        return on_path
    raise UserError(f"--gguf: llama.cpp's {_CONVERTER} is not on PATH; clone llama.cpp, and give --converter FOLDER")


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Make a temporary folder beside `target`, a GGUF file; UserError if `target` exists or cannot be written."""
    if target.exists():
        raise UserError(f"--gguf {target}: already exists; name a new file")
    try:
        folder = tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise UserError(f"--gguf {target}: cannot be written ({error.strerror}); name another file") from None
    with folder as name:
        yield Path(name)


def _write_gguf(weights: str, made_in: Path, target: Path, kind: str, converter: str) -> None:
    """Convert a folder of full weights into the file `target`, which is written whole or not at all."""
    partial = made_in / target.name
    command = [sys.executable, converter, weights, "--outfile", str(partial), "--outtype", kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode or not partial.is_file():
        last = [line for line in done.stdout.splitlines() if line.strip()][-1:]
        log = Path(tempfile.mkdtemp(prefix="accel-sft-gguf-"), "log")
        log.write_text(done.stdout, encoding="utf-8")
        reason = one_line(last[0], LONGEST_ERROR) if last else f"exit status {done.returncode}"
        raise UserError(f"--gguf {target}: {converter} failed: {reason}; its output is in {log}; try a newer converter")
    shutil.move(partial, target)
