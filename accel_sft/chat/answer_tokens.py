"""Makes the token ids of a prompt and its answer from the template's texts, and finds the answer's begin and end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from accel_sft.api.errors import UserError
from accel_sft.chat.control_tokens import Written, without_guards
from accel_sft.chat.conversation import GUARD, Conversation
from accel_sft.chat.form import divided, dropped
from accel_sft.chat.image_inputs import ImageInputs, RowImages
from accel_sft.chat.pieces import PieceTokenizer
from accel_sft.chat.rendering import Rendered, Rendering
from accel_sft.chat.template import MARK, TextDropped, holds, not_a_prefix, refusal
from accel_sft.chat.tool_calls import lost
from accel_sft.io.text import one_line

_LONG = 1 << 16
"""A text of more characters has its number of tokens estimated before it is tokenized."""
_MARGIN = 4
"""A text is surely too long if it has this many times the characters of `max_length` tokens of the longest kind; the
factor allows for texts that normalization shortens."""


class AnswerTokens:
    """Finds each answer's tokens after its prompt's.

    Args:
        eos_ids: tokens that end an answer; the tokenizer's eos is added if the template ends answers with none of them.
        images: makes the model's inputs from images; None: no example has any.
    """

    def __init__(self, rendering: Rendering, eos_ids: frozenset[int], images: ImageInputs | None = None) -> None:
        self.images = images
        self.rendering, self.tokenizer, self.eos_ids = rendering, rendering.tokenizer, eos_ids
        self._tokenize = PieceTokenizer(rendering.control)
        self._ends = rendering.control.spelled(eos_ids)
        self._closers: dict[str, int] = {}  # number of end tokens in a text that follows answers

    def with_images(
        self, texts: list[Rendered], part: Sequence[tuple[int, Conversation]], split: str
    ) -> list[Rendered]:
        """The texts of some examples' answers, with as many placeholders for each image as it has tokens.

        Raises:
            UserError: an image cannot be used, by this model or at all.
        """
        if self.images is None or not any(chat.images for _, chat in part):
            return texts
        every = [(index, each) for index, chat in part for each in chat.each()]
        return [
            self.images.expanded(chat, text, f"{split} example {index}") if chat.images else text
            for (index, chat), text in zip(every, texts, strict=True)
        ]

    def images_of(self, chat: Conversation) -> RowImages | None:
        """What a row keeps of its images; None without images."""
        return self.images.row(chat) if self.images and chat.images else None

    def of_texts(self, texts: Sequence[Rendered], counts: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """The tokens of each prompt, and of each prompt with what is learnt after it.

        Args:
            counts: number of texts of each chat; the texts are in the order of the chats.
        """
        written = [part for text in texts for part in (text.prompt, text.prompt + (text.rest or ""))]
        ends = itertools.accumulate(counts)
        chats = [range(2 * (end - count), 2 * end) for end, count in zip(ends, counts, strict=True) if count > 1]
        ids = self._tokenize(written, chats)
        return list(zip(ids[::2], ids[1::2], strict=True))

    def exceeds(self, chat: Conversation, tokens: int) -> bool:
        """Whether a text that every template writes surely has more than `tokens` tokens. It is estimated, because
        tokenizing 10 MB takes gigabytes of memory. False says nothing."""
        always = [turn["content"] for turn in chat.turns if turn["role"] != "assistant"]
        for text in (*always, chat.answer["content"].rpartition("</think>")[2]):
            if len(text) > _LONG and sum(map(len, text.split())) > _MARGIN * self._longest_token * tokens:
                return True
        return False

    @functools.cached_property
    def _longest_token(self) -> int:
        """Characters of the vocabulary's longest token; in some vocabularies a character stands for a byte of text."""
        return max(map(len, self.tokenizer.get_vocab()))

    def control_token(self, chat: Conversation) -> Written | None:
        """The control token in an example's texts, as `ControlTokens.written` gives it."""
        return self.rendering.control.written(chat, self._ends)

    def is_empty(self, chat: Conversation) -> bool:
        """Whether the answer says nothing."""
        said = divided(chat)[1] if self.rendering.thinking == "keep" else chat.target
        return not (said.strip() or chat.calls)

    def ids(
        self, split: str, index: int, chat: Conversation, text: Rendered, prompt: list[int], whole: list[int]
    ) -> list[int]:
        """The prompt's tokens and, behind them, the answer's up to the one that ends the turn.

        What a template writes behind the end-of-turn token (Qwen's newline) is cut: no answer contains it.

        Args:
            prompt, whole: as `of_texts` gave them.
        Raises:
            UserError: the template drops or cuts the answer, a call or a message; the prompt does not begin the
                rendering with an answer; or a control token in a text cannot be read as characters.
        """
        guarded, text = text, Rendered(*(part and without_guards(part) for part in text))
        form, keeps = self.rendering.form(chat.turns, split, chat.tools), self.rendering.thinking == "keep"
        thinking, answer = divided(chat)
        mendable = not keeps and thinking is not None
        if text.rest is None and not mendable:
            raise not_a_prefix(self.tokenizer, split, index, text.prompt, text.whole)
        wanted = [thinking or "", answer] if keeps or "reasoning_content" in chat.answer else [chat.target]
        whole_answer = text.rest is not None and form.lead is not None
        if not whole_answer or not all(holds(text.prompt, text.rest, each) for each in wanted):
            raise refusal(split, index, text.prompt, text.whole, chat.target, thinks=mendable)
        if name := lost(chat.calls, text.rest):
            raise refusal(split, index, text.prompt, text.whole, f"the call of a tool, with {name}", thinks=False)
        missing = text.prompt and dropped(chat.turns, text.prompt)  # rows without any prompt are left out
        if missing:
            role, said = missing
            raise TextDropped(
                f'{split} example {index}: the model\'s chat template drops "{one_line(said)}", which the {role} turn '
                "says: it is not in the prompt; give the tokenizer a chat_template that writes every message, or use "
                "another model, or change messages()"
            )
        if whole[: len(prompt)] != prompt:
            self.rendering.note(
                "chat template: an answer's first characters change the prompt's last token; answers are tokenized "
                "apart from prompts, as they are generated"
            )
            whole = prompt + self._apart(prompt, whole, guarded.rest)
        if GUARD in guarded.prompt + guarded.rest:
            self._check_control(f"{split} example {index}", guarded, whole)
        # only the end tokens that the template writes end an answer, whose text may contain some too
        tail = form.tail if text.rest.endswith(form.tail) else self.tokenizer.eos_token
        if tail not in self._closers:
            self._closers[tail] = sum(token in self.eos_ids for token in self._tokens(tail))
            self._look_at_marks(tail)
        closers = self._closers[tail]
        ends = [at + 1 for at in range(len(prompt), len(whole)) if whole[at] in self.eos_ids][-closers:]
        return whole[: ends[0]] if closers and ends else [*whole, self.tokenizer.eos_token_id]

    def _look_at_marks(self, tail: str) -> None:
        """Add a note if answers end with a mark such as `<|im_end|>` that is no token, and with no end token."""
        spelled = next((mark for mark in MARK.findall(tail) if len(self._tokens(mark)) > 1), None)
        if spelled and not self._closers[tail]:
            self.rendering.note(
                f'warning: the chat template ends answers with "{spelled}", which is no token of this tokenizer: '
                f"{len(self._tokens(spelled))} tokens of plain text are learnt before {self.tokenizer.eos_token}; take "
                "the instruction model's tokenizer, or a chat_template that ends answers with eos_token"
            )

    def _check_control(self, where: str, text: Rendered, whole: list[int]) -> None:
        """Raises UserError if the tokenizer makes control tokens of a text: there are more than the template wrote."""
        control = self.rendering.control
        own = len(control.pattern.findall(text.prompt + (text.rest or "")))
        if sum(token in control.special_ids for token in whole) > own:
            raise UserError(
                f"{where}: a control token is written in a text, and this tokenizer cannot read it as characters; take "
                "it out, or give --control-tokens tokens"
            )

    def _apart(self, prompt: list[int], whole: list[int], rest: str) -> list[int]:
        """The tokens of what follows a prompt, tokenized without the prompt. Some tokenizers put a blank before any
        text: the rest is then tokenized after a line break or a special token, where they do not."""
        read = self.tokenizer.decode(whole)
        for anchor in ("", "\n", self.tokenizer.eos_token):
            before, ids = self._tokens(anchor), self._tokens(anchor + rest)
            found = ids[len(before) :]
            if ids[: len(before)] == before and self.tokenizer.decode(prompt + found) == read:
                return found
        return self._tokens(rest)

    def _tokens(self, text: str) -> list[int]:
        return self.rendering.control.ids([text])[0] if text else []
