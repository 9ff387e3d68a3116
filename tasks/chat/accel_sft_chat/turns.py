"""Makes a row's turns into a conversation that chat templates accept, marks the learnt turns, and notes all changes."""

from __future__ import annotations

from typing import Any, NamedTuple

from accel_sft import RowLeftOut
from accel_sft_chat.messages import IN_PROMPT, Turn

LEARN = ("every", "last", "marked")
"""Which assistant turns are learnt: all that do not have weight 0, only the last of these, or those with weight 1."""

JOINED = "with two consecutive {} turns, which are joined by a blank line"
LEADING = "whose first turns are the assistant's or a tool's; these turns are left out"
TRAILING = "whose last turns are no answer to learn; these turns are left out"
EMPTY = "with an empty assistant turn, which is not learnt"
UNLEARNT = "with assistant turns of weight 0 (or train: false), which are not learnt"
BOTH_SYSTEMS = "with a system turn and a system column; the turn is used"
GIVEN_SYSTEM = "without a system prompt; they get --system-prompt"


class Dialogue(NamedTuple):
    """One row as the task gives it to the trainer.

    Attributes:
        prompt: the turns before the first learnt turn.
        answered: the turns from the first to the last learnt turn; an assistant turn that is not learnt has weight 0.
        tools: the schemas of tools; None if there are none.
        variables: variables that the row sets in the chat template; None without any.
        rejected: a worse answer than `answered`, one turn as that is; None without any.
    """

    prompt: list[Turn]
    answered: list[Turn]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any] | None = None
    rejected: list[Turn] | None = None

    @property
    def answer(self) -> Turn:
        """The last turn, which an evaluation generates."""
        return self.answered[-1]

    @property
    def question(self) -> str:
        """All turns before the answer, without regard to case, spaces and punctuation.

        Rows with the same question go to the same split when some rows are held out.
        """
        turns = [*self.prompt, *self.answered[:-1]]
        return "\n".join(f"{turn['role']} {_bare(turn)}" for turn in turns)


def dialogue(
    turns: list[Turn], system_text: str, tools: list[dict[str, Any]] | None, learn: str, given_system: str | None
) -> tuple[Dialogue, tuple[str, ...]]:
    """The conversation, and notes on what was done to the row.

    Args:
        system_text: the text of the row's own system column, or "".
        learn: one of LEARN.
        given_system: the system prompt for rows without one.
    Raises:
        RowLeftOut: nothing in the row can be learnt.
    """
    notes: dict[str, None] = {}
    first = [{"role": "system", "content": system_text}] if system_text.strip() else []
    if turns and turns[0]["role"] == "system":
        if first and first[0]["content"] != turns[0]["content"]:
            notes[BOTH_SYSTEMS] = None
    elif first:
        turns = [*first, *turns]
    elif given_system:
        turns = [{"role": "system", "content": given_system}, *turns]
        notes[GIVEN_SYSTEM] = None
    turns = _joined(_without_leading(turns, notes), notes)
    learnt = _learnt(turns, learn, notes)
    if not learnt:
        raise RowLeftOut(
            "no assistant turn is marked to be learnt" if learn == "marked" else "no assistant turn to learn"
        )
    if not learnt[0]:
        raise RowLeftOut("there is nothing before the answer")
    if any(turn["role"] != "assistant" for turn in turns[learnt[-1] + 1 :]):
        notes[TRAILING] = None
    marked = [
        {**unmarked(turn), **({"weight": 0} if turn["role"] == "assistant" and at not in learnt else {})}
        for at, turn in enumerate(turns[: learnt[-1] + 1])
    ]
    prompt = [unmarked(turn) for turn in marked[: learnt[0]]]
    return Dialogue(prompt, marked[learnt[0] :], tools), tuple(notes)


def _without_leading(turns: list[Turn], notes: dict[str, None]) -> list[Turn]:
    """The turns without assistant and tool turns before the first user turn; unchanged if there is no user turn."""
    roles = [turn["role"] for turn in turns]
    if "user" not in roles:
        return turns
    user = roles.index("user")
    rest = [turn for turn in turns[:user] if turn["role"] == "system"] + turns[user:]
    if len(rest) < len(turns):
        notes[LEADING] = None
    return rest


def _joined(turns: list[Turn], notes: dict[str, None]) -> list[Turn]:
    """The turns, with consecutive turns of one role joined if that loses nothing; tool results stay separate."""
    joined: list[Turn] = []
    for turn in turns:
        before = joined[-1] if joined else None
        if before is None or not _joinable(before, turn):
            joined.append(turn)
            continue
        contents = [text for text in (before["content"], turn["content"]) if text]
        lists = {key: [*before.get(key, ()), *turn.get(key, ())] for key in ("tool_calls", "images")}
        lists = {key: values for key, values in lists.items() if values}
        joined[-1] = {**before, "content": "\n\n".join(contents), **lists}
        if len(contents) > 1:
            notes[JOINED.format(turn["role"])] = None
    return joined


def _joinable(before: Turn, turn: Turn) -> bool:
    if turn["role"] == "tool" or any(before.get(name) != turn.get(name) for name in ("role", "name", "weight")):
        return False
    if turn["role"] == "assistant" and (IN_PROMPT in before) != (IN_PROMPT in turn):
        return False
    if "reasoning_content" in turn:
        return False
    return not before.get("tool_calls") or not turn["content"]  # a text after a call cannot be moved before it


def _learnt(turns: list[Turn], learn: str, notes: dict[str, None]) -> list[int]:
    learnt = []
    for at, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        if not says_something(turn):
            notes[EMPTY] = None
        elif turn.get(IN_PROMPT):
            continue
        elif turn.get("weight") == 0:
            notes[UNLEARNT] = None
        elif learn != "marked" or turn.get("weight"):
            learnt.append(at)
    return learnt[-1:] if learn == "last" else learnt


def says_something(turn: Turn) -> bool:
    """Whether a turn has a text, a tool call or thinking."""
    return bool(turn["content"].strip() or turn.get("tool_calls") or turn.get("reasoning_content", "").strip())


def unmarked(turn: Turn) -> Turn:
    """A turn without the keys that say whether it is learnt."""
    return {name: value for name, value in turn.items() if name not in ("weight", IN_PROMPT)}


def _bare(turn: Turn) -> str:
    return "".join(mark for mark in turn["content"].casefold() if mark.isalnum()) + "".join(
        str(turn.get(key, "")) for key in ("tool_calls", "images")
    )
