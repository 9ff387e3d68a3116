"""Tokens are made once: kept by content, whole or not used, equal to those made on the spot, the same on all ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate import Accelerator
from chats import jsonl
from limits import limit
from models import Given, Sums, encode
from transformers import AutoTokenizer

from accel_sft import UserError
from accel_sft.chat.encoded import Rules, end_of_turn_ids
from accel_sft.data import tokenization
from accel_sft.data.token_store import IDS
from accel_sft.data.tokenization import KIND, SplitEncoder
from accel_sft.io import cache, manifest
from accel_sft.launch import collectives
from accel_sft_chat import Chat
from accel_sft_math import Math

EXAMPLES = list(range(20, 1400, 3))


pytestmark = pytest.mark.usefixtures("own_cache")


def rules(tokenizer, **changes):
    return dataclasses.replace(Rules(frozenset(end_of_turn_ids(tokenizer)), 512, "drop"), **changes)


def encoder(tokenizer, task=None, **changes):
    return SplitEncoder(Accelerator(cpu=True), tokenizer, task or Sums(), rules(tokenizer, **changes))


def on_the_spot(tokenizer):
    return encode(tokenizer, Sums(), EXAMPLES, "train", **vars(rules(tokenizer))).kept


def entries(folder):
    return sorted(path.name for path in (folder / KIND).iterdir())


@pytest.fixture
def two_ranks(tokenizer, monkeypatch):
    """Encodes each rank's rows, in a thread for each rank; the results, an error where there was one."""
    barrier, mine, rank = threading.Barrier(2, timeout=limit(60)), {}, threading.local()

    def gather(objects):
        barrier.wait()
        mine[rank.number] = objects
        barrier.wait()
        return mine[0] + mine[1]

    monkeypatch.setattr(collectives, "gather_object", gather)
    # else every row may be read first; and Python 3.11 parses in one thread only
    monkeypatch.setattr(tokenization, "code_fingerprint", lambda *values: "known")

    def run(*rows, task=None):
        def encoded(number):
            rank.number = number
            place = SimpleNamespace(process_index=number, local_process_index=number, is_main_process=number == 0)
            try:
                return SplitEncoder(place, tokenizer, task or Sums(), rules(tokenizer))(rows[number], "train")
            except UserError as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            return tuple(pool.map(encoded, range(2)))

    return run


class Drawn(list):
    """Rows with a fingerprint that is another one in each process, as datasets' is where it cannot be computed."""

    @property
    def fingerprint(self):
        return str(id(self))


def test_ranks_whose_fingerprints_were_drawn_at_random_compare_their_rows(two_ranks, tokenizer):
    first, second = two_ranks(Drawn(EXAMPLES), Drawn(EXAMPLES))
    assert list(first.kept) == list(second.kept) == on_the_spot(tokenizer)


class Named(list):
    """Rows that say they are the same on each rank, whatever they are."""

    fingerprint = "named"


TURNS = [{"role": "user", "content": "5="}]


@pytest.mark.parametrize(
    ("nonsense", "message"),
    [
        ((None, "5"), "messages() gave 'None'"),
        ((), "the task failed: IndexError: tuple index out of range"),
        ((TURNS, "6"), "returned something else on a second call"),
    ],
)
def test_difference_of_a_task_between_ranks_is_refused_everywhere(two_ranks, nonsense, message):
    good = [(TURNS, "5")] * 4
    for bad in (Named([*good[1:], nonsense]), Named([nonsense, *good[1:]])):  # in rank 1's share, and in rank 0's
        first, second = two_ranks(Named(good), bad, task=Given())
        assert isinstance(first, UserError)
        assert first.problems == second.problems
        assert message in str(first)


@pytest.mark.parametrize("other", [Drawn(EXAMPLES[1:]), Named([*EXAMPLES, EXAMPLES[0]])], ids=["other", "more"])
def test_ranks_with_other_or_more_rows_are_refused(two_ranks, other):
    for error in two_ranks(type(other)(EXAMPLES), other):
        assert "ranks got different examples" in str(error)


