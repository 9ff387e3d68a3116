"""A checkpoint is whole or passed over: no changed, missing or cut byte goes unseen, and no kill leaves half of one."""

from __future__ import annotations

import json
import os
import random
import shutil

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from test_laws import layout

from accel_sft.checkpoint import shards
from accel_sft.checkpoint.checkpoint import newest, settle
from accel_sft.io import manifest
from accel_sft.io.run_dir import RunDir

FLIPS = 1000


@pytest.fixture(scope="module")
def checkpoints(launched, tmp_path_factory):
    """A run's folder with the checkpoints of steps 3 and 6."""
    run_dir = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(layout(launched, "plain").run_dir / "checkpoints", run_dir / "checkpoints")
    return run_dir


def flipped(path, at, bit):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def test_whole_ones_are_taken(checkpoints):
    (checkpoints / "checkpoints" / "step-000003-of-mine").mkdir()
    path, skipped = newest(RunDir(checkpoints), "auto")
    assert (path.name, skipped) == ("step-000006", [])
    assert (checkpoints / "checkpoints" / "latest").read_text() == "step-000006\n"


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


def test_a_flipped_bit_anywhere_is_found_and_the_checkpoint_before_is_taken(checkpoints):
    folder, draw = checkpoints / "checkpoints" / "step-000006", random.Random(1)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != manifest.MANIFEST]
    sizes = [path.stat().st_size for path in files]
    for number in range(FLIPS):
        path = files[number] if number < len(files) else draw.choices(files, sizes)[0]
        at, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        flipped(path, at, bit)
        with pytest.raises(manifest.Damaged, match="other bytes than were written"):
            manifest.verify(folder)
        if number % 100 == 0:
            found, (line,) = newest(RunDir(checkpoints), "auto")
            assert found.name == "step-000003"
            assert f"{folder}: passed over: {path.relative_to(folder)} has other bytes" in line
        flipped(path, at, bit)
    assert newest(RunDir(checkpoints), "auto")[0] == folder


def test_every_file_that_was_cut_or_is_gone_is_named(checkpoints):
    folder, draw = checkpoints / "checkpoints" / "step-000006", random.Random(2)
    for path in [path for path in sorted(folder.rglob("*")) if path.is_file()]:
        content = path.read_bytes()
        os.truncate(path, draw.randrange(len(content)))
        found, (line,) = newest(RunDir(checkpoints), "auto")
        assert found.name == "step-000003"
        assert f"passed over: {path.relative_to(folder)}" in line
        path.unlink()
        found, (line,) = newest(RunDir(checkpoints), "auto")
        assert found.name == "step-000003"
        assert path.name in line
        path.write_bytes(content)
    assert newest(RunDir(checkpoints), "auto")[0] == folder


def test_a_file_that_the_manifest_does_not_name_is_damage_and_is_never_read(checkpoints):
    folder, other = (checkpoints / "checkpoints" / name for name in ("step-000006", "step-000003"))
    weights = next(path for path in manifest.files(folder) if path.suffix == ".safetensors")
    for stray in (folder / "rank-0002-000.safetensors", folder / "link.safetensors", folder / "deeper" / "notes.txt"):
        stray.parent.mkdir(exist_ok=True)
        if stray.name.startswith("link"):
            stray.symlink_to(other / weights.name)
        else:
            shutil.copy(other / weights.name, stray)
        found, (line,) = newest(RunDir(checkpoints), "auto")
        assert found.name == "step-000003"
        assert f"passed over: {stray.relative_to(folder)} is not in manifest.json" in line
        # one that comes after the check is not opened all the same
        assert stray not in manifest.files(folder)
        stray.unlink()
    assert newest(RunDir(checkpoints), "auto")[0] == folder


def test_elements_that_another_runs_file_would_bring_do_not_reach_the_weights(tmp_path):
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    shards.write(accelerator, model, optimizer, tmp_path)
    manifest.write(tmp_path, {})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stray = {key: tensor + 1 for path in manifest.files(tmp_path) for key, tensor in load_file(path).items()}
    save_file(stray, tmp_path / "rank-0001-000.safetensors")
    shards.read(accelerator, model, optimizer, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_a_kill_amid_a_replacement_left_is_put_right(tmp_path):
    for name in (".best.outgoing", ".final.outgoing", "final", ".best.partial", "checkpoints/.step-000003.outgoing"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    settle(RunDir(tmp_path))
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("file")}
    assert found == {
        "best/file": ".best.outgoing",
        "final/file": "final",
        "checkpoints/step-000003/file": "checkpoints/.step-000003.outgoing",
    }


def test_a_manifest_that_is_no_manifest_is_damage(tmp_path):
    for content in (b"", b"null", b"[]", b"\xff", b'{"content": 1, "sha256": 2}', json.dumps({"content": {}}).encode()):
        (tmp_path / manifest.MANIFEST).write_bytes(content)
        with pytest.raises(manifest.Damaged):
            manifest.verify(tmp_path)
