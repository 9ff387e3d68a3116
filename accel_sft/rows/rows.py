"""Reads rows of files as a sequence that holds no parsed rows: each row is parsed when it is used.

A source is a file or a folder (JSON, JSON Lines, CSV or Parquet, compressed or not), or a data set of the hub.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import functools
import hashlib
import itertools
import operator
import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

from accel_sft.api.errors import UserError
from accel_sft.rows.json_stream import ParsedRow
from accel_sft.rows.reading import MAX_PROBLEMS, read_dataset, read_file
from accel_sft.rows.row_file import UNREAD, Place, RowFile, more, named
from accel_sft.rows.sources import data_files, folder_of, is_dataset_name, row_names

_NAMED = 5
"""Maximum number of rows that a note names."""
_KEYS = 20
"""Maximum number of keys that the note on unread keys names."""
Row = TypeVar("Row")


class LeftOut(NamedTuple):
    """How many rows of a file the parser left out for one reason, and where the first of them stand."""

    reason: str
    rows: int
    places: list[Place]


@dataclasses.dataclass(eq=False, repr=False)
class Rows(Sequence[Row]):
    """The rows of one or more files, as a sequence that holds no parsed rows: each row is parsed when it is used.

    A slice is such a sequence too; `list(rows)` holds all parsed rows in memory.

    Attributes:
        notes: lines about the rows, shown at the start: what the parser noted, and what was left out.
    """

    name: str
    _files: tuple[RowFile, ...]
    _parsers: tuple[Callable[[dict[str, Any]], Row | ParsedRow], ...]
    _chosen: range | array.array[int]
    notes: list[str] = dataclasses.field(default_factory=list)
    _given: tuple[tuple[str, int], ...] = ()
    """Each name that `read_rows` was given, and its number of files."""

    def __post_init__(self) -> None:
        self._ends = [0]
        for file in self._files:
            self._ends.append(self._ends[-1] + len(file))

    @property
    def files(self) -> list[str]:
        """The files' names."""
        return [file.name for file in self._files]

    @property
    def sha256s(self) -> list[tuple[str, str]]:
        """The files' names, each with the SHA-256 of its content."""
        return [(file.name, file.sha256) for file in self._files]

    @property
    def sources(self) -> list[str]:
        """The files, folders and data sets that `read_rows` was given, each path shortened to the last parts
        that keep the names distinct."""
        paths = [Path(name) for name, _ in self._given]
        for parts in itertools.count(1):
            names = ["/".join(path.parts[-parts:]) or str(path) for path in paths]
            if len(set(names)) == len(set(paths)):
                break
        return names

    def sources_of(self, indices: Sequence[int]) -> list[int]:
        """The source of each of these rows, by its index in `sources`."""
        of_file = [source for source, (_, files) in enumerate(self._given) for _ in range(files)]
        return [of_file[file] for file, _ in map(self._file_of, indices)]

    def shares_rows(self, other: Any) -> bool:
        """Whether `other` is from the same `read_rows` and has some of these rows. If so, the task deliberately
        evaluates on rows that it trains on, and its notes say so."""
        return isinstance(other, Rows) and other._files is self._files and not {*self._chosen}.isdisjoint(other._chosen)

    def places(self, indices: Sequence[int]) -> list[Place]:
        """The places of the rows with these indices."""
        return [self._files[file].place(row) for file, row in map(self._file_of, indices)]

    def left_out(self) -> list[LeftOut]:
        """Return what the parser left out, by file and reason."""
        return [
            LeftOut(reason, count, [file.place_at(number) for number in numbers])
            for file in self._files
            for reason, (count, numbers) in file.left_out.items()
        ]

    def held_out(self, rows: int, seed: int) -> tuple[Rows[Row], Rows[Row]]:
        """Split the rows in two: the rows to train on, and about `rows` held-out rows, drawn at random with `seed`.

        All rows of a group (`ParsedRow.group`) stay on one side. So fewer than `rows` may be held out, or more if
        every group has more than `rows` rows. Raises UserError if there is only one group.
        """
        import numpy as np  # not at the top: authors of tasks import this module

        every = itertools.chain.from_iterable(file.groups() for file in self._files)
        groups = np.fromiter(every, np.uint32, self._ends[-1])[np.asarray(self._chosen)]
        # multiply-shift hashing, because groups are hashes: a group's number does not depend on the other rows
        factor = np.uint64(random.Random(seed).getrandbits(64) | 1)
        drawn = (groups.astype(np.uint64) * factor) >> np.uint64(32)
        is_out = drawn < np.sort(drawn)[rows] if len(drawn) > rows else np.ones(len(drawn), dtype=bool)
        if not is_out.any():
            _, group_of, sizes = np.unique(drawn, return_inverse=True, return_counts=True)
            is_out = group_of == sizes.argmin()
        if is_out.all():
            raise UserError(
                f"{self.name}: all rows are of one group, such as one prompt, so none can be held out; give a separate "
                "file of validation rows"
            )
        train, out = self._only(~is_out), self._only(is_out)
        return train, dataclasses.replace(out, notes=[])

    def sample(self, rows: int) -> Rows[Row]:
        """Return a random sample of `rows` rows, in their order. It is the same each time, and a part of any larger
        sample."""
        import numpy as np

        drawn = np.random.Generator(np.random.Philox(0)).permutation(len(self))
        return self._only(np.sort(drawn[:rows]))

    def _only(self, which: Any) -> Rows[Row]:
        """The rows at these indices, or where an array of booleans is true."""
        import numpy as np

        chosen = np.asarray(self._chosen, dtype=np.int64)[which]
        return dataclasses.replace(self, _chosen=array.array("q", chosen.tobytes()), notes=list(self.notes))

    def _file_of(self, index: int) -> tuple[int, int]:
        """The number of a row's file (from 0), and the row's index in it."""
        row = self._chosen[index]
        number = bisect.bisect_right(self._ends, row) - 1
        return number, row - self._ends[number]

    @property
    def fingerprint(self) -> str | None:
        """A text that is the same for the same rows and parser; None if the parser has no `code_fingerprint`."""
        contents = [file.content for file in self._files if file.content]
        if len(contents) < len(self._files):
            return None
        chosen = self._chosen
        if isinstance(chosen, range):
            described = f"{chosen.start} {chosen.step} {len(chosen)}"
        else:
            described = hashlib.sha256(chosen.tobytes()).hexdigest()
        return f"{' '.join(contents)} {described}"

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Rows[Row]:
        if isinstance(index, slice):
            return dataclasses.replace(self, _chosen=self._chosen[index])
        file, row = self._file_of(index)
        parsed = self._parsers[file](self._files[file].row(row))
        return parsed.example if isinstance(parsed, ParsedRow) else parsed

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, Rows)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    def __repr__(self) -> str:
        return f"<{len(self):,} rows of {self.name}>"


