"""Converts weights into a GGUF file by llama.cpp's own converter, a script of its repository."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from accel_sft.api.errors import UserError
from accel_sft.io.text import LONGEST_ERROR, one_line

CONVERTER = "convert_hf_to_gguf.py"
TYPES = "auto", "f32", "f16", "bf16", "q8_0"
"""Types of weights in the file; auto: 16 bits, as llama.cpp's converter chooses them."""
_UNKNOWN = re.compile(r"(Model \S+ is not supported)|tokenizer was not recognized|tokenizer is not supported")
"""What the converter says of a model that it does not know."""
_TREE = "llama_cpp_python-*/vendor/llama.cpp"


def find_converter(named: str | None) -> str:
    """The converter's path: the one that is named, or the one on PATH.

    Raises:
        UserError: there is none; the message says where to get it.
    """
    if named:
        path = Path(named, CONVERTER) if Path(named).is_dir() else Path(named)
        if path.is_file():
            return str(path)
        raise UserError(f"--converter {named}: no such file; name llama.cpp's {CONVERTER}, or its folder")
    folders = (Path(folder, CONVERTER) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder)
    if found := next((path for path in folders if path.is_file()), None):  # it need not be executable
        return str(found)
    raise UserError(
        f"--gguf: llama.cpp's {CONVERTER} is not on PATH; it is in the source of llama-cpp-python: "
        "pip download --no-deps --no-binary :all: llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz, "
        f"then --converter {_TREE}"
    )


def check_target(file: str) -> Path:
    """The path of a GGUF file to be written; raises UserError if it is there already, or its folder takes no file."""
    path = Path(file)
    if path.exists() or not path.parent.is_dir():
        what = "is there already; name a new file" if path.exists() else "its folder is not there; make it first"
        raise UserError(f"--gguf {file}: {what}")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"--gguf {file}: its folder cannot be written ({error.strerror}); name another") from None
    return path


def write_gguf(weights: str, target: Path, kind: str, converter: str) -> None:
    """Convert a folder of full weights into the file `target`, which is there whole or not at all.

    Raises:
        UserError: the converter failed; the message has the end of what it said, and where the rest is.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        partial = Path(folder, target.name)
        command = [sys.executable, converter, weights, "--outfile", str(partial), "--outtype", kind]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode or not partial.is_file():
            last = [line for line in done.stdout.splitlines() if line.strip()][-1:]
            log = Path(tempfile.mkdtemp(prefix="accel-sft-gguf-"), "log")
            log.write_text(done.stdout, encoding="utf-8")
            told = one_line(last[0], LONGEST_ERROR) if last else f"exit status {done.returncode}"
            if told.startswith("ModuleNotFoundError"):
                told += "; the converter needs it: install it by pip"
            if what := _UNKNOWN.search(done.stdout):
                told += f"; it does not know this model's {'architecture' if what[1] else 'tokenizer'}: take a newer "
                told += "converter, or serve the weights by vLLM or transformers (accel-sft serve)"
            raise UserError(f"--gguf {target}: {converter} failed: {told}; all that it said is in {log}")
        shutil.move(partial, target)
