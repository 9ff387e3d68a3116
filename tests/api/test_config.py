"""The trainer's settings: every problem at once, defaults that suit the model, and the same names in YAML."""

import dataclasses
import json

import pytest

from accel_sft.api.config import LAYOUT, REMOVED, TrainConfig, changed
from accel_sft.api.config_file import load_yaml, task_in
from accel_sft.api.errors import UserError
from accel_sft.api.options import option, settings
from accel_sft.io.run_dir import kept_steps
from accel_sft.models.source import is_tiny


@dataclasses.dataclass(kw_only=True)
class Other:
    """Stands for a task's own options."""

    size: int = option(3, help="Size.")


@pytest.fixture
def yaml(tmp_path):
    path = tmp_path / "run.yaml"

    def write(text):
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def read(path, *classes):
    """The values of a file in which nothing is wrong."""
    values, problems = load_yaml(path, *classes)
    assert problems == []
    return values


def refused(path):
    try:
        _, problems = load_yaml(path, TrainConfig, Other)
    except UserError as error:
        problems = error.problems
    assert problems
    assert all(line.startswith(f"--config {path}: ") for line in problems)
    return [line.removeprefix(f"--config {path}: ") for line in problems]


@pytest.mark.parametrize(
    "values",
    [
        {},
        *({"eval_every": word, "save_every": word} for word in ("auto", "epoch", "off", "7")),
        {"init_from": "runs/a", "resume": "auto", "output_dir": "runs/b"},  # started or resumed by one command
    ],
)
def test_what_goes_together_is_no_problem(values):
    assert TrainConfig(**values).problems() == []


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"eval_every": "often"}, "--eval-every often"),
        ({"save_every": "0"}, "--save-every 0"),
        ({"keep_checkpoints": "0"}, "--keep-checkpoints 0: expected a number of checkpoints, or every:N"),
        (
            {"keep_checkpoints": "every:50", "save_every": "30"},
            "--keep-checkpoints every:50: needs a --save-every",
        ),
        (
            {"keep_checkpoints": "every:50", "save_every": "off"},
            "--keep-checkpoints every:50: needs a --save-every",
        ),
        ({"micro_batch_size": "-1"}, "--micro-batch-size -1"),
        ({"patience": 2, "eval_every": "off"}, "--patience"),
        ({"init_from": "runs/a", "model": "x"}, "--init-from"),
        ({"resume": "auto"}, "--resume auto"),
        ({"save_every": 3}, "--save-every 3: expected text"),
        ({"lr_scheduler": "constant", "min_lr_ratio": 0.1}, "--min-lr-ratio"),
        ({"decay_ratio": 0.1}, "--decay-ratio"),
        ({"warmup_steps": -1}, "--warmup-steps"),
        ({"ema_decay": 0.9, "adapter": "adalora"}, "--ema-decay does not work with --adapter adalora"),
        ({"ema_decay": 1.0}, "--ema-decay 1.0: must be at "),
    ],
)
def test_a_problem_names_its_flag(values, flags):
    line, *more = TrainConfig(**values).problems()
    assert line.startswith(flags)
    assert all(other.startswith(flags.partition(":")[0]) for other in more)  # a wrong type is a wrong word too


def test_checkpoints_are_saved_where_they_are_kept():
    assert TrainConfig(keep_checkpoints="every:50").resolved({}).save_every == "50"
    assert TrainConfig(keep_checkpoints="every:50", save_every="10").resolved({}).save_every == "10"
    assert kept_steps([10, 20, 50, 60, 100, 110], "every:50") == [50, 100, 110]
    assert kept_steps([10, 20, 50], "2") == [20, 50]
    assert kept_steps([10], "5") == [10]


def test_defaults_come_with_the_model_and_what_is_set_stays():
    tiny = {"learning_rate": 2e-3, "max_steps": 100, "max_length": 64}
    assert TrainConfig().resolved(tiny).learning_rate == 2e-3
    assert TrainConfig(learning_rate=1e-5).resolved(tiny).learning_rate == 1e-5
    assert TrainConfig(model="other").resolved({}).learning_rate == 2e-5
    assert TrainConfig(model="other", adapter="lora").resolved({}).learning_rate == 2e-4
    assert TrainConfig().resolved(tiny).max_steps == 100
    assert TrainConfig(epochs=2.0).resolved(tiny).max_steps is None


def test_run_started_from_a_tiny_one_is_tiny(tmp_path):
    runs = {"a": ("tiny", None), "b": ("tiny", "a"), "c": ("org/model", None), "d": ("tiny", "d")}
    for name, (model, init_from) in runs.items():
        (tmp_path / name).mkdir()
        config = {"model": model, "init_from": init_from and str(tmp_path / init_from)}
        earlier = {"task": "math", "config": config, "task_options": {}}
        (tmp_path / name / "run.json").write_text(json.dumps(earlier))
    (tmp_path / "weights").mkdir()
    tiny = {name: is_tiny("tiny", init_from=str(tmp_path / name)) for name in ("a", "b", "c", "d", "weights")}
    assert tiny == {"a": True, "b": True, "c": False, "d": False, "weights": False}
    assert is_tiny("tiny")
    assert not is_tiny("org/model")


