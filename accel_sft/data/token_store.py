"""A split's tokens in a memory-mapped Arrow file, as a sequence of rows that are read when they are asked for."""

import dataclasses
import hashlib
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from accel_sft.chat.encoded import Encoded, Encoding
from accel_sft.chat.image_inputs import ImageSource, RowImages
from accel_sft.io.heartbeat import heartbeat

_BATCH_BYTES = 1 << 23
_IDS = pa.list_(pa.int32())
_SCHEMA = pa.schema(
    [
        *[("index", pa.int32()), ("prompt_length", pa.int32()), ("input_ids", _IDS), ("earlier", _IDS)],
        ("images", _IDS),
    ]
)
"""`earlier` has begin and end of each answer before a row's last one: begin, end, begin, end, ...; `images` is empty in
a row without images, else it has their number and their digest."""
_IMAGES_INTS = 5
"""Length of a row's `images`: one int32 for the number, and four for the digest of 128 bits."""


class Columns(NamedTuple):
    """The columns of consecutive rows, arrays or memoryviews of int32. `prompts` has each row's prompt length, and
    `indices` its example's index. Row k has the token ids `ids[offsets[k] : offsets[k + 1]]`; begin and end of its
    answers before the last one are `earlier[earlier_offsets[k] : earlier_offsets[k + 1]]`."""

    prompts: Any
    indices: Any
    offsets: Any
    ids: Any
    earlier_offsets: Any
    earlier: Any


