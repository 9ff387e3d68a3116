"""Pairs of answers: their tokens, their loss in every layout, launch and after a kill, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import finished
from forwards import CPU, WAYS, batching_of
from PIL import Image
from places import CONFIGS
from reference_job import FP32, JOB, ONCE, SHARDED, goes_on_to_the_same_bits, own_task, same_curve, same_weights

from accel_sft import Task, UserError, option
from accel_sft.api.config import TrainConfig
from accel_sft.chat.encode import encode_parts
from accel_sft.chat.encoded import EMPTY_ANSWER, EQUAL_ANSWERS, NO_REJECTED, Encoding, Pair, Rules
from accel_sft.chat.rendering import Rendering
from accel_sft.launch.audit import audit
from accel_sft.launch.info import launch_of_yaml
from accel_sft.models.prefix_attention import install
from accel_sft.results.run_report import PAIR_METRICS
from accel_sft.training import preference as preferences
from accel_sft.training.preference import Preference

install(CPU)


def pairs(count=9, instruction=12, seed=0):
    """Pairs with a common instruction, of which two have the same question."""
    draw, made = np.random.default_rng(seed), []
    common = draw.integers(1, 97, instruction).tolist()
    for index in range(count):
        prompt = common + draw.integers(1, 4, 1 + index % 4).tolist()
        chosen, rejected = (draw.integers(1, 97, draw.integers(1, 20)).tolist() for _ in range(2))
        both = len(prompt), len(prompt) + len(chosen)
        made.append(Pair(index, prompt + chosen + rejected, both[1], (both,)))
    return made


def preference(**settings):
    reference = -np.random.default_rng(1).random((9, 2), np.float32) * 40
    return Preference(TrainConfig(loss="dpo", **settings), reference)


def sums_and_gradients(model, loss, batching, examples, ranks=1):
    model, total = copy.deepcopy(model), 0.0
    for forward in (forward for rank in batching.divide(examples, ranks) for forward in rank):
        sums = loss(model, batching.batch(forward, 0, CPU), forward)
        sums[0].backward()
        total = total + sums.detach()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("way", [*WAYS, ("packed", "alone")])
@pytest.mark.parametrize(("tokens", "rows", "checkpointing"), [(4096, None, False), (90, None, False), (0, 2, True)])
def test_every_layout_gives_the_loss_and_gradients_of_single_rows(model, way, tokens, rows, checkpointing):
    model = copy.deepcopy(model).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss, examples = preference(dpo_sft_weight=0.3), pairs()
    if way[1] == "alone":  # a forward of one pair shares its prompt alone
        way, tokens, rows = ("packed", "rows"), 0, 1
    expected, wanted = sums_and_gradients(model, loss, batching_of(("padded", "mask"), 0, 1), examples)
    batching = batching_of(way, tokens, rows)
    got, gradients = sums_and_gradients(model, loss, batching, examples, ranks=3)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-5)
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).norm() <= 4e-6 * gradient.norm() + 1e-9, name
    if batching.way.one_sequence and way[0] != "padded":  # the prompt of a pair is computed once
        computed = [batching.way.tokens_in(forward) for forward in batching.divide(examples, 1)[0]]
        assert sum(computed) <= sum(len(row.input_ids) for row in examples)


def by_hand(model, ids, prompt):
    logs = model(torch.tensor([ids])).logits.log_softmax(-1)[0]
    return sum(logs[at - 1, ids[at]].item() for at in range(prompt, len(ids))), len(ids) - prompt


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
@torch.no_grad()
def test_the_loss_is_that_of_the_papers_by_hand(model, kind):
    loss = preference(dpo_beta=0.3, dpo_sft_weight=0.5)
    loss = dataclasses.replace(loss, config=dataclasses.replace(loss.config, loss=kind))
    examples, expected = pairs(), 0.0
    for row in examples:
        (chosen, tokens), (rejected, others) = (by_hand(model, s.input_ids, s.prompt_length) for s in row.sequences)
        gain, other_gain = chosen - loss.reference[row.index][0], rejected - loss.reference[row.index][1]
        if kind == "ipo":
            expected += (gain / tokens - other_gain / others - 1 / 0.6) ** 2
        else:
            expected -= math.log(1 / (1 + math.exp(-0.3 * (gain - other_gain))))
        expected -= 0.5 * chosen / tokens
    batching = batching_of(("shared", "rows"), 4096)
    assert loss(model, batching.batch(examples, 0, CPU), examples)[0].item() == pytest.approx(expected, rel=1e-5)


REJECTING = """
def rejected(self, example):
    addends = self.target(example).split("+")
    return "+".join([addends[0], "1" + addends[1].strip()])
