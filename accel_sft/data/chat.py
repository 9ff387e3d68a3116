"""Turns messages and target into token ids and loss mask; drops, cuts or refuses rows longer than --max-length."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.data.conversation import Turns, conversation
from accel_sft.data.form import split_thinking
from accel_sft.data.rendering import Rendering
from accel_sft.data.template import holds, not_a_prefix, refusal

_SHOWN = 5
_PART_EXAMPLES, _PART_CHARACTERS = 512, 1 << 18
"""Examples that are tokenized together at most, and when there are enough: memory does not grow with the data."""


class Encoded(NamedTuple):
    """One example as token ids: the first `prompt_length` are the prompt, the rest carry loss.

    The last id is the end-of-turn token unless the example was cut (`--truncation right`).
    """

    index: int
    input_ids: list[int]
    prompt_length: int

    @property
    def supervised_tokens(self) -> int:
        """Tokens with a loss; the first token of all has no predecessor to be predicted from."""
        return len(self.input_ids) - max(self.prompt_length, 1)


@dataclasses.dataclass(frozen=True)
class Rules:
    """What decides an example's tokens besides its text.

    Attributes:
        eos_ids: `end_of_turn_ids`; if the template closes the answer with none of them, the tokenizer's eos is added.
        max_length: tokens per example.
        truncation: "drop", "right" or "error": what happens to longer ones.
        thinking, day: of the Rendering.
    """

    eos_ids: frozenset[int]
    max_length: int
    truncation: str
    thinking: str = "template"
    day: str | None = None

    @property
    def too_long(self) -> str:
        return f"left out: longer than --max-length {self.max_length}"


@dataclasses.dataclass
class Encoding:
    """The usable examples of a split, and the indices of those left out, by reason.

    Attributes:
        notes: lines about where the tokens come from.
    """

    split: str
    kept: Sequence[Encoded] = dataclasses.field(default_factory=list)
    left_out: dict[str, list[int]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    cut: list[int] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def lines(self) -> list[str]:
        """The notes, and one line for each reason that examples were left out or cut."""
        found = [*self.left_out.items(), ("cut to --max-length, their end-of-turn token is not learnt", self.cut)]
        named = [f"{self.split}: {len(indices)} {reason} ({_named(indices)})" for reason, indices in found if indices]
        return [*self.notes, *named]

    def note(self, other: Encoding) -> None:
        """Add what was left out and cut in the part of the split that follows."""
        for reason, indices in other.left_out.items():
            self.left_out[reason] += indices
        self.cut += other.cut

    def check(self, examples: int, rules: Rules) -> None:
        """Check that some of the split's examples are left, and none too long where that is an error.

        Raises:
            UserError: the check failed, and why.
        """
        if rules.truncation == "error" and rules.too_long in self.left_out:
            raise UserError(*self.lines(), "--truncation error stops here: raise --max-length, or choose drop or right")
        if sum(map(len, self.left_out.values())) == examples:
            raise UserError(*self.lines(), f"{self.split}: no example is left to use")


def _named(indices: list[int]) -> str:
    more = f", and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
    return "examples " + ", ".join(map(str, indices[:_SHOWN])) + more


def end_of_turn_ids(tokenizer: Any, generation_config: Any = None) -> set[int]:
    """Ids that end an answer: the tokenizer's eos and those the model's generation settings name."""
    named = getattr(generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return {token for token in ids if token is not None}


def encode_parts(
    rendering: Rendering, task: Task, examples: Sequence[Any], indices: range, split: str, rules: Rules
) -> Iterator[Encoding]:
    """Render and tokenize some of a split's examples, a few at a time, and find where each answer begins and ends.

    What a template writes behind the end-of-turn token (Qwen's newline) is cut: no answer contains it.

    Raises:
        UserError: a template that rejects the messages, that drops or cuts an answer, a task that returns nonsense, a
            prompt that does not begin the rendering with an answer, in a template for which no sound way is known.
    """
    waiting, characters = [], 0
    for index in indices:
        turns, target = conversation(task, examples, split, index)
        waiting.append((index, turns, target))
        characters += len(target) + sum(len(turn["content"]) for turn in turns)
        if len(waiting) == _PART_EXAMPLES or characters >= _PART_CHARACTERS or index == indices[-1]:
            yield _encode_part(rendering, waiting, split, rules)
            waiting, characters = [], 0


def _encode_part(rendering: Rendering, part: list[tuple[int, Turns, str]], split: str, rules: Rules) -> Encoding:
    tokenizer = rendering.tokenizer
    every = rendering.examples([turns for _, turns, _ in part], [target for _, _, target in part], split)
    prompts, wholes = (
        tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        for texts in ([each.prompt for each in every], [each.prompt + (each.rest or "") for each in every])
    )
    kept: list[Encoded] = []
    result, closers = Encoding(split, kept), {}  # how many end tokens are in what follows an answer
    for (index, turns, target), text, prompt, whole in zip(part, every, prompts, wholes, strict=True):
        form = rendering.form(turns, split)
        thinking, answer = split_thinking(target)
        if not (answer if rendering.thinking == "keep" else target).strip():
            result.left_out["left out: the answer is empty"].append(index)
            continue
        mendable = rendering.thinking != "keep" and thinking is not None
        if text.rest is None and not mendable:
            raise not_a_prefix(tokenizer, split, index, text.prompt, text.whole)
        wanted = [thinking or "", answer] if rendering.thinking == "keep" else [target]
        if text.rest is None or form.lead is None or not all(holds(text.prompt, text.rest, each) for each in wanted):
            raise refusal(split, index, text.prompt, text.whole, target, thinks=mendable)
        if whole[: len(prompt)] != prompt:
            rendering.note(
                "chat template: an answer's first characters change the prompt's last token; answers are tokenized "
                "apart from prompts, as they are generated"
            )
            whole = prompt + _apart(tokenizer, prompt, whole, text.rest)
        # the template's own end tokens alone end an answer, which may name one too
        tail = form.tail if text.rest.endswith(form.tail) else tokenizer.eos_token
        if tail not in closers:
            closers[tail] = sum(token in rules.eos_ids for token in _tokens(tokenizer, tail))
        ends = [at + 1 for at in range(len(prompt), len(whole)) if whole[at] in rules.eos_ids][-closers[tail] :]
        ids = whole[: ends[0]] if closers[tail] and ends else [*whole, tokenizer.eos_token_id]
        if len(ids) > rules.max_length:
            if rules.truncation == "right" and len(prompt) < rules.max_length:
                result.cut.append(index)
            else:
                result.left_out[rules.too_long].append(index)
                continue
        example = Encoded(index, ids[: rules.max_length], len(prompt))
        if not (ids[len(prompt) : -1] if prompt else example.supervised_tokens):  # beside the end-of-turn token
            result.left_out["left out: the tokenizer leaves nothing of the answer to learn"].append(index)
        elif not prompt:
            result.left_out["left out: the chat template writes no prompt"].append(index)
        else:
            kept.append(example)
    return result


def _apart(tokenizer: Any, prompt: list[int], whole: list[int], rest: str) -> list[int]:
    """The tokens of what follows a prompt, without it. Some tokenizers write a blank before any text: then behind a
    line break or a special token, where they do not."""
    read = tokenizer.decode(whole)
    for anchor in ("", "\n", tokenizer.eos_token):
        before, ids = _tokens(tokenizer, anchor), _tokens(tokenizer, anchor + rest)
        found = ids[len(before) :]
        if ids[: len(before)] == before and tokenizer.decode(prompt + found) == read:
            return found
    return _tokens(tokenizer, rest)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
