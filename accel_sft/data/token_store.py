"""A split's tokens in a memory-mapped Arrow file, as a sequence of examples that needs no memory of its own."""

from __future__ import annotations

import hashlib
import mmap
import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from accel_sft.data.chat import Encoded

_BATCH_ROWS, _BATCH_BYTES = 8192, 1 << 23
"""A record batch ends at the first of these."""


class TokenStore(Sequence[Encoded]):
    """The examples of a file that `merge` wrote, each made when it is asked for; a slice is a list of them.

    Args:
        path: the file; it may be removed once it is open.
        fingerprint: as `merge` gave it.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        import pyarrow as pa

        self.fingerprint = fingerprint
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        reader = pa.ipc.open_file(pa.py_buffer(self._map))
        self._batches = [_columns(reader.get_batch(number)) for number in range(reader.num_record_batches)]
        self._views = [tuple(map(memoryview, columns)) for columns in self._batches]  # whose elements are plain int
        sizes = [len(prompts) for prompts, *_ in self._batches]
        self._starts = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Encoded: ...
    @overload
    def __getitem__(self, index: slice) -> list[Encoded]: ...
    def __getitem__(self, index: int | slice) -> Encoded | list[Encoded]:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        row = operator.index(index)
        row += len(self) if row < 0 else 0
        if not 0 <= row < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.take([row])[0]

    def take(self, rows: Iterable[int]) -> list[Encoded]:
        """The examples at these places, from 0; quicker than one by one."""
        found = []
        for row in rows:
            number = bisect_right(self._starts, row) - 1
            prompts, indices, offsets, ids = self._views[number]
            at = row - self._starts[number]
            found.append(Encoded(indices[at], ids[offsets[at] : offsets[at + 1]].tolist(), prompts[at]))
        self._release_pages()
        return found

    def _release_pages(self) -> None:
        """Release the pages that were read: one access may map two megabytes, a few hundred the whole file.

        The system keeps the file in what memory it has to spare, so that the next access costs some microseconds.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int32."""
        return self._gathered(lambda prompts, indices, offsets, ids: np.diff(offsets))

    @cached_property
    def supervised(self) -> np.ndarray:
        """Tokens with a loss of each example, int32; see `Encoded.supervised_tokens`."""
        return self._gathered(lambda prompts, indices, offsets, ids: np.diff(offsets) - np.maximum(prompts, 1))

    def _gathered(self, column: Any) -> np.ndarray:
        found = np.concatenate([column(*batch) for batch in self._batches])
        self._release_pages()
        return found

    def find(self, index: int) -> Encoded | None:
        """The example with this index in its split, None if it was left out."""
        number = bisect_right(self._firsts, index) - 1
        if number < 0:
            return None
        indices = self._batches[number][1]
        at = int(np.searchsorted(indices, index))
        there = at < len(indices) and indices[at] == index
        return self[self._starts[number] + at] if there else None

    @cached_property
    def _firsts(self) -> list[int]:
        return [int(indices[0]) for _, indices, *_ in self._batches]

    def some(self, count: int = 4096) -> list[Encoded]:
        """All examples, or about `count` of them: the first ones, others from all over the data, and the longest."""
        if len(self) <= count:
            return self[:]
        first, spread = range(count // 8), range(0, len(self), -(-len(self) // count))
        longest = np.argpartition(self.lengths, -(count // 8))[-(count // 8) :]
        return self.take(sorted({*first, *spread, *longest.tolist()}))


def _columns(batch: Any) -> tuple[np.ndarray, ...]:
    """Prompt lengths, indices, offsets and tokens of a record batch, as views of the file."""
    ids = batch.column("input_ids")
    return (
        batch.column("prompt_length").to_numpy(),
        batch.column("index").to_numpy(),
        ids.offsets.to_numpy(),
        ids.values.to_numpy(),
    )


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [("index", pa.int32()), ("prompt_length", pa.int32()), ("input_ids", pa.list_(pa.int32()))],
    )


def write_part(path: Path, parts: Iterable[Sequence[Encoded]]) -> int:
    """Write examples as they come; how many there were. `merge` takes the file in."""
    import pyarrow as pa

    count = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, _schema()) as writer:
        for examples in parts:
            columns = (
                [example.index for example in examples],
                [example.prompt_length for example in examples],
                [example.input_ids for example in examples],
            )
            arrays = [pa.array(column, field.type) for column, field in zip(columns, _schema(), strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=_schema()))
            count += len(examples)
    return count


def merge(parts: Sequence[Path], path: Path) -> str:
    """Write one file of all parts, in their order; SHA-256 of its tokens, however they are divided into parts."""
    import pyarrow as pa

    digests = [hashlib.sha256() for _ in range(3)]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _schema()) as writer:
        for batch in _larger(parts):
            prompts, _, offsets, ids = _columns(batch)
            for digest, column in zip(digests, (prompts, np.diff(offsets), ids), strict=True):
                digest.update(np.ascontiguousarray(column, dtype="<i4"))
            writer.write_batch(batch)
    return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()


def _larger(parts: Sequence[Path]) -> Iterable[Any]:
    """The record batches of all parts, small ones joined; none is empty."""
    import pyarrow as pa

    waiting: list[Any] = []
    for path in parts:
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as reader:
            for batch in reader:
                waiting += [batch] if batch.num_rows else []
                rows, size = sum(each.num_rows for each in waiting), sum(each.nbytes for each in waiting)
                if rows >= _BATCH_ROWS or size >= _BATCH_BYTES:
                    yield _joined(waiting)
                    waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[Any]) -> Any:
    import pyarrow as pa

    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return batch
