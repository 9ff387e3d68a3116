"""A split's tokens in a memory-mapped Arrow file, as a sequence of examples that needs no memory of its own."""

import hashlib
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from accel_sft.data.chat import Encoded, Encoding
from accel_sft.io.heartbeat import heartbeat

_BATCH_BYTES = 1 << 23
_SCHEMA = pa.schema([("index", pa.int32()), ("prompt_length", pa.int32()), ("input_ids", pa.list_(pa.int32()))])


class TokenStore(Sequence[Encoded]):
    """The examples of a file that `merge` wrote, each made when it is asked for; a slice is a list of them.

    Args:
        path: the file; it may be removed once it is open.
        fingerprint: as `merge` gave it.
    Attributes:
        lengths: tokens of each example, int32.
        supervised: tokens with a loss of each example, int32; see `Encoded.supervised_tokens`.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        reader = pa.ipc.open_file(pa.py_buffer(self._map))
        batches = [_columns(reader.get_batch(number)) for number in range(reader.num_record_batches)]
        self._batches = [tuple(map(memoryview, columns)) for columns in batches]  # whose elements are plain int
        self._starts = [0, *np.cumsum([len(prompts) for prompts, *_ in batches], dtype=np.int64).tolist()]
        self.lengths = np.concatenate([np.diff(offsets) for _, _, offsets, _ in batches])
        self.supervised = self.lengths - np.maximum(np.concatenate([prompts for prompts, *_ in batches]), 1)
        self._release_pages()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int | slice) -> Any:
        rows = range(len(self))[index]
        return self.take(rows) if isinstance(rows, range) else self.take([rows])[0]

    def take(self, rows: Iterable[int]) -> list[Encoded]:
        """The examples at these places, from 0; quicker than one by one."""
        found = []
        for row in rows:
            number = bisect_right(self._starts, row) - 1
            prompts, indices, offsets, ids = self._batches[number]
            at = row - self._starts[number]
            found.append(Encoded(indices[at], ids[offsets[at] : offsets[at + 1]].tolist(), prompts[at]))
        self._release_pages()
        return found

    def _release_pages(self) -> None:
        """Release the pages that were read: one access may map two megabytes, a few hundred the whole file.

        The system keeps the file in what memory it has to spare, so that the next access costs some microseconds.
        """
        self._map.madvise(mmap.MADV_DONTNEED)

    def find(self, index: int) -> Encoded | None:
        """The example with this index in its split, None if it was left out."""
        row = bisect_left(self, index, key=attrgetter("index"))
        found = self[row : row + 1]
        return found[0] if found and found[0].index == index else None

    def columns(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Prompt lengths, indices, offsets and tokens, some megabytes at a time: views of the file, to be read only
        until the next are asked for."""
        for batch in self._batches:
            yield tuple(map(np.asarray, batch))
            self._release_pages()

    def largest_id(self) -> int:
        """The largest token id of all examples."""
        largest = max((int(np.max(ids, initial=0)) for *_, ids in self._batches), default=0)
        self._release_pages()
        return largest

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


def write_part(path: Path, parts: Iterable[Encoding], split: str) -> Encoding:
    """Write examples as they come, for `merge` to take in; what was left out and cut."""
    left_out = Encoding(split)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, _SCHEMA) as writer:
        for part in parts:
            writer.write_batch(pa.RecordBatch.from_pylist([each._asdict() for each in part.kept], _SCHEMA))
            left_out.note(part)
    return left_out


def merge(parts: Sequence[Path], path: Path) -> str:
    """Write one file of all parts, in their order; SHA-256 of its tokens, however they are divided into parts."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        for batches in _enough(parts):
            for batch in pa.Table.from_batches(batches).combine_chunks().to_batches():  # one, or none
                writer.write_batch(batch)
    return fingerprint_of(path)


def fingerprint_of(path: Path) -> str:
    """SHA-256 of the tokens in a file that `merge` wrote."""
    digests = [hashlib.sha256() for _ in range(3)]
    with pa.OSFile(str(path), "rb") as file, pa.ipc.open_file(file) as reader:
        for number in range(reader.num_record_batches):
            heartbeat()
            prompts, _, offsets, ids = _columns(reader.get_batch(number))
            for digest, column in zip(digests, (prompts, np.diff(offsets), ids), strict=True):
                digest.update(np.ascontiguousarray(column, dtype="<i4"))
    return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()


def _enough(parts: Sequence[Path]) -> Iterator[list[Any]]:
    """The record batches of all parts, to be joined: an open store takes some kilobytes of memory for each."""
    waiting, size = [], 0
    for part in parts:
        with pa.OSFile(str(part), "rb") as file, pa.ipc.open_stream(file) as reader:
            for batch in reader:
                waiting.append(batch)
                size += batch.nbytes
                if size >= _BATCH_BYTES:
                    yield waiting
                    waiting, size = [], 0
    if waiting:
        yield waiting
