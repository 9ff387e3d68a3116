"""`serve` runs others' servers with the flags that a run needs; `merge --gguf` runs llama.cpp's converter."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest
from conftest import accel_sft, finished
from reference_job import layout
from safetensors.torch import load_file, save_file
from tampering import edit_json

from accel_sft.api.errors import UserError
from accel_sft.commands.serve import _vllm

TELLS = '#!/bin/sh\nprintf "%s\\n" "$0" "$@"\n'
CONVERTS = """
import sys
from pathlib import Path
weights, target = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--outfile") + 1])
if not (weights / "config.json").is_file() or "q8_0" in sys.argv:
    sys.exit("Traceback\\nNotImplementedError: no such tokenizer")
target.write_text(" ".join(sorted(path.name for path in weights.iterdir())) + " " + sys.argv[-1])
"""


@pytest.fixture(scope="module")
def run(launched):
    return layout(launched, "plain").run_dir


@pytest.fixture
def program(tmp_path):
    """A server's program that tells its words and ends."""
    path = tmp_path / "program"
    path.write_text(TELLS)
    path.chmod(0o755)
    return path


def test_run_is_served_in_its_precision_by_its_name(run, program):
    done = finished("serve", str(run), "--program", str(program), "--port", "8123", "--", "--max-num-seqs", "16")
    words = ["serve", str(run / "best"), "--served-model-name", run.name, "--dtype", "float32", "--generation-config"]
    words += ["vllm", "--host", "127.0.0.1", "--port", "8123", "--max-num-seqs", "16"]
    assert "\n".join([str(program), *words]) in done.output
    assert f"note: using this run's best/ weights; for the weights of its last step, name {run}" in done.output


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"peft_type": "ADALORA"}, "ADALORA"),
    ],
)
def test_adapters_vllm_cannot_serve_are_refused(adapter, tmp_path, changed, what):
    edit_json(shutil.copytree(adapter, tmp_path / "other") / "adapter_config.json", **changed)
    with pytest.raises(UserError, match=f"cannot serve {what}, which {tmp_path / 'other'} has; merge the adapter"):
        _vllm(str(tmp_path / "other"), "name")


def test_vllm_gets_no_adapter_whose_names_the_base_lacks(adapter, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "gemma3", "text_config": {}}')
    folder = shutil.copytree(adapter, tmp_path / "lora")
    edit_json(folder / "adapter_config.json", base_model_name_or_path=str(tmp_path / "base"))
    with pytest.raises(UserError, match="lora adapts only the language model of its base; merge the adapter first"):
        _vllm(str(folder), "name")
    weights = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace(".layers.", ".language_model.layers."): weight for name, weight in weights.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    assert "--enable-lora" in _vllm(str(folder), "name")


@pytest.mark.parametrize(("r", "pattern", "rank"), [(8, None, 8), (4, {"q_proj": 130}, 256)])
def test_vllm_gets_room_for_adapters_largest_rank(adapter, tmp_path, r, pattern, rank):
    edit_json(shutil.copytree(adapter, tmp_path / "other") / "adapter_config.json", r=r, rank_pattern=pattern)
    words = _vllm(str(tmp_path / "other"), "name")
    assert words[words.index("--max-lora-rank") + 1] == str(rank)


def test_adapter_is_served_on_its_base_with_its_tokenizer(adapter, tiny, called):
    printed = called("serve", str(adapter), "--name", "lr=1e-3", "--host", "::1", "--print")
    words = f"vllm serve {tiny} --tokenizer {adapter} --enable-lora --max-lora-rank 16 --lora-modules "
    words += shlex.quote(json.dumps({"name": "lr=1e-3", "path": str(adapter)}))
    assert f"{words} --dtype auto --generation-config vllm --host" in printed.output
    refused = called("serve", str(adapter), "--with", "transformers", "--print")
    assert f"--with transformers cannot serve an adapter, such as {adapter}; merge the adapter first" in refused.output