@pytest.mark.parametrize("truncation", ["drop", "right"])
def test_stored_examples_are_those_encoded_on_the_spot(tokenizer, truncation):
    settings = rules(tokenizer, max_length=41, truncation=truncation)
    direct = encode(tokenizer, Sums(), EXAMPLES, "train", **dataclasses.asdict(settings))
    stored = encoder(tokenizer, **dataclasses.asdict(settings))(EXAMPLES, "train")
    assert len(EXAMPLES) > len(direct.kept) > 100 or direct.cut
    assert list(stored.kept) == direct.kept
    assert (stored.left_out, stored.cut, stored.lines()) == (direct.left_out, direct.cut, direct.lines())
    assert stored.kept.lengths.tolist() == [len(example.input_ids) for example in direct.kept]
    assert stored.kept.supervised.tolist() == [example.supervised_tokens for example in direct.kept]
    assert stored.kept[-1] == stored.kept[np.int64(len(direct.kept) - 1)] == direct.kept[-1]
    assert stored.kept[5::40] == direct.kept[5::40]
    assert stored.kept[:3] == stored.kept.some(10**6)[:3] == direct.kept[:3]
    assert len(stored.kept.some(20)) < 30
    gone = next((index for indices in direct.left_out.values() for index in indices), None)
    assert gone is None or stored.kept.of(gone) == []
    with pytest.raises(IndexError):
        stored.kept[len(direct.kept)]


def test_what_is_left_out_is_named_by_file_and_line(tokenizer, tmp_path):
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    long = [turns[0], {"role": "assistant", "content": "2 " * 600}]
    files = [
        jsonl(tmp_path / name, [{"messages": row} for row in rows])
        for name, rows in (("a.jsonl", [turns, long]), ("b.jsonl", [turns, turns, long]))
    ]
    task = Chat(train_file=",".join(files), validation_file=files[0])
    examples = task.dataset("train")
    line = f"train: 2 left out: longer than --max-length 512 ({files[0]}:2, {files[1]}:3)"
    for _ in "made", "from the cache":
        assert encoder(tokenizer, task)(examples, "train").lines()[-1] == line
    with pytest.raises(UserError) as raised:
        encoder(tokenizer, task, truncation="error")(examples, "train")
    assert line in raised.value.problems


def test_parts_of_which_nothing_is_left_harm_no_other(tokenizer, monkeypatch):
    monkeypatch.setattr("accel_sft.chat.encode._PART_EXAMPLES", 3)
    blank = {"target": lambda self, example: "" if example < 60 or example > 1300 else str(example)}
    task = type("PartlyBlank", (Sums,), blank)()
    direct = encode(tokenizer, task, EXAMPLES, "train", **vars(rules(tokenizer)))
    stored = encoder(tokenizer, task)(EXAMPLES, "train")
    assert list(stored.kept) == direct.kept
    assert stored.left_out == direct.left_out == {"left out: the answer is empty": [*range(14), *range(427, 460)]}
    assert [stored.kept.of(index) for index in (0, 14, 426, 427)] == [[], direct.kept[:1], direct.kept[-1:], []]


def test_a_second_start_reads_what_the_first_kept(tokenizer, own_cache):
    first = encoder(tokenizer)(EXAMPLES, "train")
    (name,) = entries(own_cache)
    written = (own_cache / KIND / name / IDS).stat()
    second = encoder(tokenizer)(EXAMPLES, "train")
    assert second.lines() == [f"train: {len(EXAMPLES):,} examples, tokens from the cache"]
    assert (own_cache / KIND / name / IDS).stat() == written
    assert second.kept.fingerprint == first.kept.fingerprint
    assert list(second.kept) == list(first.kept)
    assert first.lines() == []


