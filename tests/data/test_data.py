"""Law 1: which examples a step learns from depends on data, seed and global batch size, and on nothing else.

Rows of several sources come in the shares that were asked for, in every prefix of the stream.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_sft import UserError, read_rows
from accel_sft.api.config import TrainConfig, read_shares
from accel_sft.chat.conversation import limited_examples
from accel_sft.data.step_plan import StepPlan, check_sources, in_words
from accel_sft.training.prepare import Prepared

GENERATOR = np.random.default_rng(0)
LENGTHS = GENERATOR.integers(4, 90, 23)
SUPERVISED = np.maximum(LENGTHS // 3, 1)


def plan(global_batch_size=5, epochs=3.0, max_steps=None, seed=1):
    return StepPlan(
        LENGTHS, SUPERVISED, seed=seed, global_batch_size=global_batch_size, epochs=epochs, max_steps=max_steps
    )


@pytest.mark.parametrize("global_batch_size", [1, 5, 40])
@pytest.mark.parametrize("epochs", [1.0, 3.0])
def test_every_example_is_seen_once_an_epoch(global_batch_size, epochs):
    steps = plan(global_batch_size, epochs)
    seen = np.concatenate([steps.examples(step) for step in range(steps.total_steps)])
    assert len(seen) == epochs * 23
    for epoch in np.split(seen, int(epochs)):
        assert sorted(epoch) == list(range(23))


def test_epochs_are_shuffled_differently_and_seeds_too():
    steps = plan(23, 2.0)
    assert list(steps.examples(0)) != list(steps.examples(1))
    assert list(steps.examples(0)) != list(plan(23, 2.0, seed=2).examples(0))
    again = plan(23, 2.0)  # a step is a pure function, whatever was asked before
    assert [list(again.examples(step)) for step in (1, 0)] == [list(steps.examples(step)) for step in (1, 0)]


@pytest.mark.parametrize(
    ("batch", "epochs", "steps", "expected"),
    [(23, 9.0, None, False), (24, 9.0, None, True), (24, 1.0, None, False), (24, None, 1, True)],
)
def test_a_step_with_some_rows_twice_is_announced(batch, epochs, steps, expected):
    rows = type("Kept", (list,), {"examples": 23})(range(23))
    split = SimpleNamespace(kept=rows, left_out={}, lines=list, examples=())
    assembly = SimpleNamespace(config=TrainConfig(), source=SimpleNamespace(adapter=None), template=None)
    lines = Prepared(None, assembly, split, split, plan(batch, epochs, steps)).lines
    repeated = len({*plan(batch, epochs, steps).examples(0)}) < len(plan(batch, epochs, steps).examples(0))
    assert ("--global-batch-size 24 is more than the number of rows" in str(lines)) is expected is repeated


def test_the_epoch_ends_where_it_ends():
    steps = plan(5, 3.0)
    ends = [step for step in range(1, steps.total_steps + 1) if steps.ends_epoch(step)]
    assert ends == [math.ceil(23 * epoch / 5) for epoch in (1, 2, 3)]
    assert steps.epoch(steps.total_steps) == 3.0
    assert plan(5, 0.01).total_steps == len(plan(5, 0.01).examples(0)) == 1  # a fraction is at least one


SHARES = st.lists(st.integers(1, 60), min_size=2, max_size=7)


def mixed(sizes, shares, *, seed=3, batch=5, epochs=2.0, max_steps=None):
    """A plan whose rows of all sources alternate as far as they last, and each row's source."""
    source_of = [n for turn in itertools.zip_longest(*([n] * size for n, size in enumerate(sizes))) for n in turn]
    source_of = np.array([source for source in source_of if source is not None])
    rows = {f"{n}.jsonl": np.flatnonzero(source_of == n) for n in range(len(sizes))}
    lengths = np.arange(10, 10 + len(source_of))
    rest = {"seed": seed, "global_batch_size": batch, "epochs": epochs, "max_steps": max_steps}
    return StepPlan(lengths, lengths // 2, sources=rows, shares=shares, **rest), source_of


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_steps_keep_the_shares_and_repeat_sources_as_needed(data):
    shares = read_shares(",".join(map(str, data.draw(SHARES))))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=len(shares), max_size=len(shares)))
    batch, epochs = data.draw(st.integers(1, 50)), data.draw(st.sampled_from([1.0, 2.0, 2.5]))
    plan, source_of = mixed(sizes, shares, batch=batch, epochs=epochs)
    steps = [plan.examples(step) for step in range(plan.total_steps)]
    assert all(len(rows) == batch for rows in steps[:-1])
    stream = np.concatenate(steps)
    counts = np.cumsum(source_of[stream][:, None] == np.arange(len(sizes)), axis=0)
    shared = np.arange(1, len(stream) + 1)[:, None] * np.array(shares) / sum(shares)
    assert np.abs(counts - shared).max() < 1
    longest = max(range(len(sizes)), key=lambda n: Fraction(sizes[n], shares[n]))
    assert counts[-1][longest] == round(epochs * sizes[longest])
    assert source_of[stream[-1]] == longest  # the stream ends with the row that completes its passes
    for source, size in enumerate(sizes):
        seen = stream[source_of[stream] == source]
        passes = [seen[at : at + size] for at in range(0, len(seen), size)]
        assert all(len({*one_pass}) == len(one_pass) for one_pass in passes)
        assert all(sorted(one_pass) == np.flatnonzero(source_of == source).tolist() for one_pass in passes[:-1])
    for step in {0, 1, len(steps) // 2, len(steps)}:
        so_far = stream[: step * batch]
        for number, source in enumerate(plan.seen(step)):
            mine = so_far[source_of[so_far] == number]
            assert (source["rows_seen"], source["tokens_seen"]) == (len(mine), plan.lengths[mine].sum())
    ends = [step for step in range(1, len(steps) + 1) if plan.ends_epoch(step)]
    row_of_longest = np.flatnonzero(source_of[stream] == longest)
    last_of_pass = [row_of_longest[e * sizes[longest] - 1] for e in range(1, int(epochs) + 1)]
    assert ends == sorted({int(at) // batch + 1 for at in last_of_pass})
    assert plan.epoch(len(steps)) == pytest.approx(round(epochs * sizes[longest]) / sizes[longest])


def test_mixed_step_is_a_pure_function_of_seed_and_sources():
    plan, source_of = mixed([12, 12], (1, 1), epochs=4.0)
    again, _ = mixed([12, 12], (1, 1), epochs=4.0)
    there = [plan.examples(step).tolist() for step in range(plan.total_steps)]
    assert there == [again.examples(step).tolist() for step in reversed(range(again.total_steps))][::-1]
    stream = np.concatenate(there)
    orders = [stream[source_of[stream] == source] // 2 for source in (0, 1)]  # the rows alternate
    drawn = {tuple(order[at : at + 12]) for order in orders for at in range(0, 48, 12)}
    assert len(drawn) == 8
    other, _ = mixed([12, 12], (1, 1), epochs=4.0, seed=4)
    assert other.examples(0).tolist() != there[0]


def test_means_and_words_count_sources_by_their_shares():
    plan, source_of = mixed([30, 5], (3, 1), batch=4, epochs=1.0)
    means = [plan.lengths[source_of == source].mean() for source in (0, 1)]
    assert plan.mean(plan.lengths) == pytest.approx((3 * means[0] + means[1]) / 4)
    assert plan.epoch_rows == 40  # the 30 and, by their shares, 10 of the other source between them
    assert in_words(plan) == "3 : 1 of 0.jsonl (30 rows), 1.jsonl (5 rows, seen 2.0 times an epoch)"


def test_shares_are_exact_and_in_lowest_terms():
    for text, shares in (("0.75, 0.25", (3, 1)), ("50,30,20", (5, 3, 2)), ("0.3333,0.6667", (3333, 6667))):
        assert read_shares(text) == shares
        assert TrainConfig(mix=text).problems() == []


@pytest.mark.parametrize("mix", ["3", "3,0", "3,-1", "nan,1", "3,,1", "1,0.000001"])
def test_shares_that_are_no_shares_are_refused_in_one_line(mix):
    (line,) = TrainConfig(mix=mix).problems()
    assert line.startswith("--mix")
    assert "expected a number above 0 for each --train-file" in line or "add up to 1,000,001" in line


def test_sources_follow_the_option_and_stay_with_rows(tmp_path):
    for folder, name, rows in (("a", "x.jsonl", 3), ("b", "x.jsonl", 4), ("b", "y.jsonl", 2), (".", "z.jsonl", 5)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text("".join(f'{{"n": "{folder}{n}"}}\n' for n in range(rows)))
    names = [str(tmp_path / name) for name in ("a/x.jsonl", "b", "z.jsonl")]
    rows = read_rows(",".join(names), lambda row: row["n"])
    assert rows.sources == ["x.jsonl", "b", "z.jsonl"]
    train, _ = rows.held_out(4, seed=1)
    for part in (rows, train, rows[5:12], limited_examples(rows, "50%")):
        folders = ["a", "b", "."]
        assert [folders[n] for n in part.sources_of(range(len(part)))] == [row[0] for row in part]
    assert read_rows(f"{names[0]},{tmp_path}/b/x.jsonl", dict).sources == ["a/x.jsonl", "b/x.jsonl"]
    assert check_sources(rows, "1,2,3") == {"x.jsonl": 1, "b": 2, "z.jsonl": 3}
    with pytest.raises(UserError, match=r"--mix 3,1: 2 shares, but --train-file names 3 \(x.jsonl, b, z.jsonl\); give"):
        check_sources(rows, "3,1")
    with pytest.raises(UserError, match="one of them twice"):
        check_sources(read_rows(f"{names[0]},{names[0]}", dict), "3,1")
    with pytest.raises(UserError, match="this task's rows are not read from files"):
        check_sources([1, 2], "3,1")
