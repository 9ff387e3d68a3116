"""The base class of tasks (examples, prompts, answers and scores), and the check of task classes."""

import abc
import dataclasses
import inspect
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from accel_sft.api.errors import UserError
from accel_sft.api.options import problems, settings
from accel_sft.api.tool_configs import EvaluateConfig


@dataclasses.dataclass(kw_only=True)
class Task(abc.ABC):
    """A task; subclass it as a keyword-only dataclass. Each field is a command-line option, declared by `option`.

    An example may be any object; the trainer only hands it back to the methods below. All methods must be pure:
    every rank calls them and must get the same results, which are cached for later runs.
    """

    main_metric: ClassVar[str]
    """Key of `aggregate`'s result that decides which checkpoint is best.

    If it is "eval_loss", with `higher_is_better` False, the validation loss decides, and no answer is generated.
    """
    higher_is_better: ClassVar[bool] = True
    tiny_steps: ClassVar[int] = 1400
    """Optimizer steps of a run with the built-in model `tiny`, unless --max-steps or --epochs is given."""

    @abc.abstractmethod
    def dataset(self, split: str) -> Sequence[Any]:
        """The examples of `split`, "train" or "validation". Raise UserError for data that cannot be used.

        The sequence may have an attribute `fingerprint`, a text that changes whenever an example does (the result of
        `read_rows` has one). Later runs then detect changes without reading every message and target. It may also
        have an attribute `notes`: lines about the data to show at the start.
        """

    @abc.abstractmethod
    def messages(self, example: Any) -> list[dict[str, Any]]:
        """The prompt as chat messages, [{"role": "system" | "user" | "assistant", "content": ...}, ...].

        An empty list means that target() is raw text: every token carries loss, and no chat template is used.

        A content is a text, or a list of parts, {"type": "text", "text": ...} and {"type": "image", "image": ...}. An
        image is a path, bytes or a PIL image. A prompt of one turn with `"continued": True` is a text that the answer
        continues: if the model has no chat template, prompt and answer are concatenated.
        """

    @abc.abstractmethod
    def target(self, example: Any) -> str | list[dict[str, Any]]:
        """Return the answer, the only text (with its end-of-turn token) that carries loss.

        Or return, as messages, all turns after the prompt; the last turn must be an assistant's. Every assistant turn
        carries loss unless it has `"weight": 0`. `score` gets the text that is generated for the last turn with loss.
        """

    def rejected(self, example: Any) -> str | list[dict[str, Any]] | None:
        """Return a worse answer than target(), in the same form, for training on preferences (`--loss dpo`); None if
        the example has none."""
        return None

    def tools(self, example: Any) -> list[dict[str, Any]] | None:
        """Schemas of the tools that the chat template offers to the model; None if the example has no tools."""
        return None

    def chat_template_kwargs(self, example: Any) -> dict[str, Any] | None:
        """Variables that the example sets in the chat template, such as {"enable_thinking": False}; an explicit
        --thinking off or keep overrides them."""
        return None

    @abc.abstractmethod
    def score(self, example: Any, text: str) -> dict[str, Any]:
        """Return the scores of one generated answer by name: numbers, or other JSON values that `aggregate` reads."""

    def aggregate(self, scores: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Return a number for each metric from `scores`, which has an entry for each example; by default, the mean
        of each key."""
        keys = dict.fromkeys(key for score in scores for key in score)
        for key in keys:
            for score in scores:
                if not isinstance(score.get(key), (int, float)):
                    raise UserError(f"score() gave {score.get(key)!r} for {key!r}, which has no mean; return a number")
        return {key: sum(score[key] for score in scores) / len(scores) for key in keys}

    def problems(self) -> list[str]:
        """Return a line for each problem of the options; a task may extend it, to refuse combinations of values."""
        return problems(self)


_METHODS = {
    name: tuple(inspect.signature(method).parameters)
    for name, method in vars(Task).items()
    if inspect.isfunction(method) and not name.startswith("_")
}
"""The names and parameters, `self` included, of the methods that the trainer calls."""


def contract_faults(cls: Any) -> list[str]:
    """Return why a class cannot be used as a task, a phrase for each reason; an empty list if it can be used."""
    if not isinstance(cls, type) or not issubclass(cls, Task) or cls is Task:
        return [f"{getattr(cls, '__qualname__', repr(cls))} is not a subclass of accel_sft.Task"]
    causes = []
    if "__dataclass_fields__" not in vars(cls) or not all(f.kw_only for f in dataclasses.fields(cls) if f.init):
        causes.append(f"{cls.__name__} is not a keyword-only dataclass; write @dataclass(kw_only=True) above it")
    if missing := sorted(cls.__abstractmethods__):
        causes.append(f"{cls.__name__} lacks {', '.join(missing)}")
    causes += [fault for name in _METHODS if name not in missing and (fault := _signature_fault(cls, name))]
    fields = {field.name for field in dataclasses.fields(cls)}
    for name, kind in (("main_metric", str), ("higher_is_better", bool)):
        if name in fields:
            causes.append(f"{name} has a type annotation, which makes it an option; remove the annotation")
        elif not isinstance(getattr(cls, name, None), kind) or getattr(cls, name) == "":
            causes.append(f"{name} is missing, empty or not a {kind.__name__}")
    return causes + _option_faults(cls)


def _signature_fault(cls: type[Task], name: str) -> str:
    bound = getattr(cls, name)
    expected = f"{name}({', '.join(_METHODS[name])})"
    bound_already = isinstance(inspect.getattr_static(cls, name), (staticmethod, classmethod))
    try:
        inspect.signature(bound).bind(*_METHODS[name][1 if bound_already else 0 :])
    except (TypeError, ValueError) as error:  # ValueError: a callable written in C
        return f"{name} does not accept the trainer's call {expected}: {error}"
    return ""


def _flags(setting: Any) -> set[str]:
    return {setting.flag, "--no-" + setting.flag[2:]} if setting.type is bool else {setting.flag}


def _option_faults(cls: type[Task]) -> list[str]:
    try:
        own = settings(cls)
    except (TypeError, NameError) as error:
        return [str(error)]
    taken = {"--help", "--help-all", "--config", "--version", "--task"}.union(*map(_flags, settings(EvaluateConfig)))
    causes = []
    for setting in own:
        if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]|[a-z]", setting.name):
            causes.append(
                f"{setting.name!r} cannot be an option's name; use lower-case letters and digits, as in my_option"
            )
        clash = sorted(_flags(setting) & taken)
        if clash:
            causes.append(f"{' and '.join(clash)}: the trainer or the task has this option; rename {setting.name!r}")
        elif not setting.required and setting.problem(setting.default):
            causes.append(f"the default is refused: {setting.problem(setting.default)}")
        taken |= _flags(setting)
    return causes