def test_what_changes_the_tokens_misses_the_cache(tokenizer, tmp_path):
    other_template, other_vocabulary = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    other_template.chat_template = tokenizer.chat_template.replace("\n", " ")
    other_vocabulary.add_tokens(["the answer"])
    shorter = type("Shorter", (Sums,), {"target": lambda self, example: str(example)})()
    keys = [encoder(tokenizer).key(rows, "train") for rows in (EXAMPLES, EXAMPLES[:-1], EXAMPLES[::-1])]
    changed = ({"max_length": 511}, {"truncation": "right"}, {"eos_ids": frozenset()}, {"task": shorter})
    others = [encoder(tokenizer, **change) for change in changed]
    keys += [other.key(EXAMPLES, "train") for other in (*others, encoder(other_template), encoder(other_vocabulary))]
    path = tmp_path / "rows.json"
    for output in ("1 + 4", "2 + 3"):
        path.write_text(json.dumps([{"instruction": "5=", "output": output}]))
        for prefix in ("", "1 + ") if output == "1 + 4" else ("",):
            task = Math(train_file=str(path), validation_file=str(path), answer_prefix=prefix)
            rows = task._validation if not prefix else []
            keys.append(encoder(tokenizer, task).key(rows, "train"))
    assert len(set(keys)) == len(keys)
    assert keys[0] == encoder(AutoTokenizer.from_pretrained(tokenizer.name_or_path)).key(list(EXAMPLES), "train")


def test_own_files_that_cannot_be_known_are_refused(tokenizer, monkeypatch):
    monkeypatch.setattr("accel_sft.rows.fingerprint._MAX_BYTES", 10)
    with pytest.raises(UserError, match="some files of accel_sft"):
        encoder(tokenizer)


def test_what_has_a_fingerprint_is_not_read_to_be_known(tokenizer):
    class Unread(list):
        def __init__(self, name, fingerprint):
            super().__init__(EXAMPLES)
            setattr(self, name, fingerprint)

        def __getitem__(self, index):
            raise AssertionError("read")

    dataset = type("Dataset", (Unread,), {"__module__": "datasets.arrow_dataset"})
    every = [cls(name, key) for cls, name in ((Unread, "fingerprint"), (dataset, "_fingerprint")) for key in "ab"]
    assert len({encoder(tokenizer).key(rows, "train") for rows in every}) == 2
    local = type("Local", (Sums,), {})()  # a class that no name leads to: then everything is read
    with pytest.raises(UserError, match="read"):
        encoder(tokenizer, local).key(every[0], "train")


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "a bit": (IDS, flipped, "ids has changed since it was written"),
    "gone": (IDS, lambda file: file.unlink(), "ids is missing"),
    "what is known of it": (manifest.MANIFEST, flipped, "manifest.json"),
}


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_found_and_made_again(tokenizer, own_cache, capsys, name, damage, message):
    first = encoder(tokenizer)(EXAMPLES, "train")
    (entry,) = entries(own_cache)
    damage(own_cache / KIND / entry / name)
    again = encoder(tokenizer)(EXAMPLES, "train")
    said = capsys.readouterr().out
    assert said.startswith(f"{own_cache / KIND / entry}: damaged (")
    assert message in said
    assert "it is made again" in said
    assert again.kept.fingerprint == first.kept.fingerprint
    assert "tokens from the cache" in encoder(tokenizer)(EXAMPLES, "train").lines()[0]
    assert entries(own_cache) == [entry]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a folder away")
def test_entry_of_another_user_is_not_read(tokenizer, own_cache):
    encoder(tokenizer)(EXAMPLES, "train")
    os.chown(own_cache / KIND, 12345, 12345)
    with pytest.raises(UserError, match="belongs to another user"):
        encoder(tokenizer)(EXAMPLES, "train")


def test_cache_is_private_whatever_the_umask(own_cache):
    before = os.umask(0)
    try:
        with cache.partial("things") as made:
            folders = (own_cache, own_cache / "things", made)
            assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 3
    finally:
        os.umask(before)


def test_tokens_that_the_task_no_longer_makes_are_made_again(tokenizer, own_cache, capsys, monkeypatch):
    rows = Named(EXAMPLES)
    encoder(tokenizer)(rows, "train")
    monkeypatch.setattr(Sums, "target", lambda self, example: "another answer")  # no source file tells
    again = encoder(tokenizer)(rows, "train")
    assert "the task now makes other examples from its rows" in capsys.readouterr().out
    assert tokenizer.decode(again.kept[0].input_ids).endswith("another answer<|im_end|>")
    assert "tokens from the cache" in encoder(tokenizer)(rows, "train").lines()[0]
    calls = iter(range(10**6))
    monkeypatch.setattr(Sums, "target", lambda self, example: f"answer {next(calls)}")
    with pytest.raises(UserError, match=r"messages\(\) and target\(\) returned something else on a second"):
        encoder(tokenizer)(rows, "train")


