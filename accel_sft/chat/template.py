"""Renders text with a chat template, on a fixed day and within a time limit; its failures are errors of one line.

Here are also the errors for answers that a template drops.
"""

import contextlib
import datetime
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2

from accel_sft.api.errors import UserError
from accel_sft.chat.conversation import Turns
from accel_sft.io.prefix import common_length
from accel_sft.io.text import LONGEST_ERROR, one_line

SECONDS = 60
"""Seconds of computing after which a template is taken to be endless; a thousand conversations take one second."""
MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|◁[^◁▷\s]+▷")
"""What templates write around blocks: `<think>`, `<|channel|>`, `[/THINK]`, `◁/think▷`."""
_DIRECTIVES = "aAbBcdDeFGgHIjmMpSuUVwWxXyYZ"
"""Letters of strftime's directives; the time of the day is 00:00:00."""


def dated(template: str, day: str | None) -> str:
    """A template whose `strftime_now` gives this day (YYYY-MM-DD), whenever it is rendered.

    `strftime_now` becomes a macro in front of the template, because apply_chat_template passes plain data on to the
    template, and no function (transformers 5.23). Jinja removes the line break after the macro.
    """
    if not day or "strftime_now" not in template:
        return template
    date = datetime.datetime.fromisoformat(day)
    written = [(f"%{letter}", date.strftime(f"%{letter}")) for letter in _DIRECTIVES]
    written += [(f"%-{letter}", date.strftime(f"%{letter}").lstrip("0") or "0") for letter in "dmyjHIMS"]
    replaced = "".join(f".replace({name!r}, {text!r})" for name, text in written)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"


class Rejected(UserError):
    """A chat template rejects messages, or fails on them; in another form it may take them."""


class AnswerDropped(UserError):
    """A chat template drops or cuts an answer."""


class TextDropped(UserError):
    """A chat template drops the text of a message."""


class NotAPrefix(UserError):
    """A prompt is not a prefix of the same prompt with its answer."""


class _NoEnd(BaseException):
    """A template does not finish. Not an Exception: Jinja swallows those while it folds constants."""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raises _NoEnd after SECONDS of this process's own computing, in the main thread only, as signals reach no other.
    Python handles signals between two steps of a loop, and within the power of a large number."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise _NoEnd

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 1)  # repeats, because what a destructor raises is swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def rendered(
    tokenizer: Any, template: str, conversations: Sequence[Turns], split: str, *, prompt: bool, given: Mapping[str, Any]
) -> list[str]:
    """Each conversation as the template writes it.

    Args:
        prompt: also write what begins the answer (the generation prompt).
        given: the template's own variables.
    Raises:
        Rejected: the template rejects the messages, or fails on them.
        UserError: the template does not finish.
    """
    if not conversations:
        return []
    roles = "/".join(turn["role"] for turn in conversations[0])
    mend = "change the task's messages() or the model"
    try:
        with _limited():
            found = tokenizer.apply_chat_template(
                list(conversations), chat_template=template, tokenize=False, add_generation_prompt=prompt, **given
            )
            "".join(found).encode()  # no tokenizer takes half a surrogate pair
            return found
    except _NoEnd:
        raise UserError(
            f"{split}: the model's chat template computed for {SECONDS} seconds on {len(conversations)} conversations "
            f"(roles {roles}) and came to no end; {mend}"
        ) from None
    except Exception as error:  # a template is the model's own program, and may raise anything
        told, cause = "rejects", str(error)
        if not isinstance(error, jinja2.exceptions.TemplateError):
            told, cause = "fails on", f"{type(error).__name__}: {error}"
        raise Rejected(
            f"{split}: the model's chat template {told} these messages (roles {roles}): "
            f"{one_line(cause, LONGEST_ERROR)}; {mend}"
        ) from error


def holds(prompt: str, rest: str, target: str) -> bool:
    """Whether what follows a rendered prompt has the answer; white space does not count.

    Templates strip white space around an answer, and move it around a thinking block, whose opening mark may end the
    prompt. Text is compared, not tokens, so the tokenizer's normalization makes no difference.
    """
    if target.strip() in rest:
        return True
    opened = MARK.findall(prompt)[-1:]
    if opened and prompt.rstrip().endswith(opened[0]):
        target = target.lstrip().removeprefix(opened[0])
    return "".join(target.split()) in "".join(rest.split())


def refusal(split: str, index: int, prompt: str, whole: str, target: str, *, thinks: bool) -> AnswerDropped:
    """The error for a template that drops or cuts an answer; `thinks` says that --thinking keep could mend it."""
    made, answer = one_line(whole[common_length([prompt, whole]) :]), one_line(target)
    mend = "learn the thinking with --thinking keep, or " if thinks else ""
    return AnswerDropped(
        f'{split} example {index}: the answer would not be trained on: the chat template makes "{made}" of "{answer}"; '
        f"{mend}give the tokenizer a chat_template that writes an assistant's content whole, or use another model, or "
        "change the task's target()"
    )


def not_a_prefix(tokenizer: Any, split: str, index: int, asked: str, answered: str) -> NotAPrefix:
    """The error for a prompt that is not a prefix of the same prompt with its answer; it shows the first difference."""
    prompt, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (asked, answered))
    at = common_length([prompt, whole])
    return NotAPrefix(
        f"{split} example {index}: the prompt is not a prefix of prompt + answer; they part at token {at}: "
        f"...{tokenizer.decode(prompt[max(at - 3, 0) : at + 3])!r} against "
        f"...{tokenizer.decode(whole[max(at - 3, 0) : at + 3])!r}; the chat template or the answer's first characters "
        "must not change the prompt's tokens"
    )
