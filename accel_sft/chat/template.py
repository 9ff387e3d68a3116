"""Renders turns with a tokenizer's chat template and a fixed day; a template's failure becomes a one-line error."""

import datetime
import itertools
import json
import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import jinja2

from accel_sft.api.errors import UserError
from accel_sft.chat.control_tokens import ControlTokens
from accel_sft.chat.conversation import GUARD, Turns
from accel_sft.io.text import LONGEST_ERROR, one_line

MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|◁[^◁▷\s]+▷")
"""Matches the marks that templates write around blocks: `<think>`, `<|channel|>`, `[/THINK]`, `◁/think▷`."""
_DIRECTIVES = "aAbBcdDeFGgHIjmMpSuUVwWxXyYZ"
"""Letters of strftime's directives; the time of day is always 00:00:00."""
_ESCAPED_GUARD = GUARD.encode("unicode_escape").decode()
"""GUARD as it appears if a template prints a list or an object as Python does: `{{ tools }}`."""


def no_template(name: str) -> str:
    """Return the message for a model whose tokenizer has no chat template."""
    return (
        f"--model {name}: its tokenizer has no chat template; add --chat-template chatml (or a Jinja file, or a model "
        "that has one), or use an instruction-tuned model"
    )


class Rejected(UserError):
    """A chat template rejects messages, or fails on them; it may accept them in another `Form`."""


class ChatTemplate:
    """A tokenizer's chat template for guarded texts, with `--thinking` and the day (None: the day of rendering) fixed.

    Attributes:
        arguments: the template's variables that `--thinking` sets, such as `enable_thinking`.
        concatenates: true without a chat template: a text and the answer that continues it are then concatenated.
    """

    def __init__(self, control: ControlTokens, thinking: str, day: str | None) -> None:
        self._control = control
        self.source, self._of_tools = "", ""
        try:
            if control.tokenizer.chat_template is not None:
                self.source = dated(control.tokenizer.get_chat_template(), day)
                self._of_tools = dated(control.tokenizer.get_chat_template(tools=[]), day)  # may be named tool_use
        except ValueError as error:  # the tokenizer has several named templates and no default
            raise UserError(f"the model's chat template cannot be chosen: {one_line(str(error))}") from error
        self.concatenates = not self.source
        if self.concatenates:
            begin = json.dumps(control.tokenizer.decode(control.begin))
            self.source = f"{{{{ {begin} }}}}{{% for turn in messages %}}{{{{ turn.content }}}}{{% endfor %}}"
        on = {"off": False, "keep": True}.get(thinking)
        names = () if on is None else ("enable_thinking", "thinking")
        both = f"{self.source}\n{self._of_tools}"
        self.arguments: dict[str, Any] = {name: on for name in names if re.search(rf"\b{name}\b", both)}

    def source_of(self, offered: dict[str, Any]) -> str:
        """Return the text of the template that transformers chooses for conversations with these variables."""
        return self._of_tools if self._of_tools and "tools" in offered else self.source

    def check(self, continued: bool) -> None:
        """Raise UserError if there is no chat template, and a conversation is more than a text to be continued."""
        if self.concatenates and not continued:
            raise UserError(no_template(self._control.tokenizer.name_or_path))

    def text(self, turns: Turns, split: str, *, prompt: bool, offered: dict[str, Any] | None = None) -> str:
        """Render one conversation as `texts` does."""
        return self.texts([turns], [offered or {}], split, prompt=prompt)[0]

    def texts(
        self, chats: Sequence[Turns], offered: Sequence[dict[str, Any]], split: str, *, prompt: bool
    ) -> list[str]:
        """Render each conversation with its variables; consecutive conversations with equal variables are rendered in
        one call. With `prompt`, also write the generation prompt."""
        rendered: list[str] = []
        for variables, group in itertools.groupby(zip(chats, offered, strict=True), key=itemgetter(1)):
            rendered += self._written([turns for turns, _ in group], {**variables, **self.arguments}, split, prompt)
        return rendered

    def _written(self, chats: Sequence[Turns], given: dict[str, Any], split: str, prompt: bool) -> list[str]:
        roles = "/".join(turn["role"] for turn in chats[0])
        fix = "change the messages, or choose another --chat-template or model"
        try:
            texts: list[str] = self._control.tokenizer.apply_chat_template(
                list(chats), chat_template=self.source_of(given), tokenize=False, add_generation_prompt=prompt, **given
            )
            "".join(texts).encode()  # fails for half a surrogate pair, which no tokenizer takes
        except Exception as error:  # a template is the model's own program, and may raise anything
            verb, cause = "rejects", str(error)
            if not isinstance(error, jinja2.exceptions.TemplateError):
                verb, cause = "fails on", f"{type(error).__name__}: {error}"
            raise Rejected(
                f"{split}: the model's chat template {verb} these messages (roles {roles}): "
                f"{one_line(cause, LONGEST_ERROR)}; {fix}"
            ) from error
        if any(_has_python_arguments(turns, text) for turns, text in zip(chats, texts, strict=True)):
            raise Rejected(
                f"{split}: the model's chat template writes the arguments of calls as Python, not as JSON; choose "
                "another --chat-template"
            )
        return [text.replace(_ESCAPED_GUARD, GUARD) for text in texts] if self._control.as_text else texts


def dated(template: str, day: str | None) -> str:
    """Return the template with a `strftime_now` that gives this day (YYYY-MM-DD), whenever it is rendered.

    `strftime_now` becomes a macro in front of the template, because apply_chat_template passes plain data on to the
    template, but no functions (transformers 5.23). Jinja removes the line break after the macro.
    """
    if not day or "strftime_now" not in template:
        return template
    date = datetime.datetime.fromisoformat(day)
    written = [(f"%{letter}", date.strftime(f"%{letter}")) for letter in _DIRECTIVES]
    written += [(f"%-{letter}", date.strftime(f"%{letter}").lstrip("0") or "0") for letter in "dmyjHIMS"]
    replaced = "".join(f".replace({name!r}, {text!r})" for name, text in written)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"


def _has_python_arguments(turns: Turns, text: str) -> bool:
    """Whether a template wrote a call's arguments as Python's repr of a dict. Such a template may expect JSON text."""
    arguments = [call["function"]["arguments"] for turn in turns for call in turn.get("tool_calls", ())]
    written = [str(given) for given in arguments if given and str(given) in text and str(given) != json.dumps(given)]
    if not written:
        return False
    said = "\n".join(str(turn.get(key)) for turn in turns for key in ("content", "reasoning_content"))  # may quote it
    return any(text.count(one) > said.count(one) for one in written)
