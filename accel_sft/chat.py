"""From a task's messages and target to token ids and the mask of what is learnt (law 2)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from accel_sft.options import UserError
from accel_sft.task import Task

_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Encoded:
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


@dataclasses.dataclass
class Encoding:
    """A split's examples that can be used, and the indices of those that cannot, by reason."""

    split: str
    kept: list[Encoded]
    left_out: dict[str, list[int]]
    cut: list[int]

    def lines(self) -> list[str]:
        """One line for each reason an example was left out or cut."""
        found = [*self.left_out.items(), ("cut to --max-length, their end-of-turn token is not learnt", self.cut)]
        return [f"{self.split}: {len(indices)} {reason} ({_named(indices)})" for reason, indices in found if indices]


def _named(indices: list[int]) -> str:
    more = f", and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
    return "examples " + ", ".join(map(str, indices[:_SHOWN])) + more


def end_of_turn_ids(tokenizer: Any, generation_config: Any = None) -> set[int]:
    """Ids that end an answer: the tokenizer's eos and those the model's generation settings name."""
    named = getattr(generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return {token for token in ids if token is not None}


def encode(
    tokenizer: Any,
    task: Task,
    examples: Sequence[Any],
    split: str,
    *,
    eos_ids: set[int],
    max_length: int,
    truncation: str,
) -> Encoding:
    """Render and tokenize a split, and find for each example where the answer begins and ends.

    The template is rendered once with and once without the answer; the first must be a prefix of the second, as
    token ids. What a template writes behind the end-of-turn token (Qwen's newline) is cut: no answer contains it.

    Args:
        eos_ids: `end_of_turn_ids`; if the template closes the answer with none of them, the tokenizer's eos is added.
        max_length: tokens per example.
        truncation: "drop", "right" or "error": what happens to longer ones.
    Raises:
        UserError: no chat template, a template that rejects the messages, a task that returns nonsense, a prompt
            that is not a prefix of prompt + answer, no usable example left.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("the tokenizer has no chat template: use an instruction-tuned model, or set its chat_template")
    turns, targets = conversations(task, examples, split)
    prompts = _tokenize(tokenizer, turns, split, add_generation_prompt=True)
    answered = [[*ours, {"role": "assistant", "content": text}] for ours, text in zip(turns, targets, strict=True)]
    wholes = _tokenize(tokenizer, answered, split, add_generation_prompt=False)

    result = Encoding(split, [], {}, [])
    too_long = f"left out: longer than --max-length {max_length}"
    for index, (prompt, whole) in enumerate(zip(prompts, wholes, strict=True)):
        if whole[: len(prompt)] != prompt:
            raise UserError(_not_a_prefix(tokenizer, split, index, prompt, whole))
        if not targets[index].strip():
            result.left_out.setdefault("left out: the answer is empty", []).append(index)
            continue
        ids = _until_end_of_turn(whole, len(prompt), eos_ids, tokenizer.eos_token_id)
        if len(ids) > max_length:
            if truncation == "right" and len(prompt) < max_length:
                result.cut.append(index)
            else:
                result.left_out.setdefault(too_long, []).append(index)
                continue
        example = Encoded(index, ids[:max_length], len(prompt))
        if example.supervised_tokens:
            result.kept.append(example)
        else:
            result.left_out.setdefault("left out: the tokenizer leaves nothing of the answer to learn", []).append(
                index
            )
    if truncation == "error" and too_long in result.left_out:
        raise UserError(*result.lines(), "--truncation error stops here: raise --max-length, or choose drop or right")
    if not result.kept:
        raise UserError(*result.lines(), f"{split}: no example is left to use")
    return result


def conversations(task: Task, examples: Sequence[Any], split: str) -> tuple[list[list[dict[str, str]]], list[str]]:
    """Each example's messages and target, checked.

    Raises:
        UserError: the first example for which the task fails or returns something else, by split and index.
    """
    prompts, targets = [], []
    for index, example in enumerate(examples):
        try:
            turns, target = task.messages(example), task.target(example)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{split} example {index}: the task failed: {type(error).__name__}: {error}") from error
        if not isinstance(target, str):
            raise UserError(f"{split} example {index}: target() gave {type(target).__name__}, expected text")
        valid = isinstance(turns, list) and all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in turns
        )
        if not valid or not turns:
            raise UserError(
                f"{split} example {index}: messages() gave {str(turns)[:80]!r}, "
                'expected a list of {"role": ..., "content": ...}'
            )
        if turns[-1]["role"] == "assistant":
            raise UserError(
                f"{split} example {index}: messages() ends with an assistant turn; the answer belongs in target()"
            )
        if any(not text.isprintable() and re.search("[\ud800-\udfff]", text) for text in (target, *_contents(turns))):
            raise UserError(f"{split} example {index}: a lone surrogate (\\ud800-\\udfff) is not text; remove it")
        prompts.append(turns)
        targets.append(target)
    return prompts, targets


def _contents(turns: list[dict[str, str]]) -> list[str]:
    return [turn["content"] for turn in turns]


def _tokenize(
    tokenizer: Any, conversations: list[list[dict[str, str]]], split: str, *, add_generation_prompt: bool
) -> list[list[int]]:
    import jinja2

    try:
        texts = tokenizer.apply_chat_template(
            conversations, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except jinja2.exceptions.TemplateError as error:
        roles = "/".join(turn["role"] for turn in conversations[0])
        raise UserError(
            f"{split}: the model's chat template rejects these messages (roles {roles}): {error}; "
            "change the task's messages() or the model"
        ) from None
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _until_end_of_turn(whole: list[int], prompt_length: int, eos_ids: set[int], eos_token_id: int) -> list[int]:
    for position in range(len(whole) - 1, prompt_length - 1, -1):
        if whole[position] in eos_ids:
            return whole[: position + 1]
    return [*whole, eos_token_id]


def _not_a_prefix(tokenizer: Any, split: str, index: int, prompt: list[int], whole: list[int]) -> str:
    pairs = zip(prompt, whole, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(whole)))
    return (
        f"{split} example {index}: the prompt is not a prefix of prompt + answer; they part at token {at}: "
        f"...{tokenizer.decode(prompt[max(at - 3, 0) : at + 3])!r} against "
        f"...{tokenizer.decode(whole[max(at - 3, 0) : at + 3])!r}; the chat template or the answer's first characters "
        "must not change the prompt's tokens"
    )