def read_rows(
    path: str | Path, parse: Callable[..., Row | ParsedRow], *, with_folder: bool = False, split: str = "train"
) -> Rows[Row]:
    """Read and check the rows of a file, or of all data files in a folder.

    Args:
        path: a file of any format in READERS, compressed or not; FOLDER or FOLDER:SPLIT; or a data set of the Hugging
            Face hub: ORG/NAME, ORG/NAME:SPLIT or ORG/NAME:CONFIG:SPLIT. Several, joined by commas, are read in order.
        parse: turns an object into an example (or a ParsedRow), raises RowProblem for a malformed object and RowLeftOut
            for a useless one. It must be pure: it is called at each use of a row. In CSV rows, all values are text.
        with_folder: whether `parse` has an argument `folder`, to which paths in a row are relative: the folder `path`,
            or the folder that the file `path` is in.
        split: "train" or "validation": the split of a folder or data set to read if there are several and `path` names
            none; a note says which was read. For "validation" this may be the split test.
    Raises:
        UserError: a file cannot be read, has no rows, or has bad rows (up to twenty are listed, with line and field).
    """
    read: list[RowFile] = []
    parsers, given = [], []
    problems: list[str] = []
    lines: list[str] = []
    for name in row_names(path):
        folder, of_folder = folder_of(name) or (os.path.dirname(name), None)
        parser = functools.partial(parse, folder=folder) if with_folder else parse
        from_hub = functools.partial(read_dataset, use=split, lines=lines)
        reader = from_hub if is_dataset_name(str(name)) else read_file
        files, beside = ([name], []) if of_folder is None else data_files(Path(folder), of_folder, split)
        lines += beside
        of_name, refused = _read_files(files, reader, parser, lines, problems)
        if refused and of_name:
            problems.append(f"{folder}: if {', '.join(refused)} is not data, remove it, or name the files to read")
        read += of_name
        parsers += [parser] * len(of_name)
        given.append((str(name), len(of_name)))
    if problems:
        raise UserError(*problems)
    notes = lines + _notes(read)
    rows = Rows(str(path), tuple(read), tuple(parsers), range(sum(map(len, read))), notes, tuple(given))
    if not len(rows):
        raise UserError(*rows.notes, f"{path}: no row is left to use")
    return rows


