"""Decides which rows of tokens each optimizer step learns from, given only data, shares, seed and global batch size."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accel_sft.api.config import read_shares
from accel_sft.api.errors import UserError
from accel_sft.data.token_store import StoredEncoding


class StepPlan:
    """A pure function of (data, shares of its sources, seed, global batch size): the rows of every optimizer step.

    The rows form an endless stream, in which the sources take turns by their shares (`taking_turns`). Each pass over a
    source permutes its rows anew. Step k takes the next `global_batch_size` rows, even across an epoch's end. An epoch
    is one pass over all rows of the source that lasts longest; the last step ends at the end of the last epoch, so it
    may have fewer rows. There is no state: a resumed run asks for the next step.

    Args:
        lengths, supervised: number of tokens, and of supervised tokens, of each row; shape (rows,).
        max_steps: optimizer steps, or None to derive them from `epochs`.
        sources: the indices of each source's rows, by the source's name; by default one source has all rows.
        shares: each source's share of the rows, as whole numbers without a common divisor.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        supervised: Sequence[int] | np.ndarray,
        *,
        seed: int,
        global_batch_size: int,
        epochs: float | None,
        max_steps: int | None,
        sources: Mapping[str, np.ndarray] | None = None,
        shares: Sequence[int] = (1,),
    ) -> None:
        self.lengths, self.supervised = np.asarray(lengths), np.asarray(supervised)
        self.seed, self.global_batch_size = seed, global_batch_size
        self.sources, self.shares = sources or {"": np.arange(len(self.lengths))}, shares
        self._rows = [*self.sources.values()]
        self._turns = taking_turns(shares)
        self._places = [np.flatnonzero(self._turns == source) for source in range(len(shares))]
        self._earlier = np.empty_like(self._turns)  # for each turn of a round: how many its source had before
        for places in self._places:
            self._earlier[places] = np.arange(len(places))
        self._longest = max(range(len(shares)), key=lambda source: len(self._rows[source]) / shares[source])
        length = self._when(round((epochs or 0) * len(self._rows[self._longest])))
        self.stream_length = length if max_steps is None else None
        self.total_steps = max_steps or max(math.ceil(length / global_batch_size), 1)
        self._permutation = functools.lru_cache(maxsize=2 * len(shares))(self._drawn_permutation)

    def _drawn_permutation(self, source: int, epoch: int) -> np.ndarray:
        drawn = np.random.Generator(np.random.Philox(key=[self.seed, epoch], counter=[0, 0, 0, source]))
        return self._rows[source][drawn.permutation(len(self._rows[source]))]

    def _when(self, rows: int) -> int:
        """Return the length of the stream until the longest-lasting source has given this number of rows."""
        rounds, turn = divmod(rows - 1, self.shares[self._longest])
        return rounds * len(self._turns) + int(self._places[self._longest][turn]) + 1 if rows else 0

    def _count(self, source: int, length: int) -> int:
        """Return how many of the stream's first `length` rows come from a source."""
        rounds, rest = divmod(length, len(self._turns))
        return rounds * self.shares[source] + int(np.searchsorted(self._places[source], rest))

    def _end(self, step: int) -> int:
        """Return the number of rows in the first `step` steps."""
        end = step * self.global_batch_size
        return end if self.stream_length is None else min(end, self.stream_length)

    def examples(self, step: int) -> np.ndarray:
        """Return the indices of the rows that step `step` (from 0) learns from; shape (at most global_batch_size,)."""
        begin = step * self.global_batch_size
        rounds, turns = np.divmod(np.arange(begin, max(self._end(step + 1), begin + 1)), len(self._turns))
        rows = np.empty(len(turns), dtype=np.int64)
        for source, share in enumerate(self.shares):
            mine = np.flatnonzero(self._turns[turns] == source)
            numbers = rounds[mine] * share + self._earlier[turns[mine]]  # how many rows the source gave before
            epochs, offsets = np.divmod(numbers, len(self._rows[source]))
            for epoch in np.unique(epochs):
                now = epochs == epoch
                rows[mine[now]] = self._permutation(source, int(epoch))[offsets[now]]
        return rows

    def seed_of(self, step: int, rank: int) -> int:
        """Return the seed of a rank's random numbers in a step (dropout), so that checkpoints need no random state."""
        return int(np.random.SeedSequence([self.seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)

    def epoch(self, step: int) -> float:
        """Return how many passes over the longest-lasting source `step` steps make; may be a fraction."""
        return self._count(self._longest, self._end(step)) / len(self._rows[self._longest])

    def ends_epoch(self, step: int) -> bool:
        """Whether step number `step` (from 1) finishes an epoch."""
        return math.floor(self.epoch(step)) > math.floor(self.epoch(step - 1))

    def seen(self, steps: int) -> list[dict[str, Any]]:
        """Return, for result.json, each source's number of rows, and how many of its rows and tokens the first `steps`
        steps saw."""
        sources_seen = []
        for source, (name, rows) in enumerate(self.sources.items()):
            count = self._count(source, self._end(steps))
            passes, rest = divmod(count, len(rows))
            tokens = passes * self.lengths[rows].sum() + self.lengths[self._permutation(source, passes)[:rest]].sum()
            about = {"name": name, "share": self.shares[source], "rows": len(rows)}
            sources_seen.append({**about, "rows_seen": count, "tokens_seen": int(tokens)})
        return sources_seen

    def mean(self, numbers: np.ndarray) -> float:
        """Return the mean of `numbers` (one for each row) over the stream: sources are weighted by their shares."""
        weighted = [float(numbers[rows].mean()) * share for rows, share in zip(self._rows, self.shares, strict=True)]
        return sum(weighted) / sum(self.shares)

    @property
    def epoch_rows(self) -> int:
        """Number of rows in an epoch."""
        return self._when(len(self._rows[self._longest]))

    def is_due(self, setting: str, step: int) -> bool:
        """Whether an evaluation (or a checkpoint) is due after `step` steps, if `--eval-every` (or `--save-every`) has
        the value `setting`."""
        if setting == "epoch":
            return self.ends_epoch(step)
        every = math.ceil(self.total_steps / 4) if setting == "auto" else int(setting) if setting != "off" else 0
        return every > 0 and step % every == 0


def taking_turns(shares: Sequence[int]) -> np.ndarray:
    """Return the source of each turn in a round of sum(shares) turns; the stream repeats the round.

    After n turns, each of k sources has had its share of n, to within 1 - 1 / (2k - 2) turns: R. Tijdeman, The
    chairman assignment problem, Discrete Mathematics 32 (1980). A turn goes to the source with the earliest deadline,
    among those for which it is not too early. (If turns went to the source furthest behind its share, a source could
    be off by more than one turn.) All numbers are whole, so the result is exact.
    """
    total, parts, unit = sum(shares), max(2 * len(shares) - 2, 1), math.lcm(*shares)
    had = [0] * len(shares)
    turns = np.empty(total, dtype=np.int64)

    def deadline(source: int) -> Any:
        return (parts * (had[source] + 1) - 1) * (unit // shares[source])

    for turn in range(total):
        ready = (s for s, share in enumerate(shares) if parts * (turn + 1) * share >= total * (1 + parts * had[s]))
        turns[turn] = chosen = min(ready, key=deadline)
        had[chosen] += 1
    return turns


def check_sources(examples: Sequence[Any], mix: str) -> dict[str, int]:
    """Return each source's share by its name; the sources are those of `--train-file`, in that order."""
    shares, names = read_shares(mix), getattr(examples, "sources", None)
    if names is None or not hasattr(examples, "sources_of"):
        raise UserError(f"--mix {mix}: this task's rows are not read from files of --train-file; leave --mix out")
    if len(names) != len(shares):
        raise UserError(
            f"--mix {mix}: {len(shares)} shares, but --train-file names {len(names)} ({', '.join(names)}); give as "
            "many shares"
        )
    if len(set(names)) < len(names):
        raise UserError(f"--mix {mix}: --train-file names {', '.join(names)}, one of them twice; name it once")
    return dict(zip(names, shares, strict=True))


def rows_by_source(train: StoredEncoding, mix: str) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
    """Return the indices of each source's rows of tokens, by the source's name, and the shares."""
    examples: Any = train.examples
    shares = check_sources(examples, mix)
    indices = np.concatenate([columns.indices.copy() for columns in train.kept.columns()])
    numbers = np.asarray(examples.sources_of(indices.tolist()))
    rows_of = {name: np.flatnonzero(numbers == number) for number, name in enumerate(shares)}
    if empty := [name for name, rows in rows_of.items() if not len(rows)]:
        raise UserError(
            f"--mix {mix}: every row of {', '.join(empty)} was left out; correct its rows, or leave --mix out"
        )
    return rows_of, tuple(shares.values())


def in_words(plan: StepPlan) -> str:
    """Say how a plan mixes its sources, such as "3 : 1 of a.jsonl (1,000 rows), b.jsonl (200 rows, seen 1.7 times an
    epoch)"."""
    described = []
    per_row = [share / len(rows) for rows, share in zip(plan.sources.values(), plan.shares, strict=True)]
    for (name, rows), passes in zip(plan.sources.items(), np.divide(per_row, min(per_row)), strict=True):
        often = f", seen {passes:,.1f} times an epoch" if passes > 1 else ""
        described.append(f"{name} ({len(rows):,} rows{often})")
    return f"{' : '.join(map(str, plan.shares))} of {', '.join(described)}"
