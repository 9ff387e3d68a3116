"""What libraries import too early is imported when it is called, and then is the real thing."""

from __future__ import annotations

import subprocess
import sys

import torch

from accel_sft.launch.deferred import compile_muon_later


def printed_by(script: str) -> list[str]:
    """The words that a script prints in a Python of its own, where nothing is imported yet."""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_a_command_that_trains_imports_no_scipy_and_transformers_losses_still_call_it():
    script = """
import sys
from accel_sft.commands import train
print(*(name for name in sys.modules if name.partition(".")[0] == "scipy"), "imported")
from transformers.loss import loss_for_object_detection
print(loss_for_object_detection.linear_sum_assignment([[4, 1], [2, 8]])[1].tolist())
import scipy.optimize
print(scipy.optimize.linear_sum_assignment.__module__, scipy.optimize.minimize.__name__)
"""
    assert printed_by(script) == ["imported", "[1,", "0]", "scipy.optimize._lsap", "minimize"]


def test_inside_other_names_are_the_real_module_s():
    script = """
import sys
from accel_sft.launch.deferred import lighter_transformers
with lighter_transformers():
    from scipy.optimize import linear_sum_assignment
    print("scipy" in sys.modules)
    from scipy.optimize import minimize
print(minimize.__module__, linear_sum_assignment([[4, 1], [2, 8]])[1].tolist() == [1, 0])
with lighter_transformers():
    from scipy.optimize import linear_sum_assignment
print(linear_sum_assignment.__module__)
"""
    assert printed_by(script) == ["False", "scipy.optimize._minimize", "True", "scipy.optimize._lsap"]


def test_transformers_reads_the_files_of_its_models_once_and_finds_the_same_names():
    script = """
from accel_sft.launch.deferred import lighter_transformers
from transformers.utils import import_utils
read = import_utils.create_import_structure_from_path
folders = read.cache_info().misses
with lighter_transformers():
    from transformers import Qwen2Config, models
print(folders > 100, read.cache_info().misses - folders < 5)  # a model's own folder is read again
found = import_utils.define_import_structure(models.__file__)
import_utils.create_import_structure_from_path = read
print(found == import_utils.define_import_structure.__wrapped__(models.__file__), len(found[frozenset()]) > 100)
"""
    assert printed_by(script) == ["True", "True", "True", "True"]


def test_a_model_is_unwrapped_without_importing_deepspeed_which_a_launch_by_it_has_imported():
    script = """
import os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from accelerate.utils import extract_model_from_parallel
from accel_sft.launch.deferred import deepspeed_where_it_trains
deepspeed_where_it_trains()
model = torch.nn.Linear(2, 2)
print(extract_model_from_parallel(model) is model, "deepspeed" in sys.modules)
from deepspeed import DeepSpeedEngine
engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
torch.nn.Module.__init__(engine)
engine.module = model
print(extract_model_from_parallel(engine) is model)
"""
    assert printed_by(script) == ["True", "False", "True"]


def test_what_is_imported_is_left_out_of_collections_which_go_on_behind_it():
    script = """
import gc
from accel_sft.launch.environment import importing
try:
    with importing():
        print(gc.isenabled(), gc.get_freeze_count())
        raise ImportError
except ImportError:
    print(gc.isenabled(), gc.get_freeze_count() > 1000)
"""
    assert printed_by(script) == ["False", "0", "True", "True"]


def test_deepspeeds_muon_is_imported_without_torchs_code_generator_and_takes_its_steps():
    script = """
import os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
from accel_sft.launch.deferred import compile_muon_later
from accel_sft.launch.environment import importing
compile_muon_later()
from deepspeed.runtime.zero.muon import original_muon
print("torch._inductor.config" in sys.modules)
import torch
torch.compiler.set_stance("force_eager")
print(torch.isfinite(original_muon.muon_update(torch.ones(4, 8), torch.zeros(4, 8))).all().item())
print("torch._inductor.config" in sys.modules)
"""
    assert printed_by(script) == ["False", "True", "True"]


def test_what_is_compiled_later_is_the_decorated_function_once_and_within_another_a_part_of_it(monkeypatch):
    from deepspeed.runtime import compiler

    monkeypatch.setattr(compiler, "compile", compiler.compile)  # put back at the end
    compile_muon_later()
    asked, really = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: asked.append(function) or function)

    def double(value):
        return 2 * value

    later = compiler.compile()(double)
    assert (asked, later.__name__) == ([], "double")
    assert really(lambda value: later(value) + 1, backend="eager", fullgraph=True)(torch.ones(())) == 3
    assert asked == []
    assert (later(2), later(3), asked) == (4, 6, [double])
