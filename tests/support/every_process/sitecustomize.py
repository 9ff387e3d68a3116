"""Plants what a test's machine has: bf16 instructions of the CPU as PLANTED_BF16 names them, and no NVIDIA driver.

Python imports a module of this name at its start, and conftest.py puts this folder on PYTHONPATH: so every process of
the tests sees the same machine, also one that a launcher starts.

`PLANTED_BF16=none pytest` is a CPU without such instructions, `PLANTED_BF16=avx512_bf16 pytest` one with them, and
without the variable it is this machine's own. PLANTED_BF16_1 is rank 1's alone. PLANTED_DEVICE is the GPU by whose
peak a run counts. CPU_DEPENDENT names a file to which the tests are written that depend on this machine's own.
"""

import os
import sys
from importlib.machinery import PathFinder


class Planting(PathFinder):
    """Finds the modules that ask for the machine, and changes them as soon as they are loaded."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in PLANTED or (spec := super().find_spec(name, path, target)) is None:
            return None
        load = spec.loader.exec_module

        def load_and_plant(module):
            load(module)
            PLANTED[name](module)

        spec.loader.exec_module = load_and_plant
        return spec


def plant_cpu(precision):
    own_lines, own_flags, own_choose_precision = precision._cpu_lines, precision.cpu_flags, precision.choose_precision
    root, settling = precision.host_memory.SYSTEM, []

    def lines():
        flags = os.environ.get(f"PLANTED_BF16_{os.environ.get('RANK')}", os.environ.get("PLANTED_BF16"))
        if flags is None or root != precision.host_memory.SYSTEM:  # a test may have planted files of its own
            return own_lines()
        others = [line for line in own_lines() if not line.lower().startswith(("flags", "features"))]
        return [*others, f"flags\t\t: {flags}"]

    def cpu_flags():
        if not settling and root == precision.host_memory.SYSTEM:
            note_test()
        return own_flags()

    def choose_precision(*given):
        settling.append(given)
        try:
            launch = own_choose_precision(*given)
        finally:
            settling.pop()
        if "this CPU" in launch.precision[1]:  # every launch asks for the instructions; most name their precision
            note_test()
        return launch

    precision._cpu_lines, precision.cpu_flags, precision.choose_precision = lines, cpu_flags, choose_precision


def note_test():
    # a process in which the test has planted instructions is alike on every CPU
    if (file := os.environ.get("CPU_DEPENDENT")) and "PLANTED_BF16" not in os.environ:
        with open(file, "a", encoding="utf-8") as notes:
            notes.write(f"{os.environ.get('PYTEST_CURRENT_TEST', '')}\n")


def plant_device(predicted):
    own = predicted.device_name
    predicted.device_name = lambda device: os.environ.get("PLANTED_DEVICE") or own(device)


def hide_driver(pynvml):
    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    pynvml.nvmlInit = fail


PLANTED = {
    "accel_sft.launch.precision": plant_cpu,
    "accel_sft.training.predicted": plant_device,
    "pynvml": hide_driver,
}
sys.meta_path.insert(0, Planting)
