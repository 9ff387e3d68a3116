"""`--chat-template`: gives a tokenizer another chat template, and makes the control tokens that it writes tokens."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken

from accel_sft.api.errors import UserError, first_line
from accel_sft.chat.control_tokens import special_tokens
from accel_sft.chat.rendering import Rendering
from accel_sft.chat.template import MARK
from accel_sft.io.files import expanded, read_json
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.models.source import errors_explained
from accel_sft.models.tiny import CHAT_TEMPLATE

CHATML = "chatml"
"""The value of `--chat-template` that stands for the built-in template."""
_CONTROL = re.compile(r"<\|[^<>|\s'\"{}]+\|>")
"""Marks that are surely control tokens of a template without a tokenizer of its own. Others, such as `<think>`,
`[INST]` or `<tools>`, are plain text in some models."""
_TURNS = [{"role": "system", "content": "!"}, {"role": "user", "content": "?"}]


@dataclasses.dataclass
class GivenTemplate:
    """The chat template that `--chat-template` names: `chatml`, a Jinja file, or that of a folder or hub id.

    Attributes:
        new_tokens: ids that `give` added to the tokenizer; the model has no trained embeddings for them.
        lines: what `give` did, for the log.
    """

    name: str
    trust_remote_code: bool
    new_tokens: list[int] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)

    def give(self, tokenizer: Any) -> None:
        """Put the template into a tokenizer, in place of the one that it may have.

        Control tokens of the template become special tokens: of another tokenizer's template those that are special
        there, of a file those like `<|im_end|>` and the mark that ends an answer. The token that ends an answer becomes
        the tokenizer's eos; its eos until then becomes the pad token, if there is none.

        Raises:
            UserError: the template cannot be read, or is none: it fails, or writes no answer.
        """
        tokenizer.chat_template, their_special = self._read()
        if not tokenizer.chat_template.strip():
            raise self._unusable("it is empty; name another")
        rendering = Rendering(tokenizer)
        try:
            form = rendering.form(_TURNS, "a conversation")
            written = rendering.template.text(form.with_answer(_TURNS, "!"), "a conversation", prompt=False)
            written += rendering.template.text(form.given(_TURNS), "a conversation", prompt=True)
        except UserError as error:
            raise self._unusable(_failure(error)) from error
        if form.drops_answer:
            raise self._unusable("it writes no answer of an assistant; is it a chat template, in Jinja?")
        # a template may put a mark together of parts, such as '<|' + role + '|>': so what it writes is searched, too
        searched = f"{tokenizer.chat_template}\n{written}"
        marks = (their_special or _CONTROL).findall(searched)
        if not their_special:
            marks += MARK.findall(form.tail)[:1]
        known = special_tokens(tokenizer)
        new = [mark for mark in dict.fromkeys(marks) if not known.fullmatch(mark)]
        before = tokenizer.get_vocab()
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in new], special_tokens=True)
        self.new_tokens = [tokenizer.convert_tokens_to_ids(mark) for mark in new if mark not in before]
        end = special_tokens(tokenizer).search(form.tail)
        if end:
            tokenizer.eos_token = end[0]
        self._tell(new, end[0] if end else None, tokenizer.eos_token)

    def _read(self) -> tuple[str, re.Pattern[str] | None]:
        """The template's text and, if it is another tokenizer's, a pattern of that one's special tokens."""
        if self.name == CHATML:
            return CHAT_TEMPLATE, None
        path = expanded(self.name, "--chat-template")
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8-sig"), None
            except (OSError, ValueError) as error:
                raise self._unusable(f"cannot be read ({first_line(error)})") from None
        from transformers import AutoTokenizer

        if (run := RunDir(path)).record.is_file():
            path = run.final
        name = str(path) if path.exists() else self.name
        try:
            with errors_explained(name):
                other = AutoTokenizer.from_pretrained(name, trust_remote_code=self.trust_remote_code)
            found = template_of(other, name)
        except UserError as error:
            cause = first_line(error).removeprefix(f"--model {name}: ")
            raise self._unusable(f"neither {CHATML} nor a file, and as a model: {cause}") from error
        if found is None:
            raise self._unusable("this model's tokenizer has no chat template; name another")
        if not isinstance(found, str):
            other.chat_template = found
            try:
                found = other.get_chat_template()
            except ValueError as error:
                raise self._unusable(f"its chat template cannot be chosen: {first_line(error)}") from error
        return found, special_tokens(other)

    def _tell(self, new: list[str], end: str | None, eos: str | None) -> None:
        if new:
            made = f"{', '.join(new)}: tokens of the tokenizer from now on; every other mark of the template stays text"
        else:
            made = "the tokenizer has all its control tokens"
        ends = f"answers end with {end}, at which generation stops" if end else f"it ends no answer: {eos} is put there"
        self.lines.append(f"--chat-template {self.name}: {made}; {ends}")

    def _unusable(self, cause: str) -> UserError:
        return UserError(f"--chat-template {self.name}: {cause}")


def _failure(error: UserError) -> str:
    """Why a template fails, and where: the error of a rendering is of a model's own template, and a task's messages."""
    cause = error.__cause__
    if isinstance(cause, jinja2.TemplateSyntaxError):
        return f"line {cause.lineno}: {one_line(cause.message or '', LONGEST_ERROR)}; fix it, or name another"
    if cause is None:
        return first_line(error)
    told = str(cause) if isinstance(cause, jinja2.TemplateError) else f"{type(cause).__name__}: {cause}"
    return f"it fails on a conversation: {one_line(told, LONGEST_ERROR)}; fix it, or name another"


def template_of(tokenizer: Any, name: str) -> Any:
    """A tokenizer's chat template, or the one in chat_template.json, where processors used to keep theirs and
    tokenizers do not look; None if there is none."""
    from transformers.utils import cached_file

    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    with errors_explained(name):
        path = cached_file(name, "chat_template.json", _raise_exceptions_for_missing_entries=False)
    content = read_json(Path(path)) if path else None
    found = content.get("chat_template") if isinstance(content, dict) else None
    return found if isinstance(found, str) else None
