"""Decodes answers, with one KV cache for the rows' common prefix. When a row ends, a waiting row takes its place."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from accel_sft.io.heartbeat import heartbeat
from accel_sft.models.architecture import arguments
from accel_sft.models.prefix_attention import install, sdpa_attention_forward

READ_TOKENS = 1024
"""Maximum number of prompt tokens that one forward reads for new rows; a longer prompt is read alone."""
ADMITTED_AT = 16
"""New rows are read once at least 1 / ADMITTED_AT of the places is free; reading them sooner would make more groups."""
MOST_GROUPS = 8
"""Maximum number of groups. Attention runs once per group: more groups mean less padding, but more kernel calls."""

GROWTH = 32
"""Number of tokens by which a KV cache grows; growing it for every token would copy the whole cache each time."""

States = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, (rows, key heads, columns, D)."""


@dataclasses.dataclass(eq=False)
class Row:
    """A prompt's tokens after the prefix (at least one), and the answer so far, whose last token is not yet read.
    `twins` have the same prompt, which is read once for all; they start together with this row."""

    prompt: Sequence[int]
    answer: list[int] = dataclasses.field(default_factory=list)
    twins: Sequence["Row"] = ()

    @property
    def read(self) -> int:
        """Between two forwards: the number of this row's tokens in the KV cache, without the prefix."""
        return len(self.prompt) + len(self.answer) - 1 if self.answer else 0


class Group:
    """Rows whose keys and values are in the same buffers. All rows end at the same column; their next tokens go into
    the following column. A shorter row begins with padding, which attention ignores. The buffers have spare columns
    and, after rows were dropped, spare rows."""

    def __init__(self, rows: Sequence[Row], layers: dict[int, States], begin: int, end: int) -> None:
        self.rows, self.layers, self.begin, self.end = [*rows], layers, begin, end
        self.unseen: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Number of columns of the longest row."""
        return self.end - self.begin

    def padding_with(self, other: "Group") -> int:
        """Number of padding positions that joining the groups would add."""
        narrow, wide = sorted((self, other), key=lambda group: group.width)
        return len(narrow.rows) * (wide.width - narrow.width)

    def joined(self, other: "Group") -> "Group":
        """Join both groups into a new group; the buffers of the old groups are freed."""
        width, layers = max(self.width, other.width), {}
        for index in [*self.layers]:
            pairs = zip(self._taken(index), other._taken(index), strict=True)
            # padded with zeros: uninitialized memory may hold NaN, which a mask does not remove
            fitted = ([pad(part, (0, 0, width - part.shape[2], GROWTH)) for part in pair] for pair in pairs)
            keys, values = (torch.cat(parts) for parts in fitted)
            layers[index] = keys, values
        return Group([*self.rows, *other.rows], layers, 0, width)

    def _taken(self, index: int) -> list[torch.Tensor]:
        return [buffer[: len(self.rows), :, self.begin : self.end] for buffer in self.layers.pop(index)]

    def drop(self, rows: Collection[Row]) -> None:
        """Remove rows; the last of the remaining rows move to the places that become free."""
        count = len(self.rows) - sum(row in rows for row in self.rows)
        free = [place for place, row in enumerate(self.rows[:count]) if row in rows]
        moved = [place for place, row in enumerate(self.rows) if place >= count and row not in rows]
        for place, last in zip(free, moved, strict=True):
            self.rows[place] = self.rows[last]
        del self.rows[count:]
        for buffers in self.layers.values() if free else ():
            for buffer in buffers:
                buffer[free] = buffer[moved]
        self.begin = self.end - max((row.read for row in self.rows), default=0)

    def make_room(self, device: torch.device) -> None:
        """Make room in the buffers for the next token of each row."""
        if self.layers and self.end == next(iter(self.layers.values()))[0].shape[2]:
            for index in [*self.layers]:
                keys, values = (pad(states, (0, 0, 0, GROWTH)) for states in self._taken(index))
                self.layers[index] = keys, values
            self.begin, self.end = 0, self.width
        self.end += 1
        padding = [self.width - 1 - row.read for row in self.rows]
        self.unseen = None
        if any(padding):
            columns = torch.arange(self.width, device=device)
            self.unseen = (columns < torch.tensor(padding, device=device)[:, None])[:, None, None]  # (B, 1, 1, W)

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Write keys and values of one token per row, (B, key heads, D); return keys and values of all tokens."""
        states_so_far = []
        for buffer, states in zip(self.layers[index], (keys, values), strict=True):
            buffer[: len(self.rows), :, self.end - 1] = states
            states_so_far.append(buffer[: len(self.rows), :, self.begin : self.end])
        return states_so_far


