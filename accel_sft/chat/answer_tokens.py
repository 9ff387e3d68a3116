"""Tokenizes the texts of prompts and their answers, and finds where each answer begins and ends."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from accel_sft.api.errors import UserError
from accel_sft.chat.control_tokens import ControlTokens, without_guards
from accel_sft.chat.conversation import GUARD, Conversation, divided
from accel_sft.chat.dropped import check_all_kept, unwritten
from accel_sft.chat.rendering import Rendered, Rendering
from accel_sft.chat.template import MARK

_AFTER_LEAD = 8
"""Tokens of an answer in which the white space that it begins with is looked for, beside one for each blank."""


class AnswerTokens:
    """Tokenizes prompts with their answers, and finds each answer's tokens.

    Args:
        eos_ids: tokens that end an answer; if the template writes none of them, answers get the tokenizer's eos.
    """

    def __init__(self, rendering: Rendering, eos_ids: frozenset[int]) -> None:
        self.rendering, self.tokenizer, self.eos_ids = rendering, rendering.tokenizer, eos_ids
        self._tokenize = PieceTokenizer(rendering.control)
        self._closers: dict[str, int] = {}  # text after an answer -> number of end tokens in it

    def of_texts(self, texts: Sequence[Rendered], counts: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Return the tokens of each text's prompt, and those of the prompt with what is learnt after it. The texts are
        in the order of the chats, which have so many (`counts`)."""
        written = [part for text in texts for part in (text.prompt, text.prompt + text.rest)]
        ends = itertools.accumulate(counts)
        chats = [range(2 * (end - count), 2 * end) for end, count in zip(ends, counts, strict=True) if count > 1]
        ids = self._tokenize(written, chats)
        return list(zip(ids[::2], ids[1::2], strict=True))

    def ids(self, where: str, chat: Conversation, text: Rendered, prompt: list[int], all_ids: list[int]) -> list[int]:
        """Return the prompt's tokens followed by the answer's, up to the token that ends the turn.

        What a template writes after the end-of-turn token (Qwen's newline) is cut off: generation stops before it.

        Args:
            where: the example's name in messages.
            prompt, all_ids: as `of_texts` gave them.
        """
        prompt_text, rest, rendered = map(without_guards, (text.prompt, text.rest, text.full_text))
        plain = text._replace(prompt=prompt_text, rest=rest, full_text=rendered)
        check_all_kept(self.tokenizer, where, chat, plain, keeps_thinking=self.rendering.thinking == "keep")
        if any("tool_calls" in turn or "name" in turn for turn in chat.turns):
            for line in unwritten(chat.turns, prompt_text):
                self.rendering.add_note(line)
        answer = divided(chat)[1]
        if answer[:1].isspace() and answer.rstrip() not in rest:
            self.rendering.add_note(
                "warning: the chat template drops the white space that answers begin with, such as an indentation"
            )
        if all_ids[: len(prompt)] != prompt:
            self.rendering.add_note(
                "chat template: an answer's first characters change the prompt's last token; answers are tokenized "
                "apart from prompts, as they are generated"
            )
            all_ids = prompt + self._apart(prompt, all_ids, text.rest)
        self._look_at_lead(chat, rest, len(prompt), all_ids)
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

    def _look_at_lead(self, chat: Conversation, rest: str, begin: int, all_ids: list[int]) -> None:
        """Add a note if a token before the answer takes the white space that it begins with, such as an indentation:
        role tokens of Phi-3 do, though the template writes all of it in `rest`."""
        target = chat.target
        lead = target[: len(target) - len(target.lstrip())]
        if not lead or lead == target or target.rstrip() not in rest:
            return
        # from the token before, as decoding alone drops a first blank
        written = self.tokenizer.decode(all_ids[max(begin - 1, 0) : begin + len(lead) + _AFTER_LEAD])
        before, word, _ = written.partition(target.split()[0])
        if word and not before.endswith(lead):
            self.rendering.add_note(
                "warning: answers begin with white space that is not learnt, as the token before takes it; choose "
                "another --chat-template, or strip it"
            )

    def _look_at_marks(self, tail: str) -> None:
        """Add a note if answers end with a mark, such as `<|im_end|>`, that is no special token, and no end token."""
        spelled = next(iter(MARK.findall(tail)), None)
        if spelled and not self._closers[tail]:
            self.rendering.add_note(
                f'warning: the chat template ends answers with "{spelled}", which is no special token: it is learnt as '
                f"text before {self.tokenizer.eos_token}; --chat-template makes it one"
            )

    def _check_control(self, where: str, text: Rendered, all_ids: list[int]) -> None:
        """Raise UserError if there are more control tokens than the template wrote: the others come from a text."""
        control = self.rendering.control
        own = len(control.pattern.findall(text.prompt + text.rest))
        if sum(token in control.special_ids for token in all_ids) > own:
            raise UserError(
                f"{where}: a control token is written in a text, and this tokenizer cannot read it as characters; take "
                "it out, or give --control-tokens tokens"
            )

    def _apart(self, prompt: list[int], all_ids: list[int], rest: str) -> list[int]:
        """Return the tokens of `rest`, tokenized without the prompt before it. If the tokenizer puts a blank before any
        text, `rest` is tokenized after a line break or a special token, where the tokenizer puts none."""
        read = self.tokenizer.decode(all_ids)
        for anchor in ("", "\n", self.tokenizer.eos_token):
            before, ids = self._tokens(anchor), self._tokens(anchor + rest)
            tokens = ids[len(before) :]
            if ids[: len(before)] == before and self.tokenizer.decode(prompt + tokens) == read:
                return tokens
        return self._tokens(rest)

    def _tokens(self, text: str) -> list[int]:
        return self.rendering.control.ids([text])[0] if text else []


