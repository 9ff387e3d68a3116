"""Two real ranks agree: each collective gives both the same answer, from what each of them brings."""

import json
import subprocess

import fsdp2_on_cpu
import pytest
from conftest import accel_sft
from places import SUPPORT, launcher
from reference_job import JOB, ONCE

from accel_sft.launch.accelerator import group_timeout
from accel_sft.launch.collectives import any_rank, by_each_rank, first_reason, gather_numbers

RANK = """
import json, os, sys
from pathlib import Path
from accelerate import Accelerator
from accel_sft.api.errors import UserError
from accel_sft.launch import collectives as c
from accel_sft.resilience.exit import leave_together

accelerator = Accelerator(cpu=True)
rank = accelerator.process_index

def refused(call, *arguments):
    try:
        return call(*arguments)
    except UserError as error:
        return error.problems

def fails(line):
    raise UserError(line, "and more")

def work(fine):
    return rank if fine or rank == 0 else fails(f"rank {rank}")

team = c.Team(accelerator)
answers = {
    "decided_by_main": c.decided_by_main(accelerator, lambda: rank),
    "decided_by_main refuses": refused(c.decided_by_main, accelerator, lambda: fails(f"rank {rank}")),
    "by_each_rank": c.by_each_rank(lambda: work(True)),
    "by_each_rank refuses": refused(c.by_each_rank, lambda: work(False)),
    "first_reason": c.first_reason(f"rank {rank}" if rank else None),
    "no reason": c.first_reason(None),
    "any_rank": [c.any_rank(rank == 1), c.any_rank(False)],
    "all_ranks": [c.all_ranks(rank == 1), c.all_ranks(True)],
    "largest_of_ranks": c.largest_of_ranks(rank + 0.5),
    "largest": c.largest({"a": rank, "b": rank if rank else None, "c": None}, "most_"),
    "gather_numbers": c.gather_numbers([rank, 2**53 - rank]),
    "firsts": team.firsts(lambda: rank),
    "here": list(team.local_ranks),
}
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(answers))
leave_together()
os._exit(0)
"""
EXPECTED = {
    "decided_by_main": 0,
    "decided_by_main refuses": ["rank 0", "and more"],
    "by_each_rank": [0, 1],
    "by_each_rank refuses": ["rank 1", "and more"],
    "first_reason": "rank 1",
    "no reason": None,
    "any_rank": [True, False],
    "all_ranks": [False, True],
    "largest_of_ranks": 1.5,
    "largest": {"most_a": 1, "most_b": 1, "most_c": None},
    "gather_numbers": [[0, 2**53], [1, 2**53 - 1]],
    "firsts": [0, 0],
    "here": [0, 1],
}


def test_both_ranks_get_the_answer_that_all_of_them_make(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    done = subprocess.run(launcher("ddp", str(script), str(tmp_path)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == EXPECTED, rank


def test_one_process_agrees_with_itself():
    assert by_each_rank(lambda: 3) == [3]
    assert (first_reason("why"), first_reason(None)) == ("why", None)
    assert any_rank(True)
    assert not any_rank(False)
    assert gather_numbers([1, 2.5]) == [[1.0, 2.5]]


def test_hang_timeout_of_zero_limits_no_collective():
    hours = [group_timeout(seconds).total_seconds() / 3600 for seconds in (0, 600, 7200)]
    assert hours == [20 * 24, 1, 7500 / 3600]
    assert group_timeout(0).total_seconds() * 1000 < 2**31  # as torch's store counts


@pytest.mark.parametrize(
    ("yaml", "ranks"),
    [("z2", 2), pytest.param("z3_sp", 2, marks=pytest.mark.long), pytest.param("hsdp", 4, marks=pytest.mark.long)],
)
def test_process_groups_outlast_the_hang_watch(tmp_path, yaml, ranks):
    if yaml == "hsdp" and not fsdp2_on_cpu.RUNS_HERE:
        pytest.skip("this torch's FSDP2 does not run on CPUs")
    launcher = ("--mixed_precision", "no", "--num_processes", str(ranks))
    environment = {"PYTHONPATH": str(SUPPORT), "OUT": str(tmp_path)}
    job = (*JOB, *ONCE, "--max-steps", "1", "--hang-timeout", "7200")
    options = {"yaml": yaml, "launcher": launcher, "environment": environment, "module": "group_timeouts"}
    run = accel_sft(*job, run_dir=tmp_path / "run", **options)
    assert run.status == 0, run.output
    for rank in range(ranks):
        timeouts = json.loads((tmp_path / f"timeouts-{rank}").read_text())
        assert len(timeouts) > 1  # the groups of the library that shards are among them
        assert set(timeouts) == {7500.0}, rank
