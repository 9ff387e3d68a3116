"""Reads rows with two answers, chosen and rejected, in the forms of TRL, LLaMA-Factory, Axolotl, ms-swift, OpenAI and
UltraFeedback. Each answer is read as if it were the only one of its row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_sft import RowLeftOut, RowProblem
from accel_sft_chat.columns import ONE_SIDED, RENDERED, RowTurns, messages_in, read_row, recognised, unwrapped
from accel_sft_chat.keys import RowRefused, is_empty
from accel_sft_chat.messages import Turn
from accel_sft_chat.turns import says_something, unmarked

_BESIDE = {"prompt": "completion", "instruction": "output", "messages": "messages"}
"""Kinds of columns that hold a prompt, and the kind as which an answer beside it is read."""
_NO_RENDERED = "an answer to the prompt in another column (--columns prompt=NAME), or messages; a text is no chat"


def read_pair(row: Mapping[str, Any], columns: tuple[tuple[str, str], ...], folder: str = "") -> RowTurns:
    """Read a row as `read_row` does. If it has two answers, `turns` ends with the chosen one, after the prompt's turns.

    If `--columns` names the column of an answer as something else, such as completion, the row has one answer.

    Raises:
        RowLeftOut: one of the answers is missing or empty.
        RowProblem, RowRefused: as in `read_row`, or the answers cannot be compared.
    """
    named, given = dict(columns), row if columns else unwrapped(row)
    column, _ = recognised(given, columns)
    chosen, rejected = column("chosen"), column("rejected")
    if not chosen and rejected.startswith("rejected_"):  # ms-swift: the messages end with the chosen answer
        chosen = column("messages")
    filled = [not is_empty(given[name]) for name in (chosen, rejected) if name]
    other_use = {"completion", "output", "text"} & {*named} or {chosen, rejected} & {*named.values()}
    if len(filled) < 2 or not any(filled) or (other_use and named.keys().isdisjoint(("chosen", "rejected"))):
        return read_row(row, columns, folder)
    if not all(filled):
        raise RowLeftOut(ONE_SIDED)
    prompt = given.get(column("prompt"))
    asked, whole = messages_in(prompt) or [], _whole(given[chosen])
    is_repeated = bool(asked) and whole[: len(asked)] == asked
    if asked and not is_repeated and not _whole(asked[-1:]):
        whole = []  # the prompt ends with an answer, and chosen goes on after it
    kinds = [kind for kind in _BESIDE if kind in named] or [*_BESIDE]
    kinds = [kind for kind in kinds if column(kind)]
    before = min(kinds, key=lambda kind: is_empty(given[column(kind)]), default="")

    def read(at: str) -> RowTurns:
        value, kind = given[at], _BESIDE.get(before, "messages")
        answer = messages_in(value)
        if isinstance(value, str) and not answer and (not (whole or before) or RENDERED.match(value.lstrip())):
            raise (RowProblem if before else RowRefused)(at, _NO_RENDERED)
        said = answer or [{"role": "assistant", "content": value}]
        if whole:
            kind, value = "messages", _whole(value) or [*whole[:-1], *said]
        elif before == "messages":
            at = column(before)
            value = [*(messages_in(given[at]) or [given[at]]), *said]
        elif before == "instruction" and answer:
            raise RowProblem(at, f"a text beside {column(before)}, or --columns prompt={column(before)}")
        rest = {name: held for name, held in given.items() if name not in (chosen, rejected)}
        others = [pair for pair in columns if pair[0] not in ("chosen", "rejected", kind)]
        return read_row({**rest, at: value}, (*others, (kind, at)), folder)

    better, worse = read(chosen), read(rejected)
    _refuse_unlike(better.turns, worse.turns, chosen, rejected)
    notes, unread = (dict.fromkeys([*getattr(better, of), *getattr(worse, of)]) for of in ("notes", "unread"))
    if whole and (is_repeated or str(prompt).strip() in (turn["content"].strip() for turn in better.turns)):
        unread.pop(column("prompt"), None)
    form = f"{better.form}, with a worse answer (column {rejected})"
    rejected_turns = [unmarked(worse.turns[-1])]
    return better._replace(form=form, notes=(*notes,), unread=(*unread,), rejected=rejected_turns)


def _whole(value: Any) -> list[Any]:
    """The messages of a whole chat; [] if `value` is an answer alone."""
    turns = messages_in(value) or []
    roles = {str(turn.get("from") or turn.get("role")).lower() for turn in turns if isinstance(turn, dict)}
    return turns if {"user", "human"} & roles else []


def _refuse_unlike(first: list[Turn], second: list[Turn], chosen: str, rejected: str) -> None:
    """Refuse two chats that do not share all turns before an answer."""
    if any("images" in turn for turn in (*first, *second)):
        raise RowRefused(None, f"no images beside {chosen} and {rejected}: text alone is read there")
    most = min(len(first), len(second)) - 1
    shared = next((at for at in range(most) if first[at] != second[at]), most)
    if any(len(turns) != shared + 1 or turns[-1]["role"] != "assistant" for turns in (first, second)):
        raise RowProblem(rejected, f"one turn, the assistant's, after the turns that it shares with {chosen}")
    if shared and first[shared - 1]["role"] == "assistant":
        raise RowProblem(rejected, "a prompt that ends with no assistant turn")
    if not all(says_something(turn) and turn.get("weight") != 0 for turn in (first[-1], second[-1])):
        raise RowLeftOut(ONE_SIDED)
