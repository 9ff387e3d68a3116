"""Runs that mix sources and weigh turns: one loss curve on every layout, the same bits after a stop, and by source."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import accel_sft
from matrix import matrix, run
from reference_job import LAYOUTS, MICRO, ONCE, goes_on_to_the_same_bits, same_curve
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft.tools.report.page import render
from accel_sft.tools.report.runs import read_run

NAMES = "a.jsonl", "b.jsonl"


@pytest.fixture(scope="module")
def files(common):
    """The words that name two files; some turns of the second are not learnt."""
    folder = common / "mixed"
    folder.mkdir(exist_ok=True)
    for name, first, rows in zip(NAMES, (0, 100), (30, 8), strict=True):
        lines = []
        for n in range(first, first + rows):
            turns = [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n + 1}."}]
            if first:
                turns[1]["weight"] = n % 2
                turns += [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "So.", "weight": 1}]
            lines.append(json.dumps({"messages": turns}) + "\n")
        (folder / name).write_text("".join(lines))
    return [word for name in NAMES for word in ("--train-file", str(folder / name))]


@pytest.fixture(scope="module")
def job(files):
    job = ("chat", *files, "--mix", "2,1", "--held-out", "6", "--max-steps", "6", "--global-batch-size", "8")
    return (*job, "--max-new-tokens", "4", "--eval-every", "6", "--save-every", "3", "--seed", "5")


def is_told_by_source(launched, job):
    run = launched("mixed", *job)
    lines, result, record = run.lines(), run.result(), json.loads((run.run_dir / "run.json").read_text())
    output, report = " ".join(run.output.split()), (run.run_dir / "report.md").read_text()
    pattern = r"--mix: 2 : 1 of a.jsonl \((\d+) rows\), b.jsonl \((\d+) rows, seen ([\d.]+) times an epoch\)"
    printed = re.search(pattern, output)
    rows = {name: int(printed[place]) for place, name in enumerate(NAMES, 1)}
    assert sum(rows.values()) == 32
    assert float(printed[3]) == pytest.approx(rows["a.jsonl"] / 2 / rows["b.jsonl"], abs=0.05001)
    assert "assistant turns of weight 0" in output
    assert "its loss is not that of single rows" not in output
    for name, source in zip(NAMES, result["sources"], strict=True):
        seen, tokens = source["rows_seen"], source["tokens_seen"]
        assert (source["name"], source["rows"], seen) == (name, rows[name], source["share"] * 16)
        assert record["data"][f"train rows of {name} (share {source['share']} of 3)"] == rows[name]
        assert f"{seen} rows of {name} ({seen / rows[name]:.2f} passes, {tokens} " in report
    assert sum(line["tokens"] for line in lines) == sum(source["tokens_seen"] for source in result["sources"])
    assert lines[-1]["epoch"] == pytest.approx(32 / rows["a.jsonl"])
    page = render([read_run(run.run_dir, "mixed")], [])
    assert "Mixed 2 : 1: 32 rows of a.jsonl (" in page


def has_a_command_that_check_and_plan_take(launched, job):
    run = launched("mixed", *job)
    steps = json.loads(accel_sft("check", *job, "--json", "--no-score").output)["steps"]
    assert steps["epochs"] == pytest.approx(run.lines()[-1]["epoch"])
    tokens = sum(line["tokens"] for line in run.lines())
    assert steps["tokens_per_epoch"] * steps["epochs"] == pytest.approx(tokens, rel=0.1)
    wrong = [*job[:6], "2,1,1", *job[7:]]
    findings = json.loads(accel_sft("check", *wrong, "--json", "--no-score").output)["findings"]
    assert any(
        "--mix 2,1,1: 3 shares, but --train-file names 2" in row["detail"]
        for finding in findings
        for row in finding["rows"]
    )
    refused = accel_sft(*wrong)
    assert (refused.status, "--mix 2,1,1: 3 shares, but --train-file names 2" in refused.output) == (1, True)
    planned = accel_sft("plan", *job, "--gpus", "0", "--launch", "ddp")
    assert "lengths  the longest example has" in planned.output
    assert "as it was tokenized here last" in " ".join(planned.output.split())


def ends_with_the_same_bits_after_a_stop(launched, job, tmp_path):
    whole = launched("mixed", *job)
    resumed = goes_on_to_the_same_bits(whole, tmp_path / "run", 3)
    assert resumed.result()["sources"] == whole.result()["sources"]


def has_one_loss_curve_on_every_layout(launched, job, name):
    alone = launched("mixed", *job)
    run = launched(f"mixed {name}", *job, "--micro-batch-size", MICRO[name], **LAYOUTS[name])
    same_curve(alone.lines(), run.lines())
    for ours, theirs in zip(alone.lines("eval_loss"), run.lines("eval_loss"), strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=2e-5)


def has_on_two_ranks_the_loss_of_plain_transformers(launched, files):
    job = ("chat", *files[2:], "--held-out", "0", "--max-steps", "1", "--global-batch-size", "8", *ONCE)
    run = launched("partly learnt ddp", *job, "--micro-batch-size", "3", **LAYOUTS["ddp"])
    tokenizer, model = (kind.from_pretrained(run.run_dir / "base") for kind in (AutoTokenizer, AutoModelForCausalLM))
    total = tokens = 0.0
    for line in Path(files[-1]).read_text().splitlines():
        turns = json.loads(line)["messages"]
        for at in (1, 3):
            prompt = tokenizer.apply_chat_template(turns[:at], add_generation_prompt=True, return_dict=False)
            ids = prompt + tokenizer(turns[at]["content"])["input_ids"] + [tokenizer.eos_token_id]
            learnt = len(ids) - len(prompt)
            labels = torch.tensor([[-100] * len(prompt) + ids[len(prompt) :]])
            with torch.no_grad():
                loss = model(input_ids=torch.tensor([ids]), labels=labels).loss.item() * learnt
            total, tokens = total + turns[at]["weight"] * loss, tokens + turns[at]["weight"] * learnt
    (line,) = run.lines()
    assert line["loss"] == pytest.approx(total / tokens, rel=2e-5)
    assert line["supervised_tokens"] == tokens


@matrix(
    is_told_by_source,
    has_a_command_that_check_and_plan_take,
    ends_with_the_same_bits_after_a_stop,
    *[partial(has_one_loss_curve_on_every_layout, name=name) for name in ("ddp", "z2", "z3")],
    has_on_two_ranks_the_loss_of_plain_transformers,
)
def test_a_mixed_run(check, request):
    run(check, request)
