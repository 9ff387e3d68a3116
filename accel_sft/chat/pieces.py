"""Tokenizes the texts of one chat, each of which begins with those before it, at the cost of the longest alone."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from accel_sft.chat.control_tokens import ControlTokens


class PieceTokenizer:
    """Token ids of texts, without special tokens around them.

    A fast tokenizer cuts a text at its special tokens before it does anything else, so the tokens of a text are those
    of its pieces, each of which begins with a special token. Pieces that texts have in common are tokenized once. The
    longest text of a chat is tokenized whole too: if that gives other tokens, all texts of the chat are.
    """

    def __init__(self, control: ControlTokens) -> None:
        self._ids, tokenizer = control.ids, control.tokenizer
        added = tokenizer.added_tokens_decoder.values() if getattr(tokenizer, "is_fast", False) else ()
        self._special = [token.content for token in added if token.special and not (token.lstrip or token.single_word)]

    def __call__(self, texts: Sequence[str], chats: Sequence[Sequence[int]]) -> list[list[int]]:
        """The ids of each text.

        Args:
            chats: indices of the texts of each chat, which begin alike, the longest last; other texts are tokenized
                whole.
        """
        # the special tokens in one chat: a vocabulary may have thousands, and a template writes a few
        written = [token for token in self._special if chats and token in texts[chats[0][-1]]]
        if not written:
            chats = []
        before_special = re.compile(f"(?={'|'.join(map(re.escape, written))})")
        cut = {at: before_special.split(texts[at]) for chat in chats for at in chat}
        pieces = list(dict.fromkeys(itertools.chain.from_iterable(cut.values())))
        whole = [at for at in range(len(texts)) if at not in cut] + [chat[-1] for chat in chats]
        ids = dict(zip(pieces, self._ids(pieces), strict=True))
        found = dict(zip(whole, self._ids([texts[at] for at in whole]), strict=True))
        for chat in chats:
            joined = [list(itertools.chain.from_iterable(ids[piece] for piece in cut[at])) for at in chat]
            exact = joined[-1] == found[chat[-1]]
            found |= zip(chat, joined if exact else self._ids([texts[at] for at in chat]), strict=True)
        return [found[at] for at in range(len(texts))]