class TokenStore(Sequence[Encoded]):
    """The rows of a file that `merge` wrote, each read when it is asked for; a slice is a list of rows.

    Args:
        path: the file; it may be removed once it is open.
        fingerprint: as `merge` gave it.
        source: gives the rows' images.
    Attributes:
        lengths: tokens of each row, int32.
        supervised, answers: `Encoded.supervised_tokens` and `Encoded.answer_tokens` of each row, int32.
        examples: number of examples, which is smaller than the number of rows if some examples have several rows.
        pictured: indices of the rows that have images, in order, int64.
    """

    def __init__(self, path: Path, fingerprint: str, source: ImageSource | None = None) -> None:
        self.fingerprint, self.source = fingerprint, source
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        reader = pa.ipc.open_file(pa.py_buffer(self._map))
        read = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        batches = [_columns(batch) for batch in read]
        self._batches = [Columns(*(part.data for part in columns)) for columns in batches]  # memoryviews give int
        self._starts = [0, *np.cumsum([len(columns.prompts) for columns in batches], dtype=np.int64).tolist()]
        self.lengths = np.concatenate([np.diff(columns.offsets) for columns in batches])
        self.answers = self.lengths - np.maximum(np.concatenate([columns.prompts for columns in batches]), 1)
        self.supervised = self.answers + np.concatenate([_earlier_tokens(columns) for columns in batches])
        indices = np.concatenate([columns.indices for columns in batches])
        self.examples = len(indices) - int((indices[1:] == indices[:-1]).sum())
        places, kept = zip(*map(_images, read), strict=True)
        self.pictured = np.concatenate([at + start for at, start in zip(places, self._starts, strict=False)])
        self._images = np.concatenate(kept)
        self._release_pages()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int | slice) -> Any:
        rows = range(len(self))[index]
        return self.take(rows) if isinstance(rows, range) else self.take([rows])[0]

    def take(self, rows: Iterable[int]) -> list[Encoded]:
        """Return the rows with these indices (from 0), quicker than one at a time."""
        found = []
        for row in rows:
            number = bisect_right(self._starts, row) - 1
            columns, at = self._batches[number], row - self._starts[number]
            ids = columns.ids[columns.offsets[at] : columns.offsets[at + 1]].tolist()
            bounds = columns.earlier[columns.earlier_offsets[at] : columns.earlier_offsets[at + 1]].tolist()
            earlier = tuple(zip(bounds[::2], bounds[1::2], strict=True))
            index = columns.indices[at]
            images = self._images_of(row, index) if len(self.pictured) else None
            found.append(Encoded(index, ids, columns.prompts[at], earlier, images))
        self._release_pages()
        return found

    def _release_pages(self) -> None:
        """Unmap the pages that were read: one access may map two megabytes, and some hundred accesses the whole file.

        The kernel keeps them in its page cache while there is room, so the next access costs only microseconds.
        """
        self._map.madvise(mmap.MADV_DONTNEED)

    def _images_of(self, row: int, index: int) -> RowImages | None:
        at = int(np.searchsorted(self.pictured, row))
        if at == len(self.pictured) or self.pictured[at] != row:
            return None
        count, *_ = kept = self._images[at]
        return RowImages(index, int(count), kept[1:].tobytes(), self.source)

    def with_images(self, place: int = 0, ranks: int = 1) -> Iterator[Encoded]:
        """Yield the rows that have images, or a rank's share of them."""
        for row in self.pictured[place::ranks].tolist():
            yield self[row]

    def text_with(self, ids: Sequence[int]) -> int | None:
        """Return the index of the first example with one of these token ids in a row without images, or None."""
        for start, columns in zip(self._starts, self.columns(), strict=False):
            places = np.flatnonzero(np.isin(columns.ids, ids))
            rows = np.unique(np.searchsorted(columns.offsets, places, side="right") - 1)
            rows = rows[~np.isin(rows + start, self.pictured)]
            if len(rows):
                return int(columns.indices[rows[0]])
        return None

    def most_of(self, ids: Sequence[int]) -> Encoded:
        """Return the row with the most of these token ids."""
        counts = [
            np.add.reduceat(np.isin(columns.ids, ids), columns.offsets[:-1], dtype=np.int64)
            for columns in self.columns()
        ]
        row: Encoded = self[int(np.concatenate(counts).argmax())]
        return row

    def image_hashes(self) -> np.ndarray:
        """Return 64 bits of the images' digest for each row with images, uint64."""
        return np.ascontiguousarray(self._images[:, 1:3]).view(np.uint64)[:, 0]

    def of(self, index: int) -> list[Encoded]:
        """Return the rows of the example with this index in its split; an empty list if it was left out."""
        first, behind = (side(self, index, key=attrgetter("index")) for side in (bisect_left, bisect_right))
        return self[first:behind]

    def columns(self) -> Iterator[Columns]:
        """Yield the columns of all rows, some megabytes at a time: views of the file, valid until the next come."""
        for batch in self._batches:
            yield Columns(*map(np.asarray, batch))
            self._release_pages()

    def largest_id(self) -> int:
        """The largest token id of all examples."""
        largest = max((int(np.max(batch.ids, initial=0)) for batch in self._batches), default=0)
        self._release_pages()
        return largest

    def some(self, count: int = 4096) -> list[Encoded]:
        """Return all rows, or about `count` of them: the first ones, others spread over all the data, the longest, and
        the first with images."""
        if len(self) <= count:
            return self[:]
        first, spread = range(count // 8), range(0, len(self), -(-len(self) // count))
        longest = np.argpartition(self.lengths, -(count // 8))[-(count // 8) :]
        pictured = self.pictured[: count // 8]
        return self.take(sorted({*first, *spread, *longest.tolist(), *pictured.tolist()}))

    def extremes(self) -> list[Encoded]:
        """The longest row, and the first with images, if there are any."""
        return self.take([int(self.lengths.argmax()), *self.pictured[:1].tolist()] if len(self) else [])


@dataclasses.dataclass
class StoredEncoding(Encoding):
    """A whole split's encoding, whose rows are in a file."""

    kept: TokenStore


def _columns(batch: Any) -> Columns:
    """The columns of a record batch, as views of the file."""
    ids, earlier = batch.column("input_ids"), batch.column("earlier")
    parts = batch.column("prompt_length"), batch.column("index"), ids.offsets, ids.values
    return Columns(*map(_view, (*parts, earlier.offsets, earlier.values)))


def _view(array: Any) -> np.ndarray:
    """Return a pyarrow array of numbers, none of them missing, as a view. `to_numpy` would import pandas for it."""
    kind, count = np.dtype(str(array.type)), len(array)
    if not count:
        return np.empty(0, kind)  # it may have no buffer
    return np.frombuffer(array.buffers()[1], kind, count, array.offset * kind.itemsize)


def _images(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of a record batch's rows with images, and a copy of their `images`, shape (indices, 5)."""
    column = batch.column("images")
    values = _view(column.values).reshape(-1, _IMAGES_INTS).copy()
    return np.flatnonzero(np.diff(_view(column.offsets))), values


def _earlier_tokens(columns: Columns) -> np.ndarray:
    """Return the number of supervised tokens before each row's last answer."""
    sums = np.concatenate([[0], np.cumsum(columns.earlier[1::2] - columns.earlier[::2])])
    return np.diff(sums[columns.earlier_offsets // 2]).astype(np.int32)


def _stored(example: Encoded) -> dict[str, Any]:
    images = example.images
    kept = [images.count, *np.frombuffer(images.digest, np.int32).tolist()] if images else []
    return {**example._asdict(), "earlier": [at for span in example.earlier for at in span], "images": kept}


def write_part(path: Path, parts: Iterable[Encoding], split: str) -> Encoding:
    """Write encoded examples to a part file for `merge`; return which ones were left out, and which truncated."""
    left_out = Encoding(split)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, _SCHEMA) as writer:
        for part in parts:
            writer.write_batch(pa.RecordBatch.from_pylist([_stored(each) for each in part.kept], _SCHEMA))
            left_out.add(part)
    return left_out


def merge(parts: Sequence[Path], path: Path) -> str:
    """Write all parts, in order, to one file; return its `fingerprint_of`, which does not depend on their sizes."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        for batches in _enough(parts):
            for batch in pa.Table.from_batches(batches).combine_chunks().to_batches():  # none without rows, else one
                writer.write_batch(batch)
    return fingerprint_of(path)


def fingerprint_of(path: Path) -> str:
    """Return a SHA-256 of the rows in a file that `merge` wrote: tokens, which of them are supervised, and
    images."""
    digests, answers, images = [hashlib.sha256() for _ in range(6)], 0, 0
    with pa.OSFile(str(path), "rb") as file, pa.ipc.open_file(file) as reader:
        for number in range(reader.num_record_batches):
            heartbeat()
            batch = reader.get_batch(number)
            prompts, _, offsets, ids, earlier_offsets, earlier = _columns(batch)
            columns = [prompts, np.diff(offsets), ids, np.diff(earlier_offsets), earlier, _images(batch)[1]]
            for digest, column in zip(digests, columns, strict=True):
                digest.update(np.ascontiguousarray(column, dtype="<i4").data)
            answers, images = answers + len(earlier), images + len(columns[-1])
    # empty columns are left out: older versions lack them, and their runs can be resumed only if the hash is the same
    deciding = [*digests[:3], *digests[3 : 5 if answers else 3], *digests[5 : 6 if images else 5]]
    return hashlib.sha256(b"".join(digest.digest() for digest in deciding)).hexdigest()


def _enough(parts: Sequence[Path]) -> Iterator[list[Any]]:
    """Yield the parts' record batches in lists to be joined, since a store needs some kilobytes for each batch.

    A list has at least `_BATCH_BYTES`; the last one may have less.
    """
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
