"""Data sets of a hub are read by the library `datasets`, which is optional, from where HF_ENDPOINT says."""

import json
import os
import subprocess
import sys

import pytest
from fake_hub import hub
from parsers import answer
from places import SUPPORT

from accel_sft import UserError, read_rows
from accel_sft.rows.sources import is_dataset_name

CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: data/train.jsonl}
  - {split: test, path: data/test.jsonl}
---
"""
ROWS = [{"question": f"What is {number}?", "answer": f"{number}"} for number in range(40)]
FILES = {
    "README.md": CARD,
    "data/train.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "data/test.jsonl": b'{"question": "What is 99?", "answer": "99"}\n',
}
SCRIPT = """
import json, sys
from parsers import answer
from accel_sft import UserError, read_rows

def tried(name):
    try:
        return list(read_rows(name, answer))
    except UserError as error:
        return str(error)

rows = read_rows("org/sums", answer)
held = read_rows("org/sums", answer, split="validation")
print(json.dumps({name: tried(name) for name in sys.argv[1:]} | {"places": [str(p) for p in rows.places([0, 2])],
                 "notes": rows.notes, "held": [*held, *held.notes],
                 "fingerprints": [rows.fingerprint, read_rows("org/sums:main:train", answer).fingerprint]}))
"""


def test_data_set_is_read_from_the_hub_at_hf_endpoint(tmp_path):
    names = ["org/sums", "org/sums:test", "org/sums:main:test", "org/none", "org/sums:dev", "org/sums:other:test"]
    names += ["org/sums:train[:2]", "org/sums:main:train[-1:]", "org/sums@v1:test", "org/sums@v0:test"]
    with hub("org/sums", FILES) as address:
        paths = os.pathsep.join([str(SUPPORT), *sys.path])
        home = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "ACCEL_SFT_CACHE": str(tmp_path / "cache")}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | home
        how = {"env": {**environment, "PYTHONPATH": paths}, "cwd": tmp_path, "capture_output": True, "text": True}
        done = subprocess.run([sys.executable, "-c", SCRIPT, *names], **how)
    assert done.returncode == 0, done.stderr[-4000:]
    printed = json.loads(done.stdout)
    assert printed["org/sums"] == [row["answer"] for row in ROWS]
    assert printed["org/sums:test"] == printed["org/sums:main:test"] == ["99"]
    assert printed["places"] == ["org/sums row 1", "org/sums row 3"]
    assert len(set(printed["fingerprints"])) == 1
    line = "org/sums: the split {} is read, not {}; to use it: --validation-file org/sums:{}"
    assert printed["notes"] == [line.format("train", "test", "test")]
    assert printed["held"] == ["99", "org/sums: the split test is read"]
    assert "org/none: not a file or folder, and the hub gives no data set org/none (Repo" in printed["org/none"]
    assert 'split dev (ValueError: Unknown split "dev"' in printed["org/sums:dev"]
    assert "write ORG/NAME:SPLIT, or ORG/NAME:CONFIG:SPLIT" in printed["org/sums:other:test"]
    assert all("\n" not in printed[name] for name in names[3:6])
    answers = [row["answer"] for row in ROWS]
    assert [printed[name] for name in names[6:]] == [answers[:2], answers[-1:], ["99"], printed["org/sums@v0:test"]]
    assert printed["org/sums@v0:test"].startswith("org/sums@v0:test: not a file or folder, and the hub gives no")


def test_without_the_library_a_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"^org/sums: not a file or folder; .* data set of the hub: pip install datasets$"
    ):
        read_rows("org/sums", answer)


def test_what_looks_like_a_path_is_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    names = ["org/name", "org/name:split", "org/name.v2:config:split", "org/name:train[:10%]", "o/n:c:s[5:-5]"]
    paths = ["data/rows", "org/rows.jsonl", "org/rows.csv.gz", "rows", "/org/name", "./org/name", "a/b/c", "org/name:"]
    assert [is_dataset_name(name) for name in names] == [True] * 5
    assert [is_dataset_name(name) for name in (*paths, "org/name:[:5]", "")] == [False] * 10