class PieceTokenizer:
    """Tokenizes the texts of one chat, each of which begins with the one before it, at about twice the longest's cost.

    A fast tokenizer cuts a text at its special tokens before it does anything else, so the tokens of a text are those
    of its pieces, each of which begins with a special token. Pieces that texts have in common are tokenized once. The
    longest text of a chat is also tokenized whole; if that gives other tokens, so are all texts of the chat.
    """

    def __init__(self, control: ControlTokens) -> None:
        self._ids, tokenizer = control.ids, control.tokenizer
        added = tokenizer.added_tokens_decoder.values() if getattr(tokenizer, "is_fast", False) else ()
        self._special = [token.content for token in added if token.special and not (token.lstrip or token.single_word)]

    def __call__(self, texts: Sequence[str], chats: Sequence[Sequence[int]]) -> list[list[int]]:
        """The ids of each text. `chats` has the indices of the texts of each chat, the longest last; texts in no chat
        are tokenized whole."""
        # only special tokens of the first chat: a vocabulary may have thousands, and a template writes a few
        written = [token for token in self._special if chats and token in texts[chats[0][-1]]]
        if not written:
            chats = []
        before_special = re.compile(f"(?={'|'.join(map(re.escape, written))})")
        cut = {at: before_special.split(texts[at]) for chat in chats for at in chat}
        pieces = list(dict.fromkeys(itertools.chain.from_iterable(cut.values())))
        separate = [at for at in range(len(texts)) if at not in cut] + [chat[-1] for chat in chats]
        ids = dict(zip(pieces, self._ids(pieces), strict=True))
        ids_of = dict(zip(separate, self._ids([texts[at] for at in separate]), strict=True))
        for chat in chats:
            joined = [list(itertools.chain.from_iterable(ids[piece] for piece in cut[at])) for at in chat]
            exact = joined[-1] == ids_of[chat[-1]]
            ids_of |= zip(chat, joined if exact else self._ids([texts[at] for at in chat]), strict=True)
        return [ids_of[at] for at in range(len(texts))]
