"""The base class of tasks: examples, prompts, answers and scores. Needs only the standard library."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from accel_sft.api.errors import UserError
from accel_sft.api.options import problems


@dataclasses.dataclass(kw_only=True)
class Task(abc.ABC):
    """Subclass it as a keyword-only dataclass. Each field is also a command-line option, which `option` describes.

    An example may be any object; the trainer only hands it back to the methods below. All methods must be pure:
    every rank calls them and must get the same results, which are kept for later runs.
    """

    main_metric: ClassVar[str]
    """Key of `aggregate`'s result that decides which checkpoint is best.

    If it is "eval_loss", with `higher_is_better` False, the validation loss decides, and no answer is generated.
    """
    higher_is_better: ClassVar[bool] = True
    tiny_steps: ClassVar[int] = 1400
    """Steps for which the built-in model `tiny` learns the task, unless --max-steps or --epochs is given."""

    @abc.abstractmethod
    def dataset(self, split: str) -> Sequence[Any]:
        """The examples of `split`, "train" or "validation". Raise UserError for data that cannot be used.

        The sequence may have an attribute `fingerprint`, a text that changes whenever an example does (the result of
        `read_rows` has one). A later start then need not read every message and target to see that none has changed.
        An attribute `notes` may hold lines about the data, which are shown at the start.
        """

    @abc.abstractmethod
    def messages(self, example: Any) -> list[dict[str, Any]]:
        """The prompt as chat messages, [{"role": "system" | "user" | "assistant", "content": ...}, ...].

        An empty list says that target() is raw text, of which every token is learnt, without a chat template.

        A content is a text, or a list of parts, {"type": "text", "text": ...} and {"type": "image", "image": ...}, the
        image a path, bytes or a PIL image. A prompt of one turn with `"continued": True` is a text that the answer
        continues: where the model has no chat template, they are concatenated.
        """

    @abc.abstractmethod
    def target(self, example: Any) -> str | list[dict[str, Any]]:
        """Return the answer, the only text (with its end-of-turn token) that carries loss.

        Or return the turns after the prompt, as messages; the last one must be an assistant's. Every assistant turn
        carries loss unless it has `"weight": 0`. `score` gets the text generated in place of the last turn with loss.
        """

    def tools(self, example: Any) -> list[dict[str, Any]] | None:
        """Schemas of the tools that the chat template offers to the model; None if the example has no tools."""
        return None

    def chat_template_kwargs(self, example: Any) -> dict[str, Any] | None:
        """What the example sets in the chat template, such as {"enable_thinking": False}; an explicit --thinking off or
        keep has precedence."""
        return None

    @abc.abstractmethod
    def score(self, example: Any, text: str) -> dict[str, Any]:
        """Score one generated answer: numbers (or anything JSON can hold that `aggregate` understands) by name."""

    def aggregate(self, scores: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Return a number for each metric from the scores, one for each example; by default the mean of each key."""
        keys = dict.fromkeys(key for score in scores for key in score)
        for key in keys:
            for score in scores:
                if not isinstance(score.get(key), (int, float)):
                    raise UserError(
                        f"score() gave {key!r} {score.get(key)!r}, of which there is no mean; give a number in every "
                        "score, or write aggregate()"
                    )
        return {key: sum(score[key] for score in scores) / len(scores) for key in keys}

    def problems(self) -> list[str]:
        """Return a line for each problem of the options; extend this if some values do not go together."""
        return problems(self)
