"""Examples as the model reads them: the text of each token, which tokens are special, and which carry loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from accel_sft.chat.encoded import Encoded
from accel_sft.io.text import printable
from accel_sft.tools.check.tokens import supervised_positions

_BEGINNING, _BEFORE_ANSWER, _OF_ANSWER = 60, 120, 400
"""Tokens shown of a long example: at its beginning, before each answer, and from the start of each answer."""
_CONTEXT = 4
"""Number of preceding tokens that a token is decoded with: some tokenizers drop the space before the first word."""


class Piece(NamedTuple):
    """Tokens that together decode to whole characters; with `gap`, tokens that are not shown: `text` says how many."""

    text: str
    supervised: bool
    special: bool = False
    ids: tuple[int, ...] = ()
    gap: bool = False

    @property
    def visible(self) -> str:
        """The text, with line breaks and control characters made visible."""
        return f" … {self.text} … " if self.gap else printable(self.text).replace("\n", "⏎\n")


@dataclasses.dataclass(frozen=True)
class Shown:
    """An example to be printed: `where` it comes from, its pieces, and how many of its tokens are supervised."""

    split: str
    index: int
    where: str
    tokens: int
    supervised: int
    pieces: list[Piece]


def pieces_of(tokenizer: Any, example: Encoded, pad_token_id: int) -> list[Piece]:
    """Return the example's tokens as text. The collator decides which of them are supervised."""
    (positions,) = supervised_positions([example], pad_token_id)
    learnt, ids = set(positions), example.input_ids
    spans = _spans(sorted(learnt), len(ids))
    special = set(tokenizer.all_special_ids)
    special |= {at for at, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    found: list[Piece] = []
    at = 0
    for span in spans:
        if span.start > at:
            found.append(Piece(f"{span.start - at:,} tokens", span.start - 1 in learnt, gap=True))
        found += _decoded(tokenizer, ids, span, learnt, special)
        at = max(at, span.stop)
    return found


def _spans(learnt: Sequence[int], length: int) -> list[range]:
    """Return the positions that are shown: the example's first tokens, and for each span of supervised tokens some
    tokens before it, its first ones and its last two; without such a span, the example's last tokens."""
    begins = [at for place, at in enumerate(learnt) if not place or learnt[place - 1] != at - 1]
    ends = [at + 1 for place, at in enumerate(learnt) if place + 1 == len(learnt) or learnt[place + 1] != at + 1]
    found, shown = [], 0

    def show(begin: int, end: int) -> None:
        nonlocal shown
        if max(begin, shown) < end:
            found.append(range(max(begin, shown), end))
            shown = end

    show(0, min(_BEGINNING, *begins[:1], length))
    for begin, end in zip(begins, ends, strict=True):
        show(begin - _BEFORE_ANSWER, begin)
        show(begin, min(begin + _OF_ANSWER, end))
        show(end - 2, end)
    if not learnt:
        show(length - _BEFORE_ANSWER, length)
    return found


def _decoded(tokenizer: Any, ids: Sequence[int], span: range, learnt: set[int], special: set[int]) -> Iterator[Piece]:
    begin = span.start
    for at in span:
        alone = ids[at] in special
        last = at + 1 == span.stop or (at + 1 in learnt) != (at in learnt) or ids[at + 1] in special
        text = _text(tokenizer, ids, begin, at + 1)
        if alone or last or not text.endswith("\ufffd"):  # U+FFFD is a part of a character, which the next continues
            yield Piece(text, at in learnt, alone, tuple(ids[begin : at + 1]))
            begin = at + 1


def _text(tokenizer: Any, ids: Sequence[int], begin: int, end: int) -> str:
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    context = list(ids[max(begin - _CONTEXT, 0) : begin])
    before, whole = (tokenizer.decode(part, **options) for part in (context, context + list(ids[begin:end])))
    if not whole.startswith(before):
        return tokenizer.decode(list(ids[begin:end]), **options)
    return whole[len(before) :]