def test_a_cache_that_cannot_be_written_is_refused(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    merged = tokenization.merge  # the first folder is deleted before this, and the second cannot be made
    monkeypatch.setattr(tokenization, "merge", lambda *given: shutil.rmtree(tmp_path / "cache") or merged(*given))
    for folder in (tmp_path / "cache", tmp_path / "file" / "cache"):
        monkeypatch.setenv("ACCEL_SFT_CACHE", str(folder))
        place = re.escape(f"tokens cannot be written to {folder} (No")
        with pytest.raises(UserError, match=place + ".*; set ACCEL_SFT_CACHE to another"):
            encoder(tokenizer)(EXAMPLES, "train")


@pytest.mark.parametrize("place", ["merge", "cache.publish"])
def test_run_killed_while_tokenizing_harms_no_other(tokenizer, own_cache, monkeypatch, place):
    child = os.fork()
    if not child:
        try:
            killed = f"accel_sft.data.tokenization.{place}"
            monkeypatch.setattr(killed, lambda *given: os.kill(os.getpid(), signal.SIGKILL))
            encoder(tokenizer)(EXAMPLES, "train")
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (left,) = entries(own_cache)
    assert left.startswith(".")
    assert list(encoder(tokenizer)(EXAMPLES, "train").kept) == on_the_spot(tokenizer)
    assert "tokens from the cache" in encoder(tokenizer)(EXAMPLES, "train").lines()[0]


def test_second_to_publish_takes_or_replaces_the_first(own_cache):
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(cache.partial("things")) for _ in range(3)]
        for folder in made:
            (folder / "thing").write_bytes(b"content")
        target = cache.publish(made[0], "things", "key", {"made by": 0})
        assert cache.publish(made[1], "things", "key", {"made by": 1}) == target
        assert cache.find("things", "key") == (target, {"made by": 0})
        (target / "thing").write_bytes(b"CONTENT")
        assert cache.publish(made[2], "things", "key", {"made by": 2}) == target
        assert cache.find("things", "key") == (target, {"made by": 2})
    assert list((own_cache / "things").iterdir()) == [target]


def test_what_a_dead_process_left_is_removed(own_cache):
    with cache.partial("things") as alive:
        (alive / "rows").touch()
        dead = alive.with_name(".dead")
        dead.mkdir()
        for folder in (dead, alive):
            os.utime(folder, (0, 0))
        with cache.partial("things"):
            pass
        assert (dead.exists(), alive.exists()) == (False, True), "a file in it was just written"
    assert list((own_cache / "things").iterdir()) == []


def test_without_a_home_folder_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("ACCEL_SFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "here")  # as `~` stays, where no home is known
    monkeypatch.chdir(tmp_path)
    assert cache.find("things", "key") is None
    with pytest.raises(OSError, match="no home folder, and ACCEL_SFT_CACHE is not set"), cache.partial("things"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_entry_unused_for_long_is_removed(tokenizer, own_cache):
    encoder(tokenizer)(EXAMPLES, "train")
    encoder(tokenizer)(EXAMPLES[1:], "train")
    unused, reused = sorted((own_cache / KIND).iterdir(), key=lambda path: path.stat().st_mtime_ns)
    long_ago = time.time() - (cache.UNUSED_DAYS + 1) * 86400
    for path in (unused, reused):
        os.utime(path, (long_ago, long_ago))
    encoder(tokenizer)(EXAMPLES[1:], "train")  # uses one of them
    assert {unused.name, reused.name} == set(entries(own_cache))
    encoder(tokenizer)(EXAMPLES[2:], "train")
    assert (unused.exists(), reused.exists()) == (False, True)
    assert len(entries(own_cache)) == 2
