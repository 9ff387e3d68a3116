"""`accel-sft rehearse`: the whole run on a shrunk model, and the faults that it finds before they cost anything."""

from __future__ import annotations

import json

import pytest
from conftest import accel_sft
from rehearsal_faults import FAULTS, MATH

from accel_sft.tools.rehearse.stages import STAGES

LONG = pytest.mark.long


def rehearsal(*arguments, expect=0):
    """The stages of a rehearsal, by name."""
    done = accel_sft("rehearse", *arguments, "--json")
    assert done.status == expect, done.output[-6000:]
    text = done.output
    report = json.JSONDecoder().raw_decode(text[text.index('{\n  "version"') :])[0]
    return {stage["stage"]: stage for stage in report["stages"]}


SHIPPED = [
    pytest.param((), id="tiny"),
    pytest.param(("--adapter", "lora", "--launch", "ddp"), id="lora, ddp", marks=LONG),
    pytest.param(("--launch", "z3"), id="z3", marks=LONG),
]


@pytest.mark.parametrize("options", SHIPPED)
def test_every_stage_of_a_sound_run_holds(options):
    found = rehearsal(*MATH, *options)
    assert {name: (stage["state"], stage["flaws"]) for name, stage in found.items()} == dict.fromkeys(
        STAGES, ("holds", [])
    )
    assert "same bits" in found["resume"]["seen"]


OFTEN = ("a generation config that cannot be saved",)
"""Planted in the default run, too."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in OFTEN else LONG) for name in FAULTS])
def test_a_planted_fault_is_found_and_named(name, tmp_path):
    fault = FAULTS[name]
    done = accel_sft("rehearse", *fault.plant(tmp_path), "--json")
    text = done.output
    assert '{\n  "version"' in text, text[-6000:]
    report = json.JSONDecoder().raw_decode(text[text.index('{\n  "version"') :])[0]
    named = {stage["stage"]: stage["flaws"] for stage in report["stages"] if stage["flaws"]}
    assert fault.words in json.dumps(named.get(fault.stage, [])), json.dumps(report["stages"], indent=1)
    assert list(named) == [fault.stage], named
    assert done.status == any(flaw["state"] == "fails" for flaws in named.values() for flaw in flaws)
