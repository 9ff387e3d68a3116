"""Two real ranks agree: each collective gives both the same answer, from what each of them brings."""

import json

import fsdp2_on_cpu
import pytest
import yaml
from conftest import finished
from places import CONFIGS, SUPPORT
from reference_job import FP32, JOB, ONCE, SHARDED, own_task

from accel_sft.launch.accelerator import group_timeout
from accel_sft.launch.environment import usable_cores

EXPECTED = {
    "decided_by_main": 0,
    "decided_by_main refuses": ["rank 0", "and more"],
    "by_each_rank": [0, 1],
    "by_each_rank refuses": ["rank 1", "and more"],
    "first_reason": "rank 1",
    "no reason": None,
    "any_rank": [True, False],
    "largest_of_ranks": 1.5,
    "largest": {"most_a": 1, "most_b": 1, "most_c": None},
    "gather_numbers": [[0, 2**53], [1, 2**53 - 1]],
    "firsts": [0, 0],
    "local": [0, 1],
}


@pytest.fixture
def one_world(launched):
    """The folder in which two real ranks wrote what they got (one_world.py)."""
    environment = {"PYTHONPATH": str(SUPPORT), "PLANTED_BF16": "avx512_bf16"}
    return launched("one world", yaml="ddp", module="one_world", environment=environment).run_dir


def test_both_ranks_get_the_answer_that_all_of_them_make(one_world):
    for rank in (0, 1):
        assert json.loads((one_world / f"{rank}.json").read_text()) == EXPECTED, rank


def test_two_real_ranks_are_one_world(one_world):
    answer = json.loads((one_world / "launch.json").read_text())
    record, file = answer["record"], CONFIGS / "ddp.yaml"
    assert record["processes"] == 2
    assert answer["cudnn"] == ["1", False]  # its attention plans anew for each shape
    assert (record["precision"], record["yaml_path"], record["communication"]) == ("bf16", str(file), "gloo")
    assert yaml.safe_load(record["yaml"]) == yaml.safe_load(file.read_text())  # without its comments
    assert record["threads_per_process"] == max(1, usable_cores() // 2)
    assert ", 2 processes, " in answer["line"]


def test_hang_timeout_of_zero_limits_no_collective():
    hours = [group_timeout(seconds).total_seconds() / 3600 for seconds in (0, 600, 7200)]
    assert hours == [20 * 24, 1, 7500 / 3600]
    assert group_timeout(0).total_seconds() * 1000 < 2**31  # as torch's store counts


TIMEOUTS = """
def __post_init__(self):
    import json
    from torch.distributed.distributed_c10d import _world
    from accel_sft.commands import train

    def record_and_leave(leave=train.leave_together):
        backends = [group._get_backend(torch.device("cpu")) for group in _world.pg_map]
        seconds = [backend.options._timeout.total_seconds() for backend in backends]
        pathlib.Path(__file__).with_name(f"timeouts-{os.environ['RANK']}").write_text(json.dumps(seconds))
        leave()

    train.leave_together = record_and_leave
"""


@pytest.mark.parametrize(
    ("file", "ranks"),
    [("z2", 2), pytest.param("z3_sp", 2, marks=pytest.mark.long), pytest.param("hsdp", 4, marks=pytest.mark.long)],
)
def test_process_groups_outlast_the_hang_watch(tmp_path, file, ranks):
    if file == "hsdp" and not fsdp2_on_cpu.RUNS_HERE:
        pytest.skip("this torch's FSDP2 does not run on CPUs")
    job = (own_task(tmp_path, TIMEOUTS), *JOB[1:], *ONCE, "--max-steps", "1", "--hang-timeout", "7200")
    options = SHARDED | {"yaml": file, "launcher": (*FP32, "--num_processes", str(ranks))}
    finished(*job, run_dir=tmp_path / "run", **options)
    for rank in range(ranks):
        timeouts = json.loads((tmp_path / f"timeouts-{rank}").read_text())
        assert len(timeouts) > 1  # the groups of the library that shards are among them
        assert set(timeouts) == {7500.0}, rank
