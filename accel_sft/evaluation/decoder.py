"""Decodes greedily, with one KV cache for the rows' common prefix; a row that ends leaves its place to the next."""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from accel_sft.evaluation.live_rows import Attention, Group, Row, States
from accel_sft.io.heartbeat import heartbeat
from accel_sft.models.architecture import arguments
from accel_sft.models.prefix_attention import install, sdpa_attention_forward

READ_TOKENS = 1024
"""Tokens of new rows' prompts that one forward reads, unless a single prompt has more."""
ADMITTED_AT = 16
"""New rows are read once one in this many places is free: each time, they make one more group."""
MOST_GROUPS = 8
"""Attention is computed by group: more of them have less padding, and more calls of small kernels."""


class Decoder:
    """Decodes rows whose common prefix the model has read once.

    A forward reads one sequence: the last token of each live row, and all tokens of the prompts of new rows. So no row
    is padded, but in attention, and no row waits for others to end. The model is called as a whole, so that ZeRO-3 and
    FSDP gather its weights, and as often on one rank as on any other that calls `forward` as often. It must have sdpa
    attention, take `position_ids`, and be in eval mode.
    """

    def __init__(self, model: Any, prefix: Sequence[int], device: torch.device) -> None:
        install()
        self.model, self.device = model, device
        self.keeps_logits = "logits_to_keep" in arguments(model)
        self.length, self.before = 0, dict[int, States]()
        self.groups: list[Group] = []
        if prefix:
            self.forward([Row(prefix)])
            (read,), self.groups = self.groups, []
            self.length = len(prefix)
            for index, (keys, values) in read.layers.items():
                self.before[index] = keys[:, :, : self.length], values[:, :, : self.length]

    @property
    def live(self) -> list[Row]:
        """The live rows, in the order of the logits."""
        return [row for group in self.groups for row in group.rows]

    def forward(self, new: Sequence[Row] = ()) -> torch.Tensor:
        """Read the last token of each live row, and the prompts of new rows, which are live then; there must be a row.

        Returns:
            Logits of each live row's next token, (rows, vocabulary).
        """
        live = self.live
        tokens = [[row.answer[-1]] for row in live] + [[*row.prompt] for row in new]
        first = [self.length + row.read for row in live] + [self.length] * len(new)
        positions = [at + place for at, of_row in zip(first, tokens, strict=True) for place in range(len(of_row))]
        lasts = torch.tensor([*itertools.accumulate(map(len, tokens))], device=self.device) - 1
        ids = torch.tensor([[*itertools.chain(*tokens)]], device=self.device)
        attention = Attention(self.groups, new, self.before, sdpa_attention_forward, self.device)
        output = self.model(
            input_ids=ids,
            position_ids=torch.tensor([positions], device=self.device),
            # nobody reads it; without one, the model would make one of its own, of rows that see each other
            attention_mask=ids.new_ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, *[ids.shape[1]] * 2),
            use_cache=False,
            decoding=attention,
            **({"logits_to_keep": lasts} if self.keeps_logits else {}),
        )
        if new:
            self.groups.append(attention.new)
        return output.logits[0] if self.keeps_logits else output.logits[0, lasts]

    def drop(self, rows: Collection[Row]) -> None:
        """Let rows leave. All other live rows must have got the token that follows."""
        for group in self.groups:
            if any(row in rows for row in group.rows):
                group.drop(rows)
        self.groups = [group for group in self.groups if group.rows]

    def answers(
        self,
        rows: Sequence[Row],
        places: int,
        max_new_tokens: int,
        ends: Collection[int],
        go_on: Callable[[bool], bool] = bool,
    ) -> Iterator[Row]:
        """Yield each row as soon as its answer has ended: its most likely tokens, up to the first of `ends`.

        Args:
            rows: start with those that take longest, so that none is left alone.
            places: number of rows that are live at once.
            go_on: called before each forward with whether this rank has rows left; returns whether any rank has.
        """
        # those that start at once are read with others of their length
        waiting = deque([*sorted(rows[:places], key=lambda row: -len(row.prompt)), *rows[places:]])
        while go_on(bool(waiting or self.groups)):
            heartbeat()
            new = self._admitted(waiting, places - len(self.live))
            idle = [] if new or self.groups else [Row([0])]  # takes part in the others' forward
            following = self.forward(new or idle).argmax(dim=-1).tolist()
            ended = set(idle)
            for row, token in zip(self.live, following, strict=True):
                row.answer.append(token)
                if row not in idle and (token in ends or len(row.answer) == max_new_tokens):
                    ended.add(row)
                    yield row
            if ended:
                self.drop(ended)

    def _admitted(self, waiting: deque[Row], free: int) -> list[Row]:
        """Take the rows that start with the next forward."""
        rows: list[Row] = []
        live = len(self.live)
        if live and free < max(1, (live + free) // ADMITTED_AT):
            return rows
        tokens = 0
        while waiting and len(rows) < free and (not rows or tokens + len(waiting[0].prompt) <= READ_TOKENS):
            rows.append(waiting.popleft())
            tokens += len(rows[-1].prompt)
        while rows and len(self.groups) >= MOST_GROUPS:
            self.groups.sort(key=lambda group: group.width)
            pairs = [left.padding_with(right) for left, right in itertools.pairwise(self.groups)]
            at = pairs.index(min(pairs))
            self.groups[at : at + 2] = [self.groups[at].joined(self.groups[at + 1])]
        return rows
