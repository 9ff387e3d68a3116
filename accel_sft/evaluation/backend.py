"""The interface of what generates answers for the evaluator: the decoder, transformers' `generate`, a server."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from accel_sft.chat.encoded import Encoded


class AnswerInText(NamedTuple):
    """An answer as a server writes it, in place of token ids: the text to be scored, how many tokens it took, and a key
    of UNUSUAL if it is no whole answer."""

    text: str
    tokens: int
    unusual: str = ""


UNUSUAL = {
    "length": "cut (raise --max-new-tokens)",
    "content_filter": "withheld by the server's filter",
    "tool_calls": "tool calls",
    "empty": "empty",
}
"""What an answer may be in place of a whole one: a server's word for why it ended, and that in words."""


@dataclasses.dataclass(frozen=True)
class Generated:
    """Answers of one rank.

    Attributes:
        answers: this rank's share of the examples, each with its answer: a list of token ids, the end-of-turn token
            included, or an AnswerInText.
        seconds: seconds that generating took, without loading or checking anything.
        peaks: peak memory of generating in GiB, by the names of `tracking.system.peak_memory_gib`.
    """

    answers: list[tuple[Encoded, Any]]
    seconds: float
    peaks: dict[str, float]


class AnswerBackend(Protocol):
    """Generates greedy answers. Every rank calls it with the same examples; together they answer each one once."""

    def __call__(self, examples: Sequence[Encoded], max_new_tokens: int) -> Generated:
        """Answer the examples with at most `max_new_tokens` tokens each, the token that ends an answer included."""
