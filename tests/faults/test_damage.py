"""A checkpoint is whole or passed over: no changed, missing or cut byte goes unseen, and no kill leaves half of one."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from checkpoints import saved
from reference_job import layout
from safetensors.torch import save_file

from accel_sft.api.errors import UserError
from accel_sft.checkpoint import shards
from accel_sft.checkpoint.checkpoint import load, newest, settle
from accel_sft.io import manifest
from accel_sft.io.files import begin_folder, put_in_place
from accel_sft.io.run_dir import RunDir

FLIPS = 60


@pytest.fixture(scope="module")
def checkpoints(launched, tmp_path_factory):
    """A run's folder with the checkpoints of steps 3 and 6."""
    run_dir = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(layout(launched, "plain").run_dir / "checkpoints", run_dir / "checkpoints")
    return run_dir


@pytest.mark.parametrize("size", [0, 2 * manifest._BLOCK + 5])
def test_file_has_the_bytes_that_were_hashed(tmp_path, size):
    content = random.Random(size).randbytes(size)
    pieces = [memoryview(content)[start : start + 3 * 2**18] for start in range(0, size, 3 * 2**18)]
    before = os.umask(0o022)
    written = manifest.write_hashed(tmp_path / "file", [memoryview(b""), *pieces])
    os.umask(before)
    assert written == [size, hashlib.sha256(content).hexdigest()]
    assert (tmp_path / "file").read_bytes() == content
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
    if size and Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space left"):
            manifest.write_hashed(Path("/dev/full"), pieces)


def flipped(path, at, bit):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def test_every_byte_of_the_manifest_counts(checkpoints):
    folder, draw = checkpoints / "checkpoints" / "step-000006", random.Random(0)
    its_manifest = folder / manifest.MANIFEST
    for at in range(its_manifest.stat().st_size):
        bit = draw.randrange(8)
        flipped(its_manifest, at, bit)
        with pytest.raises(manifest.Damaged):
            manifest.verify(folder)
        flipped(its_manifest, at, bit)
    manifest.verify(folder)


def test_flipped_bit_makes_resume_take_the_checkpoint_before(checkpoints):
    folder, draw = checkpoints / "checkpoints" / "step-000006", random.Random(1)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != manifest.MANIFEST]
    sizes = [path.stat().st_size for path in files]
    (folder.parent / "step-000003-of-mine").mkdir()
    assert (folder.parent / "latest").read_text() == "step-000006\n"
    for number in range(FLIPS):
        path = files[number] if number < len(files) else draw.choices(files, sizes)[0]
        at, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        flipped(path, at, bit)
        with pytest.raises(manifest.Damaged, match="has changed since it was written"):
            manifest.verify(folder)
        if number % 20 == 0:
            chosen, (line,) = newest(RunDir(checkpoints), "auto")
            assert chosen.name == "step-000003"
            assert f"{folder}: skipped as damaged: {path.relative_to(folder)} has changed since it was written" in line
        flipped(path, at, bit)
    assert newest(RunDir(checkpoints), "auto") == (folder, [])


def test_every_file_that_was_cut_or_is_gone_is_named(checkpoints):
    folder, draw = checkpoints / "checkpoints" / "step-000006", random.Random(2)
    for path in [path for path in sorted(folder.rglob("*")) if path.is_file()]:
        content = path.read_bytes()
        for damage in (functools.partial(os.truncate, path, draw.randrange(len(content))), path.unlink):
            damage()
            chosen, (line,) = newest(RunDir(checkpoints), "auto")
            assert chosen.name == "step-000003"
            assert path.name in line
        path.write_bytes(content)
    assert newest(RunDir(checkpoints), "auto")[0] == folder


def test_file_outside_the_manifest_is_damage_and_never_read(checkpoints):
    folder, other = (checkpoints / "checkpoints" / name for name in ("step-000006", "step-000003"))
    weights = next(path for path in manifest.paths(folder) if path.suffix == ".safetensors")
    for stray in (folder / "rank-0002-000.safetensors", folder / "deeper" / "notes.txt"):
        stray.parent.mkdir(exist_ok=True)
        shutil.copy(other / weights.name, stray)
        _, (line,) = newest(RunDir(checkpoints), "auto")
        assert f"skipped as damaged: {stray.relative_to(folder)} is not in manifest.json" in line
        # one that comes after the check is not opened all the same
        assert stray not in manifest.paths(folder)
        stray.unlink()
    assert newest(RunDir(checkpoints), "auto")[0] == folder