def _read_files(
    files: Sequence[Any],
    reader: Callable[..., RowFile],
    parser: Callable[..., Any],
    lines: list[str],
    problems: list[str],
) -> tuple[list[RowFile], list[str]]:
    """Return the files of one name, except those with the same rows as an earlier file, and the names of refused files.
    Adds to `lines` and `problems`; raises the problems as soon as there are MAX_PROBLEMS."""
    of_name: list[RowFile] = []
    refused: list[str] = []
    alike: dict[bytes, RowFile] = {}
    for file in files:
        try:
            of_file = reader(file, parser)
            groups = array.array("I", of_file.groups() if len(files) > 1 else ()).tobytes()
            earlier = alike.setdefault(groups, of_file) if groups else of_file
            if earlier is not of_file and all(of_file.row(n) == earlier.row(n) for n in range(len(of_file))):
                lines.append(f"{file}: not read (the same rows as in {earlier.name})")
            else:
                of_name.append(of_file)
        except UserError as error:
            problems += error.problems
            refused.append(file.name)
        if len(problems) >= MAX_PROBLEMS:
            raise UserError(*problems)
    return of_name, refused


def example_name(examples: Sequence[Any], split: str, index: int) -> str:
    """An example as messages name it: "train example 5", with its file and line where they are known."""
    place = f" ({examples.places([index])[0]})" if isinstance(examples, Rows) else ""
    return f"{split} example {index}{place}"


def with_places(lines: Sequence[str], examples: Sequence[Any], split: str) -> list[str]:
    """Return the lines; to those that begin like "train example 5:", add the file and line of the example."""
    if not isinstance(examples, Rows):
        return list(lines)

    def placed(match: re.Match[str]) -> str:
        return example_name(examples, split, int(match[1]))

    return [re.sub(rf"^{split} example (\d+)(?=:)", placed, line) for line in lines]


def _notes(files: Sequence[RowFile]) -> list[str]:
    """A line for each note of the parser, and for each reason why rows were left out."""
    lines, unread = [], list[tuple[int, str]]()
    total = sum(len(file) + sum(count for count, _ in file.left_out.values()) for file in files)
    for verb, tallies in (("", [file.noted for file in files]), ("left out: ", [file.left_out for file in files])):
        for what in dict.fromkeys(what for tally in tallies for what in tally):
            count = sum(tally[what][0] for tally in tallies if what in tally)
            if what.startswith(UNREAD):
                unread.append((count, what.removeprefix(UNREAD)))
                continue
            places = [
                (file, at) for file, tally in zip(files, tallies, strict=True) for at in tally.get(what, [0, []])[1]
            ]
            named = "" if 2 * count > total else f" ({_named(files, places, count)})"
            lines.append(f"{count:,} row{'s' * (count != 1)} {verb}{what}{named}")
    groups = itertools.groupby(unread[:_KEYS], operator.itemgetter(0))
    keys = [f"{', '.join(key for _, key in group)} ({n:,} row{'s' * (n != 1)})" for n, group in groups]
    return [*lines, UNREAD + ", ".join(keys) + more(max(len(unread) - _KEYS, 0))] if unread else lines


def _named(files: Sequence[RowFile], places: Sequence[tuple[RowFile, int]], count: int) -> str:
    if len(files) == 1:
        return named([number for _, number in places], count, files[0].has_lines)
    first = places[:_NAMED]
    return ", ".join(str(file.place_at(number)) for file, number in first) + more(count - len(first))