class Attention:
    """Attention of one forward: first one token of each row in the existing groups, then the prompts of a new group.

    Nothing is padded outside of attention: all tokens stand in one sequence, row after row. If there is a prefix, all
    rows attend to it; `before` has the prefix's keys and values by layer, (1, key heads, P, D).
    """

    def __init__(
        self, groups: Sequence[Group], new: Sequence[Row], before: dict[int, States], device: torch.device
    ) -> None:
        self.groups, self.before = groups, before
        for group in groups:
            group.make_room(device)
        self.live, self.places = sum(len(group.rows) for group in groups), list[int]()
        if new:
            self._lay_out([len(row.prompt) for row in new], device)
            self.places = [place for place, row in enumerate(new) for _ in (row, *row.twins)]
            self.new = Group([one for row in new for one in (row, *row.twins)], {}, 0, self.longest)

    def _lay_out(self, lengths: Sequence[int], device: torch.device) -> None:
        self.longest = longest = max(lengths)
        length = torch.tensor(lengths, device=device)[:, None]
        column = torch.arange(longest, device=device)
        padding = longest - length
        first = length.cumsum(0) - length  # index of each row's first token
        # (B, T): index of the token in each column; for padding, any index
        self.cut = first + (column - padding).clamp(min=0)
        self.back = torch.nonzero((column >= padding).flatten())[:, 0]
        own = (column >= padding)[:, None] & (column <= column[:, None]) | (column == column[:, None])  # (B, T, T)
        prefix = next(iter(self.before.values()))[0].shape[2] if self.before else 0
        self.mask = torch.cat([own.new_ones(len(lengths), longest, prefix), own], dim=-1)[:, None]

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """A layer's attention: query (1, heads, N, D), key and value with at most as many heads -> (1, N, heads, D)."""
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # (N, heads, D)
        key, value = as_attended(key), as_attended(value)
        parts = []
        if self.live:
            live = query[: self.live], key[: self.live], value[: self.live]
            parts.append(self._live(module.layer_idx, *live, scaling))
        if len(query) > self.live:
            query, key, value = (states[self.live :] for states in (query, key, value))
            parts.append(self._prompts(module, query, key, value, scaling))
        return torch.cat(parts)[None]

    def _prompts(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        query, key, value = (states[self.cut].transpose(1, 2) for states in (query, key, value))  # (B, heads, T, D)
        states = (pad(part[self.places], (0, 0, 0, GROWTH)) for part in (key, value))  # a copy for each twin
        self.new.layers[module.layer_idx] = next(states), next(states)
        if self.before:
            copies = (states.expand(len(query), -1, -1, -1) for states in self.before[module.layer_idx])
            key, value = (torch.cat(both, dim=2) for both in zip(copies, (key, value), strict=True))
        output, _ = sdpa_attention_forward(module, query, key, value, self.mask, scaling=scaling, is_causal=False)
        return output.flatten(0, 1)[self.back]

    def _live(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attention of one query per row. One matrix product serves all rows, so that the prefix is read from memory
        once, and not once per row."""
        count, heads, size = query.shape
        query = (query * (size**-0.5 if scaling is None else scaling)).reshape(count, key.shape[1], -1, size)
        before = self.before.get(index)
        shared = _by_head(query, before[0][0].mT) if before else None  # (B, key heads, heads / key heads, P)
        prefix, at, outputs, weighed = before[0].shape[2] if before else 0, 0, [], []
        for group in self.groups:
            rows = slice(at, at + len(group.rows))
            at = rows.stop
            keys, values = group.write(index, key[rows], value[rows])
            scores = query[rows] @ keys.mT
            if group.unseen is not None:
                scores.masked_fill_(group.unseen, -torch.inf)
            if shared is not None:
                scores = torch.cat([shared[rows], scores], dim=-1)
            weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
            outputs.append(weights[..., prefix:] @ values)
            weighed.append(weights[..., :prefix])
        output = torch.cat(outputs)
        if before:
            output = output + _by_head(torch.cat(weighed), before[1][0])
        return output.reshape(count, heads, -1)


def as_attended(states: torch.Tensor) -> torch.Tensor:
    """Cast keys or values to the type that attention computes in. Under autocast, rotary positions make keys float32;
    without this cast, attention would cast the whole KV cache again for every token."""
    kind = states.device.type
    return states.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else states


def _by_head(rows: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Multiply `rows` (B, H, G, N) by `shared` (H, N, M), which is the same for all rows -> (B, H, G, M)."""
    count, heads, groups, size = rows.shape
    return (rows.transpose(0, 1).reshape(heads, -1, size) @ shared).view(heads, count, groups, -1).transpose(0, 1)


Choice = Callable[[torch.Tensor, Sequence[Row]], list[int]]
"""Returns the next token of each live row, given their logits (rows, vocabulary)."""


class Decoder:
    """Decodes rows whose common prefix the model has read once.

    A forward reads one sequence: the last token of each live row, and all prompt tokens of new rows. So rows are padded
    only in attention, and no row waits for other rows to end. Each `forward` calls the whole model exactly once: then
    ZeRO-3 and FSDP gather the weights, and ranks stay together. The model must have sdpa attention, take
    `position_ids`, and be in eval mode.
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
        """Read the last token of each live row, and the prompts of new rows, which are then live too. Returns the
        logits of each live row's next token, (rows, vocabulary). There must be at least one row."""
        live = self.live
        tokens = [[row.answer[-1]] for row in live] + [[*row.prompt] for row in new]
        first = [self.length + row.read for row in live] + [self.length] * len(new)
        positions = [at + place for at, of_row in zip(first, tokens, strict=True) for place in range(len(of_row))]
        ids = torch.tensor([[*itertools.chain(*tokens)]], device=self.device)
        attention = Attention(self.groups, new, self.before, self.device)
        lasts = torch.tensor([*itertools.accumulate(map(len, tokens))], device=self.device) - 1
        lasts = lasts[[*range(len(live)), *(len(live) + place for place in attention.places)]]
        output = self.model(
            input_ids=ids,
            position_ids=torch.tensor([positions], device=self.device),
            # a placeholder, which attention ignores: a model that is given a mask makes none
            attention_mask=ids.new_ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, *[ids.shape[1]] * 2),
            use_cache=False,
            decoding=attention,
            **({"logits_to_keep": lasts} if self.keeps_logits else {}),
        )
        if new:
            self.groups.append(attention.new)
        return output.logits[0] if self.keeps_logits else output.logits[0, lasts]

    def drop(self, rows: Collection[Row]) -> None:
        """Remove rows. All other live rows must already have their next token in `answer`."""
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
        choose: Choice = lambda logits, rows: logits.argmax(-1).tolist(),
    ) -> Iterator[Row]:
        """Yield each row, and each twin, when its answer ends. `choose` takes the tokens, up to the first of `ends`.

        The rows that take longest should come first; up to `places` rows are live at the same time. Before each
        forward, `go_on` is called with whether this rank still has rows; it returns whether any rank still has rows.
        """
        # in the first forwards, prompts of similar length are read together
        waiting = deque([*sorted(rows[:places], key=lambda row: -len(row.prompt)), *rows[places:]])
        while go_on(bool(waiting or self.groups)):
            heartbeat()
            new = self._admitted(waiting, places - len(self.live))
            if not (new or self.groups):
                self.forward([Row([0])])  # a dummy row, for other ranks' forward
                self.groups.clear()
                continue
            ended, logits = set(), self.forward(new)
            for row, token in zip(self.live, choose(logits, self.live), strict=True):
                row.answer.append(token)
                if token in ends or len(row.answer) == max_new_tokens:
                    ended.add(row)
                    yield row
            if ended:
                self.drop(ended)

    def _admitted(self, waiting: deque[Row], free: int) -> list[Row]:
        """Take from `waiting` the rows that start with the next forward."""
        rows: list[Row] = []
        live = len(self.live)
        count = 1 + len(waiting[0].twins) if waiting else 1
        if live and free < max(count, (live + free) // ADMITTED_AT):
            return rows
        tokens = 0
        while waiting and (not rows or (tokens + len(waiting[0].prompt) <= READ_TOKENS and free >= count)):
            rows.append(waiting.popleft())
            tokens += len(rows[-1].prompt)
            free -= count
        while rows and len(self.groups) >= MOST_GROUPS:
            self.groups.sort(key=lambda group: group.width)
            pairs = [left.padding_with(right) for left, right in itertools.pairwise(self.groups)]
            at = pairs.index(min(pairs))
            self.groups[at : at + 2] = [self.groups[at].joined(self.groups[at + 1])]
        return rows
