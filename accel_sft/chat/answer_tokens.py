"""Tokenizes the texts of prompts and their answers, and finds where each answer begins and ends."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from accel_sft.api.errors import UserError
from accel_sft.chat.control_tokens import without_guards
from accel_sft.chat.conversation import GUARD, Conversation, divided
from accel_sft.chat.dropped import check_all_kept, unwritten
from accel_sft.chat.rendering import Rendered, Rendering
from accel_sft.chat.template import MARK


class AnswerTokens:
    """Tokenizes prompts with their answers, and finds each answer's tokens.

    Args:
        eos_ids: tokens that end an answer; if the template writes none of them, answers get the tokenizer's eos.
    """

    def __init__(self, rendering: Rendering, eos_ids: frozenset[int]) -> None:
        self.rendering, self.tokenizer, self.eos_ids = rendering, rendering.tokenizer, eos_ids
        self._control = rendering.control
        self._closers: dict[str, int] = {}  # text after an answer -> number of end tokens in it
        added = self.tokenizer.added_tokens_decoder.values() if getattr(self.tokenizer, "is_fast", False) else ()
        self._special = [token.content for token in added if token.special and not (token.lstrip or token.single_word)]

    def of_texts(self, texts: Sequence[Rendered], counts: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Return, for each text, the tokens of its prompt, and the tokens of prompt and answer together. The
        texts are in the order of their chats; `counts` has each chat's number of texts.

        The texts of a chat share their beginnings. They are cut before each special token, as fast tokenizers do, and
        equal pieces are tokenized once. The longest text of each chat is tokenized uncut, too; if this gives other
        tokens, all texts of the chat are tokenized uncut.
        """
        written = [part for text in texts for part in (text.prompt, text.prompt + text.rest)]
        # a vocabulary may have thousands of special tokens, but a template writes only a few
        special = [token for token in self._special if texts and token in texts[0].prompt + texts[0].rest]
        before_special = re.compile(f"(?={'|'.join(map(re.escape, special))})" if special else r"(?!)")
        cut = [before_special.split(text) for text in written]
        ends = [2 * end for end in itertools.accumulate(counts)]
        distinct = list(dict.fromkeys([*itertools.chain.from_iterable(cut), *(written[end - 1] for end in ends)]))
        ids_of = dict(zip(distinct, self._control.ids(distinct), strict=True))
        ids = [list(itertools.chain.from_iterable(ids_of[piece] for piece in pieces)) for pieces in cut]
        for begin, end in itertools.pairwise([0, *ends]):
            if ids[end - 1] != ids_of[written[end - 1]]:
                ids[begin:end] = self._control.ids(written[begin:end])
        return list(zip(ids[::2], ids[1::2], strict=True))

    def ids(self, where: str, chat: Conversation, text: Rendered, prompt: list[int], all_ids: list[int]) -> list[int]:
        """Return the prompt's tokens followed by the answer's, up to the token that ends the turn; `prompt` and
        `all_ids` are a pair from `of_texts`.

        What a template writes after the end-of-turn token (Qwen's newline) is cut off: generation stops before it.
        """
        prompt_text, rest, rendered = map(without_guards, (text.prompt, text.rest, text.full_text))
        plain = text._replace(prompt=prompt_text, rest=rest, full_text=rendered)
        check_all_kept(where, chat, plain, keeps_thinking=self.rendering.thinking == "keep")
        if any("tool_calls" in turn or "name" in turn for turn in chat.turns):
            for line in unwritten(chat.turns, prompt_text):
                self.rendering.add_note(line)
        if all_ids[: len(prompt)] != prompt:
            self.rendering.add_note(
                "chat template: an answer's first characters change the prompt's last token; answers are tokenized "
                "separately, as they are generated"
            )
            all_ids = prompt + self._apart(prompt, all_ids, text.rest)
        self._look_at_lead(divided(chat)[1], all_ids[max(len(prompt) - 1, 0) :])
        if GUARD in text.prompt + text.rest:
            self._check_control(where, text, all_ids)
        # an answer ends at the end tokens that the template writes; the answer's own text may contain some too
        tail = text.form.tail if rest.endswith(text.form.tail) else self.tokenizer.eos_token
        if tail not in self._closers:
            self._closers[tail] = sum(token in self.eos_ids for token in self._tokens(tail))
            self._look_at_marks(tail)
        closers = self._closers[tail]
        ends = [at + 1 for at in range(len(prompt), len(all_ids)) if all_ids[at] in self.eos_ids][-closers:]
        return all_ids[: ends[0]] if closers and ends else [*all_ids, self.tokenizer.eos_token_id]

    def _look_at_lead(self, answer: str, ids: list[int]) -> None:
        """Add a note if the white space at an answer's beginning is not learnt: some templates strip it, and some
        tokens absorb it (Phi-3's role tokens). `ids` begin one token earlier, as decoding drops a first space."""
        if not answer[:1].isspace() or not answer.strip():
            return
        word = answer.split()[0]
        written = self.tokenizer.decode(ids)
        begin = answer[: answer.index(word)] + word
        if word in written and written.count(begin) < answer.count(begin):  # later lines may begin with the same text
            self.rendering.add_note(
                "warning: white space that answers begin with, such as an indentation, is not learnt: the template or "
                "a token removes it; choose another --chat-template"
            )

    def _look_at_marks(self, tail: str) -> None:
        """Add a note if the template ends answers with a mark such as `<|im_end|>` that is not a special token."""
        spelled = next(iter(MARK.findall(tail)), None)
        if spelled and not self._closers[tail]:
            self.rendering.add_note(
                f'warning: the chat template ends answers with "{spelled}", which is not a special token: it is learnt '
                f"as text before {self.tokenizer.eos_token}; --chat-template makes it a special token"
            )

    def _check_control(self, where: str, text: Rendered, all_ids: list[int]) -> None:
        """Raise UserError if there are more control tokens than the template wrote: the rest come from the task."""
        own = len(self._control.pattern.findall(text.prompt + text.rest))
        if sum(token in self._control.special_ids for token in all_ids) > own:
            raise UserError(
                f"{where}: a text contains a control token, which this tokenizer cannot read as characters; remove the "
                "token, or give --control-tokens tokens"
            )

    def _apart(self, prompt: list[int], all_ids: list[int], rest: str) -> list[int]:
        """Return the tokens of `rest`, tokenized without the prompt before it. If the tokenizer puts a space before any
        text, `rest` is tokenized after a line break or a special token, where the tokenizer puts no space."""
        read = self.tokenizer.decode(all_ids)
        for anchor in ("", "\n", self.tokenizer.eos_token):
            before, ids = self._tokens(anchor), self._tokens(anchor + rest)
            tokens = ids[len(before) :]
            if ids[: len(before)] == before and self.tokenizer.decode(prompt + tokens) == read:
                return tokens
        return self._tokens(rest)

    def _tokens(self, text: str) -> list[int]:
        return self._control.ids([text])[0] if text else []
