"""A split's tokens in flat, memory-mapped files, as a sequence that reads a row when it is accessed."""

import dataclasses
import hashlib
import itertools
import mmap
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accel_sft.chat.encoded import Encoded, Encoding, Pair
from accel_sft.chat.image_inputs import ImageSource, RowImages
from accel_sft.io.heartbeat import heartbeat

ROWS, IDS, EARLIER = FILES = "rows", "ids", "earlier"
"""The files of a store, in one folder. `rows` has a `_ROW` for each row, `ids` all token ids, and `earlier` the begin
and end of every answer except the last one of each row. Each file has the values of one row after the other."""
_ROW = np.dtype([*((name, "<i4") for name in ("index", "prompt", "tokens", "earlier", "images")), ("digest", "<i4", 4)])
"""A row's fields: the index of its example, the length of its prompt, how many tokens, `earlier` entries and images it
has, and the digest of its images (zeros without images)."""
_CHUNK_TOKENS = 1 << 21
"""Number of tokens that `columns` reads at a time."""


class Columns(NamedTuple):
    """Consecutive rows, from row `first` on, as one array per column: int32, offsets int64. Row k of these has a prompt
    of `prompts[k]` tokens, the example `indices[k]` and the ids `ids[offsets[k] : offsets[k + 1]]`. Its answers before
    the last one begin and end at `earlier[earlier_offsets[k] : earlier_offsets[k + 1]]`."""

    first: int
    prompts: Any
    indices: Any
    offsets: Any
    ids: Any
    earlier_offsets: Any
    earlier: Any