def test_a_resume_may_change_the_layout_and_not_the_mathematics():
    before = TrainConfig().as_dict()
    assert changed(before, TrainConfig(micro_batch_size="4", log_every=3).as_dict()) == []
    (line,) = changed(before, TrainConfig(ema_decay=0.9).as_dict())
    assert line == "--ema-decay: the run was started with None, not 0.9"
    (line,) = changed({"lora_init": "pissa", "generate_with": "vllm"}, {})
    assert line == "--lora-init: the run was started with pissa, not default"
    assert changed({"lora_init": "default"}, {}) == []
    assert {setting.name for setting in settings(TrainConfig)} >= LAYOUT - REMOVED.keys()


YAML_VALUES = {
    "either dash": ("learning-rate: 1e-4\nmax_steps: 3\n", {"learning_rate": 1e-4, "max_steps": 3}),
    "types": ("epochs: 2\nmicro_batch_size: 8\nsize: 5\n", {"epochs": 2.0, "micro_batch_size": "8", "size": 5}),
    "nothing": ("patience:\n", {"patience": None}),
    **{f"text {text}": (f"model: {text}\n", {"model": text.strip("'")}) for text in ("no", "1e4", "'8'")},
    **{f"number {text}": (f"seed: {text}\n", {"seed": int(text.strip("'"))}) for text in ("010", "'7'", "1_000")},
    **{f"switch {word}": (f"debug: {word}\n", {"debug": True}) for word in ("yes", "True")},
    "switch off": ("profile: off\n", {"profile": False}),
    "the word off": ("eval_every: off\nresume: false\n", {"eval_every": "off", "resume": "off"}),
    "the word no": ("save-every: no\n", {"save_every": "off"}),
    "a list": ("lora-target-modules: [q_proj, v_proj]\n", {"lora_target_modules": "q_proj,v_proj"}),
}


@pytest.mark.parametrize(("text", "values"), YAML_VALUES.values(), ids=YAML_VALUES)
def test_yaml_values_are_read_as_on_the_command_line(yaml, text, values):
    assert read(yaml(text), TrainConfig, Other) == values


def test_option_of_an_earlier_version_is_passed_over(yaml):
    text = "seed: 7\ngenerate_with: transformers\nlora_init: default\n"
    assert load_yaml(yaml(text), TrainConfig) == ({"seed": 7}, [])
    problems = load_yaml(yaml("generate_with: vllm\nlora_init: pissa\n"), TrainConfig)[1]
    assert ["accel-sft serve RUN" in problems[0], "PiSSA" in problems[1]] == [True, True]


def test_yaml_tells_all_its_problems(yaml):
    problems = refused(yaml("sise: 1\nadapter: lara\nseed: x\nadd: 2\ndebug: 1\nlr: 1e-4\n"))
    assert problems == [
        "line 1: unknown option 'sise'; did you mean size?",
        "line 2: --adapter lara: not one of none, lora, adalora",
        "line 3: --seed 'x': expected a whole number",
        "line 4: unknown option 'add'",
        "line 5: --debug '1': expected true or false",
        "line 6: unknown option 'lr': it is --learning-rate here",
    ]


def test_yaml_refuses_a_name_given_twice_in_either_spelling(yaml):
    assert refused(yaml("max-length: 64\nseed: 1\nmax_length: 128\nseed: 2\nadapter: lara\n")) == [
        "max_length is given twice, on lines 1 and 3; keep one",
        "seed is given twice, on lines 2 and 4; keep one",
        "line 5: --adapter lara: not one of none, lora, adalora",
    ]


def test_a_file_may_name_its_task(yaml):
    assert task_in(yaml("seed: 1\ntask: math\n")) == "math"
    assert task_in(yaml("seed: 1\n")) is None
    assert read(yaml("seed: 1\ntask: ./mine.py:Mine\n"), TrainConfig) == {"seed": 1}
    assert refused(yaml("task: [a]\ntaks: b\n")) == [
        "line 1: task: expected a task's name",
        "line 2: unknown option 'taks'; did you mean task?",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("distributed_type: DEEPSPEED", "this is a launch file; give it to accelerate: accelerate launch "),
        ("- a\n- b\n", "expected option names and values, one `name: value` per line"),
        ("", "expected option names and values"),
        ("seed: [1", "not YAML: "),
        ("seed: " + "[" * 5000, "not YAML: "),
    ],
)
def test_what_has_no_options_is_refused(yaml, text, problem):
    (line,) = refused(yaml(text))
    assert line.startswith(problem)
    assert refused("/no/such/file")[0].startswith("cannot be read (No such file")
