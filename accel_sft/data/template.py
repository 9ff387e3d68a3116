"""What a chat template writes around answers: removed for scoring, thinking too. One that drops answers is refused."""

import re
from collections.abc import Sequence
from typing import Any

import jinja2

from accel_sft.api.errors import UserError
from accel_sft.data.conversation import Turns
from accel_sft.io.text import one_line

_PROBE = "\ue000\ue001"
"""Stands for an answer when its surroundings are looked for: characters that no template strips or splits."""
_MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|◁[^◁▷\s]+▷")
"""What templates write around blocks: `<think>`, `<|channel|>`, `[/THINK]`, `◁/think▷`."""


def rendered(tokenizer: Any, prompts: Sequence[Turns], split: str, answers: Sequence[str] | None = None) -> list[str]:
    """Each conversation as the chat template writes it, with its answer or up to where that begins.

    Raises:
        UserError: the template rejects the messages.
    """
    conversations = list(prompts)
    for at, answer in enumerate(answers or ()):
        conversations[at] = [*prompts[at], {"role": "assistant", "content": answer}]
    try:
        return tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=answers is None)
    except jinja2.exceptions.TemplateError as error:
        roles = "/".join(turn["role"] for turn in conversations[0])
        raise UserError(
            f"{split}: the model's chat template rejects these messages (roles {roles}): {error}; "
            "change the task's messages() or the model"
        ) from None


def surroundings(tokenizer: Any, turns: Turns, prompt: str, split: str) -> tuple[str, str] | None:
    """What the template writes between the rendered prompt and an answer, and behind it; None: it writes no answer."""
    (whole,) = rendered(tokenizer, [turns], split, [_PROBE])
    lead, found, tail = _behind(prompt, whole).partition(_PROBE)
    return (lead, tail) if found else None


def holds(prompt: str, whole: str, target: str) -> bool:
    """Whether a rendered conversation has the answer behind the rendered prompt; white space does not count.

    Templates strip white space around an answer, and move it around a thinking block, whose opening mark may be the
    prompt's last word. Text is compared, not tokens: how the tokenizer normalises makes no difference.
    """
    if whole.find(target.strip(), len(prompt)) >= 0:
        return True
    opened = _MARK.findall(prompt)[-1:]
    if opened and prompt.rstrip().endswith(opened[0]):
        target = target.lstrip().removeprefix(opened[0])
    return "".join(target.split()) in "".join(_behind(prompt, whole).split())


def refusal(split: str, index: int, prompt: str, whole: str, target: str) -> UserError:
    """The error for a template that drops or cuts an answer."""
    made, answer = one_line(_behind(prompt, whole)), one_line(target)
    return UserError(
        f'{split} example {index}: the answer would not be trained on: the chat template makes "{made}" of "{answer}"; '
        "give the tokenizer a chat_template that writes an assistant's content whole, or use another model, or change "
        "the task's target()"
    )


def not_a_prefix(tokenizer: Any, split: str, index: int, prompt: list[int], whole: list[int]) -> UserError:
    """The error for prompt tokens that do not begin those of prompt and answer, with the first difference."""
    pairs = zip(prompt, whole, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(whole)))
    return UserError(
        f"{split} example {index}: the prompt is not a prefix of prompt + answer; they part at token {at}: "
        f"...{tokenizer.decode(prompt[max(at - 3, 0) : at + 3])!r} against "
        f"...{tokenizer.decode(whole[max(at - 3, 0) : at + 3])!r}; the chat template or the answer's first characters "
        "must not change the prompt's tokens"
    )


def _behind(prompt: str, whole: str) -> str:
    """What follows the prompt, which may be a prefix of its tokens only."""
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    pairs = enumerate(zip(prompt, whole, strict=False))
    return whole[next((at for at, (a, b) in pairs if a != b), len(whole)) :]


class AnswerText:
    """The text of a generated answer, without what the template writes around answers, thinking, and special tokens.

    Qwen3's template writes an empty thinking block before every answer, gpt-oss's names a channel, others break the
    line. Answers are learnt and generated with it, but tasks do not know of it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        longest_first = sorted(special, key=lambda token: (-len(token), token))
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __call__(self, turns: Turns, target: str, answer: Sequence[int]) -> str:
        """The text to be scored.

        What the template and the tokenizer make of the target is read as the target, so an answer that is reproduced
        to the token is right where one of the two strips, moves or normalises a character.

        Args:
            turns: the example's messages.
            target: its expected answer.
            answer: the generated token ids, end-of-turn included.
        """
        (prompt,) = rendered(self.tokenizer, [turns], "validation")
        (whole,) = rendered(self.tokenizer, [turns], "validation", [target])
        lead, tail = surroundings(self.tokenizer, turns, prompt, "validation") or ("", "")
        text = self._said(answer, lead, tail, target)
        if text == target:
            return text
        supervised = self.tokenizer(_behind(prompt, whole), add_special_tokens=False)["input_ids"]
        expected = self._said(supervised, lead, tail, target)
        if not expected:  # this tokenizer decodes the lead otherwise than the template writes it: it stays in the text
            return self._said(answer, "", tail, target)
        return target if text == expected else text

    def _said(self, answer: Sequence[int], lead: str, tail: str, target: str) -> str:
        ids = list(answer)
        while ids and self._special.fullmatch(self.tokenizer.decode(ids[-1:])):
            ids.pop()
        text = _without_lead(self.tokenizer.decode(ids, skip_special_tokens=False), lead, target)
        end = self._special.search(tail)
        if end:
            text, tail = text.partition(end[0])[0], tail[: end.start()]
        return self._special.sub("", text.removesuffix(tail))


def _without_lead(text: str, lead: str, target: str) -> str:
    """A generated text from its answer on, whatever it has in the blocks that the template writes before an answer.

    Nothing is left of a text that opened such a block and did not come to its end.
    """
    marks = _MARK.findall(lead)
    closing = next((mark for mark in reversed(marks) if mark[1] == "/"), None)
    if not marks:
        return text.removeprefix(lead)
    if closing and closing in target:  # the thinking is the task's own, to be scored
        return text.lstrip() if lead[0].isspace() else text
    # some tokenizers decode a blank behind a special token, where the template wrote none
    pieces = [piece for piece in re.split(rf"({_MARK.pattern})|\s+", lead) if piece]
    core = re.search(r"\s*".join(map(re.escape, pieces)), text)
    if core:
        return _behind_mark(text, core[0], lead[len(lead.rstrip()) :])
    if closing and closing in text:
        return _behind_mark(text, closing, lead.rpartition(closing)[2])
    opened = marks[0] == closing or text.lstrip().startswith(marks[0])  # by the prompt, or by the text
    return "" if opened else text


def _behind_mark(text: str, mark: str, then: str) -> str:
    rest = text.partition(mark)[2]
    return rest[len(then) :] if rest.startswith(then) else rest.lstrip()