"""
DPO = (*JOB[1:], "--loss", "dpo", "--learning-rate", "1e-3", "--dpo-sft-weight", "0.1")


@pytest.fixture(scope="session")
def preferring(launched, common):
    """A run on pairs, which evaluates and saves."""
    folder = common / "preferring"
    folder.mkdir(exist_ok=True)
    return launched("preferring", own_task(folder, REJECTING), *DPO, "--save-every", "3", "--micro-batch-size", "3")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"yaml": "ddp", "launcher": (*FP32, "--num_processes", "3")}, id="ddp on three ranks"),
        pytest.param({"yaml": "z3", "launcher": FP32}, id="z3"),
        pytest.param({"yaml": "z2", "launcher": FP32}, id="z2", marks=pytest.mark.long),
        pytest.param(SHARDED, id="fsdp2", marks=pytest.mark.long),
        pytest.param({"yaml": "tp", "launcher": FP32}, id="tp", marks=pytest.mark.long),
    ],
)
def test_every_launch_draws_the_same_curve(preferring, tmp_path, options):
    run = finished(
        preferring.arguments[0], *DPO, *ONCE[2:], "--batching", "padded", run_dir=tmp_path / "run", **options
    )
    same_curve(preferring.lines(), run.lines())
    for ours, theirs in zip(preferring.lines("pair_margin"), run.lines("pair_margin"), strict=True):
        for name in PAIR_METRICS[:4]:  # at step 1 rounding alone ranks the answers
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-5), name


def test_untrained_model_is_its_own_reference(preferring):
    before, *_, after = preferring.lines("eval_loss")
    assert (before["pair_margin"], before["ranked_right"]) == (0, 0.5)
    assert before["pair_loss"] == pytest.approx(math.log(2))
    first = preferring.lines()[0]
    assert first["pair_margin"] == pytest.approx(0, abs=1e-5)
    assert first["loss"] == pytest.approx(math.log(2) + 0.1 * before["eval_loss"], rel=0.02)
    assert after["pair_margin"] > 0.01
    assert after["ranked_right"] > 0.5
    assert "\n- dpo\n" in (preferring.run_dir / "final" / "README.md").read_text()


def test_resumed_run_has_the_same_bits_with_and_without_its_cache(preferring, tmp_path):
    first = goes_on_to_the_same_bits(preferring, tmp_path / "cached", 3)
    assert "reference: computing" not in first.output
    environment = {"ACCEL_SFT_CACHE": str(tmp_path / "cache")}
    second = goes_on_to_the_same_bits(preferring, tmp_path / "computed", 3, environment=environment)
    assert second.output.count("reference: computing") == 2


# --- which pairs are learnt, and what is refused ---

EXAMPLES = {"right": ("12", "13"), "equal": ("12", "12"), "empty": ("12", " "), "long": ("12", "12 " * 60), "none": ()}
EXAMPLES |= {"swapped": ("13", "12"), "again": ("12", "14")}


@dataclasses.dataclass(kw_only=True)
class Answers(Task):
    """Examples by name: their two answers."""

    main_metric = "exact"
    given: str = option("right", help="The examples' names.")

    def dataset(self, split):
        return [(*EXAMPLES[name], None, None)[:2] for name in self.given.split(",")]

    def messages(self, example):
        return [{"role": "user", "content": "5 + 7 ="}]

    def target(self, example):
        return example[0] or "12"

    def rejected(self, example):
        return example[1]

    def score(self, example, text):
        return {"exact": float(text == "12")}


def encoded(tokenizer, given, rejected=None, **rules):
    task = Answers(given=given)
    if rejected is not None:
        task.rejected = lambda example: rejected
    how = {"max_length": 100, "truncation": "drop", "pairs": True, **rules}
    encoding = Encoding("train")
    for part in encode_parts(
        Rendering(tokenizer),
        task,
        rows := task.dataset("train"),
        range(len(rows)),
        "train",
        Rules(frozenset([tokenizer.eos_token_id]), **how),
    ):
        encoding.add(part)
        encoding.kept += part.kept
    return encoding


def test_pairs_have_both_answers_with_their_ends_behind_one_prompt(tokenizer):
    (pair,) = encoded(tokenizer, "right").kept
    chosen, rejected = (tokenizer.decode(row.input_ids[row.prompt_length :]) for row in pair.sequences)
    assert (chosen, rejected) == (f"12{tokenizer.eos_token}", f"13{tokenizer.eos_token}")
    assert pair.sequences[0].input_ids[: pair.forks_at] == pair.sequences[1].input_ids[: pair.forks_at]
    assert pair.supervised_tokens == sum(row.supervised_tokens for row in pair.sequences)


def test_pairs_that_teach_nothing_are_left_out_and_counted(tokenizer):
    left_out = encoded(tokenizer, "right,equal,empty,long,none").left_out
    assert left_out == {
        EQUAL_ANSWERS: [1],
        EMPTY_ANSWER: [2],
        "left out: longer than --max-length 100": [3],
        NO_REJECTED: [4],
    }
    cut = encoded(tokenizer, "long", truncation="right", max_length=40)
    assert (len(cut.kept), cut.cut) == (1, [0])
    assert [len(row.input_ids) for row in cut.kept[0].sequences] == [pytest.approx(20, abs=15), 40]


def test_reference_is_kept_in_parts_if_the_cache_can_be_written(called, tmp_path, monkeypatch):
    monkeypatch.setattr(preferences, "_AT_ONCE", 1)
    monkeypatch.setenv("ACCEL_SFT_CACHE", str(tmp_path / "cache"))
    words = (f"{__file__}:Answers", "--given", "right,again,equal", "--loss", "dpo", "--max-steps", "1")
    first = called(*words, run_dir=tmp_path / "first")
    assert first.output.count("reference: computing") == 2  # the validation pairs are the same
    first.says("pairs of validation: 1 left out: the chosen and the rejected answer are equal")
    kept = sorted((tmp_path / "cache" / "reference").iterdir())
    shutil.rmtree(kept[0])
    again = called(*words, run_dir=tmp_path / "again")
    assert again.output.count("reference: computing") == 1
    same_weights(tmp_path / "first", tmp_path / "again")
    shutil.rmtree(kept[0].parent)
    kept[0].parent.write_text("not a folder")
    called(*words, run_dir=tmp_path / "third").says("reference: not kept in .*File exists")


@pytest.mark.parametrize(
    ("rejected", "problem"),
    [
        (3, "rejected.. gave"),
        ([{"role": "user", "content": "no"}], "gave 1 turns, expected the text or the turn of one answer"),
        (
            [{"role": "assistant", "content": [{"type": "image", "image": Image.new("RGB", (4, 4))}]}],
            "has images; preferences are learnt",
        ),
    ],
)
def test_odd_rejected_answers_are_refused(tokenizer, rejected, problem):
    with pytest.raises(UserError, match=problem):
        encoded(tokenizer, "right", rejected)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "train example 0: a rejected answer is not learnt; add --loss dpo, .* .1 such rows"),
        (("--dpo-beta", "0.2"), "--dpo-beta works only with --loss dpo or ipo"),
        (("--loss", "dpo", "--given", "none"), "train: no example is left to use"),
        (("--loss", "dpo", "--dpo-beta", "0"), "--dpo-beta"),
    ],
)
def test_refusals(called, tmp_path, options, problem):
    given = () if "--given" in options else ("--given", "right")
    run = called(f"{__file__}:Answers", *given, *options, run_dir=tmp_path / "run")
    assert run.status == 1
    run.says(problem)


def test_sequence_parallelism_refuses_pairs():
    (error,) = audit(TrainConfig(loss="dpo"), launch_of_yaml(CONFIGS / "z3_sp.yaml", "--num_processes", "2"))
    assert str(error).startswith("--loss: under sequence parallelism a forward is one row")


def test_check_knows_pairs(called):
    given = ("--given", "right,again,equal,none,long,swapped", "--max-length", "60")
    run = called("check", f"{__file__}:Answers", *given, "--loss", "dpo", "--json")
    report, _ = json.JSONDecoder().raw_decode(run.output[run.output.index("{") :])
    found = {(f["code"], f["split"], row["index"]) for f in report["findings"] for row in f["rows"]}
    both = {("D301", 4), ("D310", 3), ("D311", 2), ("D501", 5), ("D503", 5)}
    assert found >= {(code, split, index) for code, index in both for split in ("train", "validation")}
    (row, *_) = report["examples"]
    assert row["text"].count("⟦") == 2
    plain = called("check", f"{__file__}:Answers", "--given", "right")
    plain.says("D205 .* a rejected answer is not learnt")
    assert plain.status == 1
