"""A plugin that is broken or clashes breaks only itself, in one line that names it and the cause."""

import sys

import pytest
from fake_plugins import GOOD, install, only_plugins_of

from accel_sft.api import registry
from accel_sft.api.errors import UserError
from accel_sft.api.task import Task


@pytest.fixture
def site(tmp_path, monkeypatch):
    with only_plugins_of(tmp_path, monkeypatch) as site:
        yield site


def fault_of(name):
    with pytest.raises(UserError) as caught:
        registry.load(name)
    assert all(len(line.splitlines()) == 1 for line in caught.value.problems)
    return str(caught.value)


def changed(old, new, source=GOOD):
    assert old in source
    return source.replace(old, new)


def test_good_plugin_is_listed_unimported_and_loaded_by_name(site):
    wider = changed("def target(self, example)", "@staticmethod\n    def target(example, *rest, more=1)")
    install(site, "accel-sft-good", "good = accel_sft_good:Good", wider)  # static methods keep the contract too
    assert registry.names() == {"good": "accel-sft-good sums up"}
    assert "accel_sft_good" not in sys.modules
    cls = registry.load("good")
    assert issubclass(cls, Task)
    assert cls(size=3).dataset("train") == [0, 1, 2]


def test_a_fault_names_task_entry_point_distribution_version_and_cause(site):
    install(site, "accel-sft-bad", "bad = accel_sft_bad:Good", "import no_such_module\n", version="0.7")
    install(site, "accel-sft-good", "good = accel_sft_good:Good")
    line = fault_of("bad")
    assert line.startswith("task 'bad' (accel_sft_bad:Good, accel-sft-bad 0.7): cannot be imported: ")
    assert "ModuleNotFoundError: No module named 'no_such_module'" in line
    assert f"{site / 'accel_sft_bad.py'}:1" in line
    assert registry.load("good")


IMPORT_FAULTS = {
    "raises at import": ("raise RuntimeError('boom')", "RuntimeError: boom"),
    "exits at import": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "has no such class": ("", "AttributeError"),
    "is a function": ("def Good(): pass", "Good is not a subclass of accel_sft.Task"),
}


@pytest.mark.parametrize(("source", "cause"), IMPORT_FAULTS.values(), ids=IMPORT_FAULTS)
def test_what_cannot_be_imported_or_is_no_task(site, source, cause):
    install(site, "p-import", "bad = p_import:Good", source + "\n")
    assert cause in fault_of("bad")


CONTRACT_FAULTS = {
    "no dataclass": ("@dataclass(kw_only=True)\n", "", "not a keyword-only dataclass"),
    "method missing": ("def target(", "def tarjet(", "Good lacks target"),
    "parameter missing": (
        "def score(self, example, text)",
        "def score(self, example)",
        "score does not accept the trainer's call score(self, example, text): too many positional arguments",
    ),
    "a method that is a value": ("    def target(self", "    target = 3\n    def other(self", "target does not accept"),
    "main metric as a field": ('main_metric = "accuracy"', 'main_metric: str = "accuracy"', "main_metric has a type"),
    "direction of a wrong type": (
        'main_metric = "accuracy"',
        'main_metric = "accuracy"\n    higher_is_better = "no"',
        "higher_is_better is missing, empty or not a bool",
    ),
    **{  # the trainer's, those of every command, what names the task in a file, and the task's own
        f"the option --{name}": ("    size: int", f"    {name.replace('-', '_')}: int", f"--{name}: the trainer or the")
        for name in ("seed", "no-debug", "help-all", "task", "no-shout")
    },
    "no option name": ("    size: int", "    _size: int", "'_size' cannot be an option's name"),
    "default beyond its limits": ("option(10, min=2", "option(1, min=2", "the default is refused: --size 1: must be"),
}


@pytest.mark.parametrize(("old", "new", "cause"), CONTRACT_FAULTS.values(), ids=CONTRACT_FAULTS)
def test_what_breaks_the_contract(site, old, new, cause):
    install(site, "p-contract", "bad = p_contract:Good", changed(old, new))
    assert cause in fault_of("bad")


def test_shipped_tasks_keep_their_names(site):
    install(site, "accel-sft-math", "math = accel_sft_math_real:Good", module="accel_sft_math_real")
    install(site, "aaa-stranger", "math = aaa_stranger:Good\nother = aaa_stranger:Good")
    assert registry.load("math").__module__ == "accel_sft_math_real"
    assert list(registry.names()) == ["math", "other"]
    (refused,) = [plugin for plugin in registry.plugins() if plugin.fault]
    assert refused.distribution == "aaa-stranger"
    assert "the name belongs to accel-sft-math" in refused.fault


def test_two_plugins_of_one_name_are_refused_and_named(site):
    install(site, "p-one", "same = p_one:Good", version="1.0")
    install(site, "p-two", "same = p_two:Good\nalone = p_two:Good", version="2.0")
    lines = fault_of("same").splitlines()
    assert len(lines) == 2
    assert all("p-one 1.0" in line and "p-two 2.0" in line for line in lines)
    assert list(registry.names()) == ["alone"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [("new-task", "the name belongs to the tool `accel-sft new-task`"), ("under_score", "invalid task name")],
)
def test_a_wrong_name_breaks_only_itself(site, name, fault):
    install(site, "p-name", f"{name} = p_name:Good\ngood = p_name:Good")
    assert fault in fault_of(name)
    assert list(registry.names()) == ["good"]


def test_an_unknown_name_suggests_the_near_one(site):
    install(site, "accel-sft-math", "math = accel_sft_math:Good")
    assert "no task 'mth'; did you mean math?" in fault_of("mth")
    assert "did you mean" not in fault_of("zzzzzz")


def test_a_task_is_checked_when_it_is_built(site):
    install(site, "p-build", "good = p_build:Good")
    cls = registry.load("good")
    assert registry.build("good", cls, {"size": 3}).size == 3
    with pytest.raises(UserError) as caught:
        registry.build("good", cls, {"size": 1, "style": "fancy"})
    assert caught.value.problems == ("--size 1: must be at least 2", "--style fancy needs --shout")


def test_a_task_that_raises_on_its_options_is_named(site):
    source = changed("    def dataset", "    def __post_init__(self):\n        1 / 0\n\n    def dataset")
    install(site, "p-raise", "good = p_raise:Good", source)
    with pytest.raises(UserError, match=r"task 'good' fails on its options: ZeroDivisionError: .*p_raise\.py:\d+"):
        registry.build("good", registry.load("good"), {})
