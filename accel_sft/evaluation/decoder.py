"""Decodes a batch greedily, with one KV cache for the rows' common prefix; rows that have ended leave the batch."""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from accel_sft.io.heartbeat import heartbeat
from accel_sft.models.architecture import arguments
from accel_sft.models.prefix_attention import Prefix, install

GROWTH = 32
"""Number of tokens by which the KV cache grows; growing it for every token would copy the whole cache every time."""
DROPPED_AT = 8
"""Ended rows are dropped once they are at least one in this many rows, as dropping copies the cache of all others."""


class Decoder:
    """Decodes rows whose common prefix the model has read once: call `start` with a batch, then `step` and `keep`.

    Rows are padded at the left, so that all write the same column of the cache; no row attends to padding. The
    model is called as a whole, so that ZeRO-3 and FSDP gather its weights, and as often on one rank as on any other
    that calls the same methods.

    Args:
        model: must have sdpa attention, take `position_ids` and a plain KV cache, and be in eval mode.
        prefix: token ids that all rows begin with; may be empty.
    """

    def __init__(self, model: Any, prefix: Sequence[int], device: torch.device) -> None:
        install()
        self.model, self.device, self.length = model, device, len(prefix)
        self.shared: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in arguments(model):
            self.shared["logits_to_keep"] = 1
        if prefix:
            cache = DynamicCache()
            self.model(input_ids=torch.tensor([prefix], device=device), past_key_values=cache, **self.shared)
            keys, values = ([as_attended(kept) for kept in of_layers] for of_layers in _kept(cache))
            self.shared["prefix"] = Prefix(keys, values)

    def start(self, rows: Sequence[Sequence[int]], forwards: int = 1) -> torch.Tensor:
        """Read the rows' tokens after the prefix, at least one each; returns logits of the next token, (B, vocabulary).

        Args:
            forwards: number of forwards that the rows are divided among; the rows should be sorted by length.
        """
        parts = [[rows[at] for at in part] for part in np.array_split(np.arange(len(rows)), forwards)]
        longest = max(map(len, rows))
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        columns = torch.arange(self.length + longest, device=self.device)
        self.seen = (columns < self.length) | (columns >= self.length + longest - lengths[:, None])  # (B, P + T)
        self.position = self.length + lengths[:, None]  # of each row's next token
        read = [self._read(part) for part in parts]
        layers = zip(*(cache.layers for _, cache in read), strict=True)
        self.cache: Any = Cache(layers=[_Columns(of_parts, longest) for of_parts in layers])
        return torch.cat([logits for logits, _ in read])

    def _read(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, DynamicCache]:
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=self.device)
        padding = torch.tensor([longest - len(row) for row in rows], device=self.device)[:, None]
        column = torch.arange(longest, device=self.device)
        own = (column >= padding)[:, None] & (column <= column[:, None]) | (column == column[:, None])  # (B, T, T)
        before = own.new_ones(len(rows), longest, self.length)
        mask, cache = torch.cat([before, own], dim=-1), DynamicCache()
        return self._forward(ids, (self.length + column - padding).clamp(min=0), mask, cache), cache

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read one more token of each row, (B,); returns logits of the next token, (B, vocabulary)."""
        self.seen = torch.cat([self.seen, self.seen.new_ones(len(tokens), 1)], dim=1)
        logits = self._forward(tokens[:, None], self.position, self.seen[:, None], self.cache)
        self.position = self.position + 1
        return logits

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits after the last of the tokens, whose ids are (B, T); the mask is (B, T, P + keys)."""
        output = self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask[:, None], past_key_values=cache, **self.shared
        )
        return output.logits[:, -1]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all other rows from the batch."""
        self.seen, self.position = self.seen[rows], self.position[rows]
        for layer in self.cache.layers:
            layer.keep(rows)

    def answers(
        self,
        rows: Sequence[Sequence[int]],
        max_new_tokens: int,
        ends: Collection[int],
        *,
        forwards: int = 1,
        anyone: Callable[[bool], bool] = bool,
    ) -> list[list[int]]:
        """Each row's most likely tokens, up to the first of `ends`, which is part of the answer.

        Args:
            anyone: called with whether this rank has rows left; returns whether any rank has, because ranks with
                sharded weights must go on together.
        """
        answers: list[list[int]] = [[] for _ in rows]
        ended = [False] * len(rows)
        going = list(range(len(rows)))  # the row in each place of the batch
        logits = self.start(rows, forwards)
        for length in itertools.count(1):
            heartbeat()
            tokens = logits.argmax(dim=-1)
            for row, token in zip(going, tokens.tolist(), strict=True):
                if not ended[row]:
                    answers[row].append(token)
                    ended[row] = token in ends
            places = [place for place, row in enumerate(going) if not ended[row]]
            if length == max_new_tokens or not anyone(bool(places)):
                break
            if DROPPED_AT * (len(going) - len(places)) >= len(going) > 1:
                places = places or [0]  # a rank whose rows have all ended goes on with one row
                kept = torch.tensor(places, device=self.device)
                going, tokens = [going[place] for place in places], tokens[kept]
                self.keep(kept)
            logits = self.step(tokens)
        return answers


def as_attended(states: torch.Tensor) -> torch.Tensor:
    """Cast keys or values to the type that attention computes in. Under autocast, rotary positions make keys float32;
    without this cast, attention would cast the whole KV cache again for every token."""
    kind = states.device.type
    return states.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else states


def _kept(cache: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The keys and the values of each layer."""
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]


class _Columns(DynamicLayer):
    """A layer's keys and values in buffers with spare columns, so that a new token is written without a copy.

    Args:
        parts: this layer's caches of rows that were read in separate forwards; their tensors are freed.
        longest: number of columns of the longest part.
    """

    def __init__(self, parts: Sequence[Any], longest: int) -> None:
        super().__init__()
        self.is_initialized, self.length = True, longest
        self._buffers = [self._joined([part.keys for part in parts]), self._joined([part.values for part in parts])]
        for part in parts:
            part.keys = part.values = None
        self._show()

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        # padded with zeros: uninitialised memory may hold NaN, which a mask does not remove
        return torch.cat([pad(as_attended(part), (0, 0, self.length - part.shape[2], GROWTH)) for part in parts])

    def _show(self) -> None:
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self._buffers)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write the columns of new tokens; returns keys and values of all tokens."""
        new = slice(self.length, self.length + key_states.shape[2])
        if new.stop > self._buffers[0].shape[2]:
            self._buffers = [pad(buffer, (0, 0, 0, GROWTH)) for buffer in self._buffers]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, new] = states
        self.length = new.stop
        self._show()
        return self.keys, self.values

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all other rows."""
        self._buffers = [buffer[rows] for buffer in self._buffers]
        self._show()
