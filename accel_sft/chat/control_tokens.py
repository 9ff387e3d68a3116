"""Makes tokenizers read control tokens in a task's texts, such as `<|im_end|>`, as characters. Only control tokens that
the chat template itself writes become tokens."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from tokenizers import AddedToken

from accel_sft.chat.conversation import GUARD, OWN, Conversation, Turn, split_thinking


def special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern that finds the tokenizer's special tokens in a text, the longest one at each position."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    longest_first = sorted((token for token in special if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in nested lists and dicts, keys included, without the escapes that JSON would add."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, (dict, list)):
            waiting += reversed([*value, *value.values()] if isinstance(value, dict) else value)


def without_guards(text: str) -> str:
    """Return the text without guards."""
    return text.replace(GUARD, "")


class ControlTokens:
    """Guards texts against being read as control tokens, and tokenizes what a template made of guarded texts.

    A guarded text has GUARD between the characters of each control token. When the template has rendered it, control
    tokens without GUARD are therefore the template's own, and get OWN around them. Then guards are removed, and a copy
    of the tokenizer, which knows control tokens only with OWN around them, tokenizes the result.

    Attributes:
        as_text: whether texts are guarded; this needs a fast tokenizer (one of the library `tokenizers`).
        pattern: finds any special token.
    """

    def __init__(self, tokenizer: Any, as_text: bool = True) -> None:
        self.tokenizer = tokenizer
        self.as_text = as_text and bool(getattr(tokenizer, "is_fast", False))
        self.pattern = special_tokens(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        self._special = {at: token for at, token in added if token.special}
        self.special_ids = {*self._special, *tokenizer.all_special_ids}
        self._in_tools: tuple[Any, bool] = None, False  # the schemas searched last, and the result

    def spelled(self, ids: Iterable[int]) -> frozenset[str]:
        """Return the texts of these tokens."""
        return frozenset(self.tokenizer.decode([token]) for token in ids)

    def written(self, chat: Conversation, ends: Collection[str]) -> str | None:
        """Return where a conversation has control tokens: "answers" if a turn that is learnt has one of `ends`, else
        "texts"; None if the conversation has no control tokens."""
        if not self._has_any(chat):
            return None
        learnt = [turn for at, turn in enumerate((*chat.turns, chat.answer)) if at in (*chat.learnt, len(chat.turns))]
        tokens = {token for text in _strings(learnt) for token in self.pattern.findall(text)}
        return "answers" if chat.turns and tokens.intersection(ends) else "texts"  # raw text has no turns to end

    def _has_any(self, chat: Conversation) -> bool:
        """Whether any text has a control token. Tool schemas, long and shared by answers, are searched only once."""
        if self._in_tools[0] is not chat.tools:
            self._in_tools = chat.tools, any(map(self.pattern.search, _strings(chat.tools)))
        texts = [chat.variables, *(value for turn in (*chat.turns, chat.answer) for value in turn.values())]
        return self._in_tools[1] or any(map(self.pattern.search, _strings(texts)))

    def guarded(self, chat: Conversation) -> Conversation:
        """Return the conversation with guarded texts, for the template."""
        if not self.as_text or not self._has_any(chat):
            return chat
        answer, tools, variables = self._turn(chat.answer), self._guarded(chat.tools), self._guarded(chat.variables)
        return chat._replace(turns=[*map(self._turn, chat.turns)], answer=answer, tools=tools, variables=variables)

    def _turn(self, turn: Turn) -> Turn:
        guarded: Turn = self._guarded(turn)
        if turn["role"] == "assistant" and split_thinking(turn["content"])[0] is not None:
            for mark in ("<think>", "</think>"):  # not guarded: templates look for these marks of thinking
                guarded["content"] = guarded["content"].replace(self._guarded(mark), mark, 1)
        return guarded

    def _guarded(self, value: Any) -> Any:
        """Return `value` guarded: a text, or all texts in a list or a dict (keys included)."""
        if isinstance(value, dict):
            return {self._guarded(name): self._guarded(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._guarded(item) for item in value]
        while isinstance(value, str) and self.pattern.search(value):  # again, as two tokens may share characters
            value = self.pattern.sub(lambda match: GUARD.join(match[0]), value)
        return value

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts that a template wrote; the tokenizer adds no special tokens around them."""
        plain = [text for text in texts if GUARD not in text]
        made = self.tokenizer(plain, add_special_tokens=False, return_attention_mask=False) if plain else None
        plain_ids = iter(made["input_ids"] if made else ())
        return [self._ids(text) if GUARD in text else next(plain_ids) for text in texts]

    def _ids(self, text: str) -> list[int]:
        spelled = without_guards(self.pattern.sub(lambda match: OWN + match[0] + OWN, text))
        copied, own = self._copied
        return [own.get(token, token) for token in copied.encode(spelled, add_special_tokens=False).ids]

    @functools.cached_property
    def begin(self) -> list[int]:
        """Tokens that the tokenizer itself puts before a text: its bos, or nothing."""
        with_begin, (plain,) = self.tokenizer("a")["input_ids"], self.ids(["a"])
        at = next((at for at in range(len(with_begin)) if with_begin[at : at + len(plain)] == plain), 0)
        return list(with_begin[:at])

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with guards in text that only looks like a control token."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        if not self.as_text or len(self.pattern.findall(text)) <= sum(token in self.special_ids for token in ids):
            return text
        copied, own = self._copied
        copies = {token: spelled for spelled, token in own.items()}
        spelled = copied.decode([copies.get(token, token) for token in ids], skip_special_tokens=False)
        parts = re.split(f"{OWN}(.*?){OWN}", spelled)
        return "".join(part if at % 2 else self._guarded(part) for at, part in enumerate(parts))

    @functools.cached_property
    def _copied(self) -> tuple[Any, dict[int, int]]:
        """A copy of the tokenizer in which special tokens are spelled with OWN around them, and a map from their ids
        in the copy to their real ids."""
        copied = copy.deepcopy(self.tokenizer.backend_tokenizer)
        copied.no_truncation()
        copied.no_padding()
        copied.encode_special_tokens = True  # special tokens in their usual spelling are read as characters
        copied.add_tokens([_respelled(token) for token in self._special.values()])
        return copied, {copied.token_to_id(_respelled(token).content): at for at, token in self._special.items()}


def _respelled(token: Any) -> AddedToken:
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(OWN + token.content + OWN, special=False, **flags)