def test_other_servers_get_their_own_words(run, program, tmp_path, called):
    printed = called("serve", str(run), "--with", "transformers", "--print")
    assert f"transformers serve {run / 'best'} --dtype float32 --host 127.0.0.1 --port 8000\n" in printed.output
    done = accel_sft("serve", str(run), "--with", "llama.cpp", "--gguf", "m.gguf", "--program", str(program))
    words = [program, "-m", "m.gguf", "--alias", run.name, "--jinja", "--host", "127.0.0.1", "--port", "8000"]
    assert "\n".join(map(str, words)) in done.output
    program.write_text("no script")
    failed = called("serve", str(run), "--program", str(program))
    assert f"Error: {program}: cannot be run (Exec format error); name the server's program with" in failed.output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("serve RUN --with llama.cpp", "--with llama.cpp needs --gguf FILE, which `accel-sft merge RUN --gguf FILE` w"),
        ("serve RUN --gguf m.gguf", "--gguf: vllm cannot serve this format; add --with llama.cpp"),
        ("serve RUN --program /no/such", "--with vllm: /no/such cannot be run here; install vLLM into an environment"),
        ("serve /nosuch --with vllm --print", "RUN /nosuch: no such folder; name a run's folder"),
        ("merge RUN", "OUT: name a new folder for the merged weights (accel-sft merge"),
        ("merge RUN --gguf /no/such/m.gguf", "--gguf /no/such/m.gguf: cannot be written (No such file or directory)"),
        ("merge RUN --gguf m.gguf", "llama.cpp's convert_hf_to_gguf.py is not on PATH; clone llama.cpp"),
        ("merge RUN --gguf m.gguf --converter /no/such", "--converter /no/such: no such file"),
    ],
)
def test_what_cannot_be_served_or_converted_is_one_line(run, called, words, problem):
    failed = called(*words.replace("RUN", str(run)).split())
    assert failed.status == 1
    assert problem in failed.output
    assert "Traceback" not in failed.output


def test_gguf_file_is_written_by_the_named_converter(run, adapter, tmp_path):
    converter, file = tmp_path / "convert_hf_to_gguf.py", tmp_path / "m.gguf"
    converter.write_text(CONVERTS)
    finished("merge", str(run), "--gguf", str(file), "--converter", str(tmp_path))
    assert "model.safetensors" in file.read_text()
    assert file.read_text().endswith("auto")
    again = accel_sft("merge", str(run), "--gguf", str(file), "--converter", str(tmp_path))
    assert f"--gguf {file}: already exists; name a new file" in again.output
    merged = tmp_path / "n.gguf"
    arguments = ("--gguf-type", "f32", "--converter", str(converter))
    finished("merge", str(adapter), "--gguf", str(merged), *arguments)
    assert "adapter_config.json" not in merged.read_text()
    assert merged.read_text().endswith("f32")
    none = tmp_path / "o.gguf"
    failed = accel_sft("merge", str(run), "--gguf", str(none), "--gguf-type", "q8_0", "--converter", str(converter))
    assert failed.status == 1
    assert f"{converter} failed: NotImplementedError: no such tokenizer; its output is in" in failed.output
    assert {path.name for path in tmp_path.iterdir()} == {converter.name, file.name, merged.name}


def test_merging_into_folder_and_gguf_makes_no_third_folder(adapter, tmp_path):
    converter, place = tmp_path / "convert_hf_to_gguf.py", tmp_path / "files"
    place.mkdir()
    converter.write_text(CONVERTS.replace("weights.iterdir()", "target.parent.parent.iterdir()"))
    words = (str(tmp_path / "out"), "--gguf", str(place / "m.gguf"), "--converter", str(converter))
    finished("merge", str(adapter), *words)
    (own_folder,) = (place / "m.gguf").read_text().split()[:-1]
    assert own_folder.startswith(".m.gguf.")