class TokenStore(Sequence[Encoded]):
    """The rows of a folder that `merge` wrote, each read when it is accessed; a slice is a list of rows. Once the store
    is open, its folder may be removed. The images of the rows come from `source`. With `pairs`, the rows are pairs.

    Attributes:
        lengths: tokens of each row, int32.
        supervised, answers: `Encoded.supervised_tokens` and `Encoded.answer_tokens` of each row, int32; for a pair, the
            tokens of both answers, and those of the chosen one.
        longest: tokens of each row's longest sequence, int32: `lengths`, but for pairs without the shorter answer.
        examples: number of examples, which is smaller than the number of rows if some examples have several rows.
        pictured: indices of the rows that have images, in order, int64.
    """

    def __init__(
        self, folder: Path, fingerprint: str, source: ImageSource | None = None, *, pairs: bool = False
    ) -> None:
        self.fingerprint, self.source = fingerprint, source
        self.pairs = pairs
        self._maps = [_mapped(folder / name) for name in FILES]
        self._rows = np.frombuffer(self._maps[0], _ROW)
        self._ids, self._earlier = (np.frombuffer(data, "<i4") for data in self._maps[1:])
        self._offsets, self._earlier_offsets = (_offsets(self._rows[name]) for name in ("tokens", "earlier"))
        self.lengths = self._rows["tokens"].copy()
        self.answers = self.lengths - np.maximum(self._rows["prompt"], 1)
        sums = _offsets(self._earlier[1::2] - self._earlier[::2])
        self.supervised = self.answers + np.diff(sums[self._earlier_offsets // 2]).astype(np.int32)
        self.longest = self.lengths
        if pairs:
            self.longest = self.lengths - np.minimum(self.answers, self.supervised - self.answers)
            self.answers = self.supervised - self.answers
        indices = self._rows["index"]
        self.examples = len(indices) - int((indices[1:] == indices[:-1]).sum())
        self.pictured = np.flatnonzero(self._rows["images"])
        self._release_pages()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:
        rows = range(len(self))[index]
        return self.take(rows) if isinstance(rows, range) else self.take([rows])[0]

    def take(self, rows: Iterable[int]) -> list[Encoded]:
        """Return the rows with these indices (from 0), faster than one at a time."""
        places = np.fromiter(rows, np.int64)
        begins, ends = self._offsets[places].tolist(), self._offsets[places + 1].tolist()
        firsts, lasts = self._earlier_offsets[places].tolist(), self._earlier_offsets[places + 1].tolist()
        encoded, kind = [], Pair if self.pairs else Encoded
        for number, (index, prompt, _, _, count, digest) in enumerate(self._rows[places].tolist()):
            ids = self._ids[begins[number] : ends[number]].tolist()
            bounds = self._earlier[firsts[number] : lasts[number]].tolist()
            earlier = tuple(zip(bounds[::2], bounds[1::2], strict=True))
            images = RowImages(index, count, np.array(digest, "<i4").tobytes(), self.source) if count else None
            encoded.append(kind(index, ids, prompt, earlier, images))
        self._release_pages()
        return encoded

    def _release_pages(self) -> None:
        """Unmap the pages that were read. One access may map two megabytes, so a few hundred may map the whole file.

        The kernel keeps them in its page cache while there is room, so the next access costs only microseconds.
        """
        for data in self._maps:
            if isinstance(data, mmap.mmap):
                data.madvise(mmap.MADV_DONTNEED)

    def text_with(self, ids: Sequence[int]) -> int | None:
        """Among the rows without images, find the first that has one of these token ids. Return the index of its
        example; None if no row has one."""
        for columns in self.columns():
            places = np.flatnonzero(np.isin(columns.ids, ids))
            rows = np.unique(np.searchsorted(columns.offsets, places, side="right") - 1)
            rows = rows[~np.isin(rows + columns.first, self.pictured)]
            if len(rows):
                return int(columns.indices[rows[0]])
        return None

    def most_of(self, ids: Sequence[int]) -> Encoded:
        """Return the row in which the most tokens have one of these ids."""
        counts = [
            np.add.reduceat(np.isin(columns.ids, ids), columns.offsets[:-1], dtype=np.int64)
            for columns in self.columns()
        ]
        row: Encoded = self[int(np.concatenate(counts).argmax())]
        return row

    def image_hashes(self) -> np.ndarray:
        """For each row with images, return 64 bits of its images' digest, uint64."""
        return np.ascontiguousarray(self._rows["digest"][self.pictured, :2]).view(np.uint64)[:, 0]

    def of(self, index: int) -> list[Encoded]:
        """Return the rows of the example with this index in its split; an empty list if it was left out."""
        first, behind = (side(self, index, key=attrgetter("index")) for side in (bisect_left, bisect_right))
        return self[first:behind]

    def columns(self) -> Iterator[Columns]:
        """Yield the columns of all rows, some megabytes at a time: views of the files, valid until the next yield."""
        begin = 0
        while begin < len(self):
            most = self._offsets[begin] + _CHUNK_TOKENS
            end = max(int(np.searchsorted(self._offsets, most, side="right")) - 1, begin + 1)
            rows = self._rows[begin:end]
            offsets, earlier_offsets = (bounds[begin : end + 1] for bounds in (self._offsets, self._earlier_offsets))
            ids = self._ids[offsets[0] : offsets[-1]]
            earlier = self._earlier[earlier_offsets[0] : earlier_offsets[-1]]
            parts = offsets - offsets[0], ids, earlier_offsets - earlier_offsets[0], earlier
            yield Columns(begin, earlier[::2] if self.pairs else rows["prompt"], rows["index"], *parts)
            self._release_pages()
            begin = end

    def largest_id(self) -> int:
        """The largest token id of all examples."""
        return max((int(columns.ids.max()) for columns in self.columns()), default=0)

    def some(self, count: int = 4096) -> list[Encoded]:
        """Return all rows if there are at most `count`, otherwise about `count` of them: the first rows, rows spread
        over all the data, the longest rows, and the first rows with images."""
        if len(self) <= count:
            return self[:]
        first, spread = range(count // 8), range(0, len(self), -(-len(self) // count))
        longest = np.argpartition(self.lengths, -(count // 8))[-(count // 8) :]
        pictured = self.pictured[: count // 8]
        return self.take(sorted({*first, *spread, *longest.tolist(), *pictured.tolist()}))

    def extremes(self) -> list[Encoded]:
        """The longest row and, if rows have images, the first row with images."""
        return self.take([int(self.lengths.argmax()), *self.pictured[:1].tolist()] if len(self) else [])


@dataclasses.dataclass
class StoredEncoding(Encoding):
    """The encoding of a whole split, with its rows in files."""

    kept: TokenStore


def _mapped(path: Path) -> mmap.mmap | bytes:
    """The file's bytes, mapped into memory; b"" for an empty file, which cannot be mapped."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if path.stat().st_size else b""


def _offsets(counts: np.ndarray) -> np.ndarray:
    """Return where consecutive parts with these numbers of elements begin, and where the last one ends; int64."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def write_part(folder: Path, parts: Iterable[Encoding], split: str) -> Encoding:
    """Write encoded examples into a new folder for `merge`; return which examples were left out or truncated."""
    left_out = Encoding(split)
    folder.mkdir()
    with (folder / ROWS).open("wb") as rows, (folder / IDS).open("wb") as ids, (folder / EARLIER).open("wb") as earlier:
        for part in parts:
            rows.write(np.array([*map(_row, part.kept)], _ROW).tobytes())
            ids.write(np.array([*itertools.chain(*(row.input_ids for row in part.kept))], "<i4").tobytes())
            spans = itertools.chain(*(row.earlier for row in part.kept))
            earlier.write(np.array([*itertools.chain(*spans)], "<i4").tobytes())
            left_out.add(part)
    return left_out


def _row(row: Encoded) -> tuple[Any, ...]:
    images = row.images
    digest = np.frombuffer(images.digest, "<i4") if images else (0, 0, 0, 0)
    counts = len(row.input_ids), 2 * len(row.earlier), images.count if images else 0
    return (row.index, row.prompt_length, *counts, digest)


def merge(parts: Sequence[Path], folder: Path) -> str:
    """Write all parts, in order, into the files of `folder`. Return a SHA-256 of the rows (tokens, which of them are
    supervised, and images), which does not depend on how the rows are divided into parts."""
    for name in FILES:
        with (folder / name).open("wb") as merged:
            for part in parts:
                with (part / name).open("rb") as file:
                    shutil.copyfileobj(file, merged)
                heartbeat()
    rows = np.fromfile(folder / ROWS, _ROW)
    digests = [*_sha256s(rows["prompt"], rows["tokens"]), _sha256_of(folder / IDS)]
    if rows["earlier"].any():
        digests += [*_sha256s(rows["earlier"]), _sha256_of(folder / EARLIER)]
    if len(pictured := rows[rows["images"] > 0]):
        digests += _sha256s(np.column_stack([pictured["images"], pictured["digest"]]))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _sha256s(*columns: np.ndarray) -> list[bytes]:
    return [hashlib.sha256(np.ascontiguousarray(column, "<i4").tobytes()).digest() for column in columns]


def _sha256_of(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            heartbeat()
    return digest.digest()
