from accel_sft_before import BeforeTask

from accel_sft.api.registry import load
from accel_sft.testing import TaskConformance


class TestBeforeTask(TaskConformance):
    task = BeforeTask()  # give options that have no default here


def test_the_task_is_found_by_its_name():
    assert load("before") is BeforeTask