def test_what_a_kill_amid_a_replacement_left_is_put_right(tmp_path):
    for name in (".best.outgoing", ".final.outgoing", "final", ".best.partial", "checkpoints/.step-000003.outgoing"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    settle(RunDir(tmp_path))
    contents = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("file")}
    assert contents == {
        "best/file": ".best.outgoing",
        "final/file": "final",
        "checkpoints/step-000003/file": "checkpoints/.step-000003.outgoing",
    }


def test_linked_folder_is_replaced_and_repaired_after_a_kill(tmp_path):
    run_dir, elsewhere = RunDir(tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "old").touch()
    (begin_folder(run_dir.best) / "new").touch()
    run_dir.best.symlink_to(elsewhere)
    put_in_place(run_dir.path / ".best.partial", run_dir.best)
    assert [path.name for path in run_dir.path.iterdir()] == ["best"]
    (run_dir.path / ".best.outgoing").symlink_to(elsewhere)
    settle(run_dir)
    assert [str(path.relative_to(run_dir.path)) for path in run_dir.path.rglob("*")] == ["best", "best/new"]
    assert (elsewhere / "old").exists()


def sealed(folder, files):
    """A manifest that fits itself, whatever it names."""
    (folder / manifest.MANIFEST).write_text(manifest._text({"files": files, "about": {}}))


@pytest.mark.parametrize("name", ["/etc/hostname", "a/../../outside", "link", "pipe"])
def test_manifest_leads_only_to_files_of_its_folder(tmp_path, name):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "a").mkdir(parents=True)
    outside.write_bytes(b"mine")
    (folder / "link").symlink_to(outside) if name == "link" else None
    os.mkfifo(folder / "pipe") if name == "pipe" else None
    sealed(folder, {name: [0 if name == "pipe" else 4, manifest._digest(outside)]})
    with pytest.raises(manifest.Damaged, match=r"not a regular file|has entries that no run writes"):
        manifest.verify(folder)


NO_MANIFESTS = [b"", b"[]", b"\xff", b'{"content": 1, "sha256": 2}', b'{"content": {}}']
ODD_FILES = ([], {"a": 1}, {"a": ["4", "x"]}, {"a": [4, None]})


@pytest.mark.parametrize("content", [*NO_MANIFESTS, *(manifest._text({"files": f, "about": {}}) for f in ODD_FILES)])
def test_file_that_is_no_manifest_is_damage(tmp_path, content):
    (tmp_path / manifest.MANIFEST).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(manifest.Damaged):
        manifest.verify(tmp_path)


ODD = [b"", (2**62).to_bytes(8, "little"), b"\x02" + b"\x00" * 7 + b"[]"]
ODD += [{"weights": torch.ones(2)}, {"weights:0:weight": torch.tensor(1.0)}]


@pytest.mark.parametrize("content", ODD, ids=str)
def test_resealed_checkpoint_of_other_content_is_one_line(tmp_path, content):
    file = tmp_path / "rank-0000-000.safetensors"
    save_file(content, file) if isinstance(content, dict) else file.write_bytes(content)
    manifest.write(tmp_path, {})
    model = torch.nn.Linear(3, 2)
    with pytest.raises(UserError, match="not a file that accel_sft wrote"):
        shards.read(Accelerator(cpu=True), model, torch.optim.AdamW(model.parameters()), tmp_path)
    with pytest.raises(UserError, match="not a checkpoint of accel_sft"):
        load(Accelerator(cpu=True), model, torch.optim.AdamW(model.parameters()), tmp_path)


def test_what_others_put_beside_a_runs_files_harms_no_resume(checkpoints, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    shutil.copytree(checkpoints, run_dir.path)
    run_dir.samples.mkdir()
    for name in ("step-000004.jsonl", "step-000004 copy.jsonl", "step-.jsonl", "step-000012.jsonl"):
        (run_dir.samples / name).touch()
    assert [path.name for path in run_dir.all_answers()] == ["step-000004.jsonl", "step-000012.jsonl"]
    (tmp_path / "elsewhere").mkdir()
    run_dir.checkpoint(1).symlink_to(tmp_path / "elsewhere")
    run_dir.checkpoint(2).touch()
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(3, 2)
    saved(accelerator, model, torch.optim.AdamW(model.parameters()), run_dir, {"step": 9}, keep="2")
    assert [path.name for path in run_dir.all_checkpoints()] == ["step-000006", "step-000009"]
    assert (tmp_path / "elsewhere").is_dir()
