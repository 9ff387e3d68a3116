"""Of a folder one split is read, by the names that `datasets` uses; a line names what is not read. Data sets of a hub
are read by that library, which is optional, from where HF_ENDPOINT says."""

import gzip
import json
import os
import subprocess
import sys

import pytest
from fake_hub import COMMIT, hub
from parsers import answer
from places import SUPPORT

from accel_sft import UserError, read_rows
from accel_sft.rows.formats import arrow_rows
from accel_sft.rows.sources import absent_rows, is_dataset_name

pytestmark = pytest.mark.usefixtures("own_cache")


def written(folder, *names):
    """Files with one row each, whose answer is the file's name; returns the folder's name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"answer": name}) + "\n")
    return str(folder)


SHARDS = ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]
SPLITS = {
    "a name alone": (["train.jsonl", "test.jsonl"], {"train": ["train.jsonl"], "test": ["test.jsonl"]}),
    "shards": (
        [*SHARDS, "data/dev-00000-of-00001.jsonl"],
        {"train": SHARDS, "dev": ["data/dev-00000-of-00001.jsonl"]},
    ),
    "folders, one of both": (
        ["train/a.jsonl", "dev/train.jsonl", "train_test_split/train.jsonl", "train_test_split/x.eval.jsonl"],
        {
            "train": ["train/a.jsonl", "train_test_split/train.jsonl"],
            "validation": ["dev/train.jsonl"],
            "test": ["train_test_split/x.eval.jsonl"],
        },
    ),
    "of a table's partitions": (["split=train/a.jsonl"], {"train": ["split=train/a.jsonl"]}),
    "others train": (["a.jsonl", "b 2.jsonl", "Test-1.jsonl"], {"train": ["a.jsonl", "b 2.jsonl"]}),
    "no such words": (
        ["latest.jsonl", "device.jsonl", "unittest.jsonl", "latestData.jsonl"],
        {"train": ["device.jsonl", "latest.jsonl", "latestData.jsonl", "unittest.jsonl"]},
    ),
    "words in one": (
        ["train.jsonl", "devset.jsonl", "validset2.jsonl", "TestData.jsonl", "held-out_1.jsonl", "train_eval.jsonl"],
        {
            "train": ["train.jsonl"],
            "validation": ["devset.jsonl", "validset2.jsonl"],
            "test": ["TestData.jsonl", "held-out_1.jsonl", "train_eval.jsonl"],
        },
    ),
}


@pytest.mark.parametrize(("names", "splits"), SPLITS.values(), ids=SPLITS)
def test_splits_are_distinguished_by_their_names(tmp_path, names, splits):
    folder = written(tmp_path / "ds", *names)
    assert list(read_rows(folder, answer)) == splits["train"]
    for split, expected in splits.items():
        assert absent_rows(f"{folder}:{split}", "--train-file") == []
        rows = read_rows(f"{folder}:{split}", answer)
        assert (list(rows), rows.notes) == (expected, [])


def test_splits_that_are_not_read_are_offered(tmp_path):
    folder = written(tmp_path / "ds", "train.jsonl", "test.jsonl", "val.jsonl")
    assert read_rows(folder, answer).notes == [
        f"{folder}: the split train is read, not test or validation; to evaluate: --validation-file {folder}:validation"
    ]
    rows = read_rows(folder, answer, split="validation")
    assert list(rows) == ["val.jsonl"]
    assert rows.notes == [f"{folder}: the split validation is read"]
    (tmp_path / "ds" / "val.jsonl").unlink()
    assert list(read_rows(folder, answer, split="validation")) == ["test.jsonl"]
    (tmp_path / "ds" / "test.jsonl").unlink()
    rows = read_rows(folder, answer, split="validation")
    assert (list(rows), rows.notes) == (["train.jsonl"], [])


def test_a_folder_without_the_split_is_refused_by_name(tmp_path):
    folder = written(tmp_path / "ds", "test.jsonl", "dev.jsonl")
    with pytest.raises(UserError, match=f"{folder}: has no split train, but test, validation; name one: {folder}:test"):
        read_rows(folder, answer)
    with pytest.raises(UserError, match=f"{folder}: has no split dev; it has test, validation"):
        read_rows(f"{folder}:dev", answer)
    shards = written(tmp_path / "hub", "data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl")
    for use, near in (("train", "train_sft"), ("validation", "test_sft")):
        with pytest.raises(UserError, match=f"but test_sft, train_sft; name one: {shards}:{near}"):
            read_rows(shards, answer, split=use)
    assert list(read_rows(f"{shards}:train_sft", answer)) == ["data/train_sft-00000-of-00001.jsonl"]


def test_files_beside_the_shards_of_a_data_set_are_named(tmp_path):
    folder = written(tmp_path / "ds", "data/train-00000-of-00001.jsonl", "raw.jsonl", "z.jsonl")
    rows = read_rows(folder, answer)
    assert list(rows) == ["data/train-00000-of-00001.jsonl"]
    assert rows.notes == [f"{folder}: not read (in none of its splits): raw.jsonl, and 1 more"]


def test_files_of_formats_that_are_not_read_are_named(tmp_path):
    beside = ("d.jsonl.zip", "e.jsonl.bak", "a.png", "README.md", "x.txt", "config.json", "dataset_infos.json")
    folder = written(tmp_path / "ds", "a.jsonl", "b.jl", "c.jsonlines", *beside)
    rows = read_rows(folder, answer)
    assert list(rows) == ["a.jsonl", "b.jl", "c.jsonlines"]
    assert rows.notes == [f"{folder}: not read (unknown format): d.jsonl.zip, and 1 more"]


def test_configurations_of_a_card_are_named(tmp_path):
    folder = written(tmp_path / "ds", "main/train.jsonl", "other/train.jsonl")
    (tmp_path / "ds" / "README.md").write_text("---\nconfigs:\n- config_name: main\n- config_name: other\n---\n")
    assert read_rows(folder, answer).notes == [
        f"{folder}: all its configurations are read: main, other; for one, name its files or folder"
    ]
    (tmp_path / "ds" / "README.md").write_text("---\nconfigs:\n- config_name: main\n---\n")
    assert read_rows(folder, answer).notes == []


PATTERNS = {
    "gold.jsonl": ["gold.jsonl"],
    "'*.jsonl'": ["en.jsonl", "gold.jsonl", "raw.jsonl"],
    "'*/?.jsonl'": ["more/a.jsonl"],
    "'**/[er]*.jsonl'": ["en.jsonl", "raw.jsonl"],
    "'more/**'": ["more/a.jsonl"],
}
"""Files of a card, and those that are read."""


def test_splits_of_a_card_are_read_as_it_says(tmp_path):
    folder = written(tmp_path / "ds", "en.jsonl", "gold.jsonl", "more/a.jsonl", "raw.jsonl")
    card = tmp_path / "ds" / "README.md"
    files = "[{split: train, path: en.jsonl}, {split: test, path: [gold*, ./more/*]}]"
    card.write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {files}\n---\n")
    rows = read_rows(folder, answer)
    assert (list(rows), rows.notes[-1]) == (["en.jsonl"], f"{folder}: not read (in none of its splits): raw.jsonl")
    assert list(read_rows(folder, answer, split="validation")) == ["gold.jsonl", "more/a.jsonl"]
    for content in ("- data_files: none.jsonl", "{", "- data_files: raw.jsonl\ndate: 2001-13-45", "!!bool x"):
        card.write_text(f"---\nconfigs:\n{content}\n---\n")
        rows = read_rows(folder, answer)
        assert len(rows) == 4, "the card names no file that is there, or is damaged"
        assert any("the files that it names do not exist" in note for note in rows.notes) == ("none.jsonl" in content)
    for pattern, expected in PATTERNS.items():
        card.write_text(f"---\nconfigs:\n- data_files: {pattern}\n---\n")
        assert list(read_rows(folder, answer)) == expected, pattern


def test_a_file_in_two_splits_of_a_card_is_refused(tmp_path):
    folder = written(tmp_path / "ds", "a.jsonl", "b.jsonl")
    configs = "- {data_files: [{split: train, path: a.jsonl}]}\n- {data_files: [{split: test, path: '*.jsonl'}]}"
    (tmp_path / "ds" / "README.md").write_text(f"---\nconfigs:\n{configs}\n---\n")
    with pytest.raises(
        UserError, match=r"README.md: lists a.jsonl in two splits, train and test; name the files of one"
    ):
        read_rows(folder, answer)


def test_a_copy_of_a_file_is_not_read_again(tmp_path):
    rows = "".join(json.dumps({"answer": str(n)}) + "\n" for n in range(3))
    for name in ("train.jsonl", "train (1).jsonl"):
        (tmp_path / name).write_text(rows)
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "other.jsonl").write_text(rows.replace("2", "3"))
    copied = read_rows(tmp_path, answer)
    assert list(copied) == [*"013", *"012"]
    assert copied.notes == [
        f"{tmp_path}/train.jsonl{end}: not read (the same rows as in {tmp_path}/train (1).jsonl)" for end in ("", ".gz")
    ]
    assert copied.sources == [tmp_path.name]
    assert len(read_rows(f"{tmp_path}/train.jsonl,{tmp_path}/train (1).jsonl", answer)) == 6, "what is named is read"


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path, "a.jsonl", "b.jsonl")
    assert absent_rows("~/a.jsonl,~/b.jsonl", "--train-file") == []
    assert list(read_rows("~/a.jsonl,~/b.jsonl", answer)) == ["a.jsonl", "b.jsonl"]


def test_saved_data_sets_keep_images_and_lose_arrow_nulls(tmp_path):
    datasets = pytest.importorskip("datasets")

    def row(call, content):
        return {"answer": "x", "call": call, "none": {"unit": None}, "at": {"bytes": content, "path": "a.png"}}

    calls = [{"city": "Paris"}, {"expr": "1"}]
    rows = [row(call, b"\xff") for call in calls]
    saved = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "ds")
    saved.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "ds" / "train" / "cache-0a.arrow").write_bytes(b"of map()")
    expected = [row(call, {"base64": "/w=="}) for call in calls]
    assert list(read_rows(tmp_path / "ds", dict)) == expected
    assert list(read_rows(f"{tmp_path}/ds:test", dict)) == expected[:1]
    assert list(read_rows(tmp_path / "a.parquet", dict)) == expected
    (tmp_path / "ds" / "train" / "data-00000-of-00001.arrow").write_bytes(b"ARROW")
    with pytest.raises(UserError, match=r"arrow: not Parquet or Arrow after row 0 \("):
        read_rows(tmp_path / "ds", dict)


def test_classes_of_a_data_set_are_read_by_name(tmp_path):
    datasets = pytest.importorskip("datasets")
    classes = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"answer": classes, "all": datasets.List(classes), "n": datasets.Value("int64")})
    rows = datasets.Dataset.from_list(
        [{"answer": 1, "all": [0, 1], "n": 1}, {"answer": -1, "all": [], "n": 0}], features=features
    )
    rows.to_parquet(tmp_path / "a.parquet")
    rows.save_to_disk(tmp_path / "saved")
    hub = [row.value for row in arrow_rows(rows.with_format("arrow").iter(1), "hub")]
    expected = [{"answer": "good", "all": ["bad", "good"], "n": 1}, {"answer": None, "all": [], "n": 0}]
    for got in (read_rows(tmp_path / "a.parquet", dict), read_rows(tmp_path / "saved", dict), hub):
        assert list(got) == expected


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
        how["env"]["HF_HUB_OFFLINE"] = "1"
        pinned = ["org/sums@v1:test", f"org/sums@{COMMIT}:test", "org/sums@v0:test"]
        offline = subprocess.run([sys.executable, "-c", SCRIPT, *pinned], **how)
    assert done.returncode == offline.returncode == 0, done.stderr[-4000:] + offline.stderr[-4000:]
    printed, cached = json.loads(done.stdout), json.loads(offline.stdout)
    assert printed["org/sums"] == [row["answer"] for row in ROWS]
    assert printed["org/sums:test"] == printed["org/sums:main:test"] == ["99"]
    assert printed["places"] == ["org/sums row 1", "org/sums row 3"]
    assert len(set(printed["fingerprints"])) == 1
    line = "org/sums: the split {} is read, not {}; to evaluate: --validation-file org/sums:{}"
    assert printed["notes"] == [line.format("train", "test", "test")]
    assert printed["held"] == ["99", "org/sums: the split test is read"]
    assert "org/none: not a file or folder, and the hub gives no data set org/none (Repo" in printed["org/none"]
    assert 'split dev (ValueError: Unknown split "dev"' in printed["org/sums:dev"]
    assert "write ORG/NAME:SPLIT, or ORG/NAME:CONFIG:SPLIT" in printed["org/sums:other:test"]
    assert all("\n" not in printed[name] for name in names[3:6])
    answers = [row["answer"] for row in ROWS]
    assert [printed[name] for name in names[6:]] == [answers[:2], answers[-1:], ["99"], printed["org/sums@v0:test"]]
    assert printed["org/sums@v0:test"].startswith("org/sums@v0:test: not a file or folder, and the hub gives no")
    assert [cached[name] for name in pinned[:2]] == [["99"], ["99"]]
    assert f"no revision v0 was found; the newest one in the cache is {COMMIT}" in cached["org/sums@v0:test"]


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
