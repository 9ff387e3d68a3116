"""A split's tokens: made once by all ranks of a machine together, kept by content, and the same on every rank."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.data import cache
from accel_sft.data.chat import Encoded, Encoding, Rules, encode_parts
from accel_sft.data.token_key import decided_without_examples, token_key
from accel_sft.data.token_store import TokenStore, merge, write_part
from accel_sft.io import manifest
from accel_sft.io.terminal import terminal
from accel_sft.launch.collectives import Result, Team

KIND, FILE = "tokens", "tokens.arrow"
_COMPARED = 32
"""Examples that are tokenized on every start, to see that the kept tokens are still what the task makes of them."""
_ANNOUNCED = 50_000
"""Examples from which tokenizing takes so long that a line says what is waited for."""


class SplitEncoder:
    """Encodes a task's splits as `chat.encode` does, on all ranks of a machine together, and once for all runs.

    `kept` is a TokenStore, so memory does not grow with the data. Where the cache cannot be written, the tokens are in
    a temporary file for this run alone. Making and calling one are collectives.
    """

    def __init__(self, accelerator: Accelerator, tokenizer: Any, task: Task, rules: Rules) -> None:
        self.team = Team(accelerator)
        self.tokenizer, self.task, self.rules = tokenizer, task, rules
        self._decided = decided_without_examples(tokenizer, rules)

    def __call__(self, examples: Sequence[Any], split: str) -> Encoding:
        """A split's tokens from the cache, or made and put there.

        Raises:
            UserError: what `chat.encode` raises, for the lowest example, on every rank; examples that differ between
                ranks, or from one call of the task's methods to the next.
        """
        team = self.team
        keys = team.all(lambda: self.key(examples, split))
        if len(set(keys)) > 1:  # a fingerprint that is drawn at random, where none could be computed, or other examples
            keys = team.all(lambda: self.key(examples, split, read=True))
        if len(set(keys)) > 1:
            raise UserError(
                "ranks got different examples from dataset() (a set's order, an unseeded random?), or run different "
                "versions; make it a pure function, and the machines alike"
            )
        key = keys[0]
        found = team.firsts(lambda: cache.find(KIND, key))
        if all(found):
            folder, about = found[team.rank]
            encoding = self._opened(folder, about, split)
            if all(team.all(lambda: self._agrees(encoding, examples))):
                encoding.told.append(f"{split}: {len(encoding.kept):,} examples, tokens from the cache")
                return encoding
            cache.log(f"{folder}: not what the task makes of its rows now; it is made again")
            team.firsts(lambda: cache.discard(KIND, key))
        if len(examples) >= _ANNOUNCED and team.is_main:
            print(f"{split}: tokenizing {len(examples):,} examples, once", file=terminal(), flush=True)
        encoding = self._made(examples, split, key)
        if not all(team.all(lambda: self._agrees(encoding, examples))):
            raise UserError(
                f"{split}: the task's messages() and target() gave something else the second time; make them pure "
                "functions of the example and the options"
            )
        return encoding

    def key(self, examples: Sequence[Any], split: str, *, read: bool = False) -> str:
        """The entry's name in the cache; `read`: every message and target is read, no fingerprint is used."""
        return token_key(self._decided, self.task, examples, split, read=read)

    def _agrees(self, encoding: Encoding, examples: Sequence[Any]) -> bool:
        """Whether the tokens are what this very process makes of some of the examples."""
        some = range(0, len(examples), -(-len(examples) // _COMPARED))
        parts = encode_parts(self.tokenizer, self.task, examples, some, encoding.split, self.rules)
        stored = (encoding.kept.find(index) for index in some)
        return [example for part in parts for example in part.kept] == [example for example in stored if example]

    def _opened(self, folder: Path, about: dict[str, Any], split: str) -> Encoding:
        stores: list[TokenStore] = []

        def read() -> None:
            try:
                stores.append(TokenStore(folder / FILE, about["fingerprint"]))
            except OSError as error:
                raise UserError(f"{folder}: cannot be read any more ({error}); start again") from None

        self.team.all(read)
        return Encoding(split, stores[0], about["left_out"], about["cut"])

    def _made(self, examples: Sequence[Any], split: str, key: str) -> Encoding:
        """Tokenized into the cache or, where a machine's cannot be written, into temporary files."""
        try:
            return self._made_in(lambda: cache.partial(KIND), examples, split, key)
        except _Unwritable as problem:
            told = f"{split}: tokens cannot be kept in {cache.where()} ({problem}); they are made for this run only"
        try:
            encoding = self._made_in(lambda: Path(tempfile.mkdtemp(prefix="accel_sft-")), examples, split, None)
        except _Unwritable as problem:
            raise UserError(told, f"nor in {tempfile.gettempdir()} ({problem}): free space in one of the two") from None
        encoding.told.append(told)
        return encoding

    def _made_in(self, place: Callable[[], Path], examples: Sequence[Any], split: str, key: str | None) -> Encoding:
        """Tokenized into a folder from `place`, which takes its name in the cache if there is a key, else is removed.

        Raises:
            _Unwritable: on every rank, if one could not write.
        """
        team = self.team
        folders = team.firsts(_writing(place))
        folder = folders[team.rank]
        try:
            _written(folders)
            shares = _written(team.all(_writing(lambda: self._share(folder, examples, split))))
            whole = Encoding(split, [], {}, [])
            for rank in team.here:
                whole.note(shares[rank][0])
            whole.check(sum(shares[rank][1] for rank in team.here), self.rules)

            def merged() -> tuple[Path, dict[str, Any]]:
                parts = [folder / f"part-{number}" for number in range(len(team.here))]
                about = {"left_out": whole.left_out, "cut": whole.cut, "fingerprint": merge(parts, folder / FILE)}
                for part in parts:
                    part.unlink()
                if key is None:
                    return folder, about
                manifest.write(folder, about)
                return cache.publish(folder, KIND, key), about

            return self._opened(*_written(team.firsts(_writing(merged)))[team.rank], split)
        finally:  # what has its name by now is not there any more under this one
            if team.rank == team.first and isinstance(folder, Path):
                shutil.rmtree(folder, ignore_errors=True)

    def _share(self, folder: Path, examples: Sequence[Any], split: str) -> tuple[Encoding, int]:
        """Write this rank's contiguous share; what was left out of it, and how many examples were not."""
        ranks, place = len(self.team.here), self.team.rank - self.team.first
        indices = range(len(examples) * place // ranks, len(examples) * (place + 1) // ranks)
        left_out = Encoding(split, [], {}, [])

        def parts() -> Iterator[Sequence[Encoded]]:
            for part in encode_parts(self.tokenizer, self.task, examples, indices, split, self.rules):
                left_out.note(part)
                yield part.kept
                if any((folder / f"failed-{lower}").exists() for lower in range(place)):
                    return  # a lower example's error is what will be told

        try:
            return left_out, write_part(folder / f"part-{place}", parts())
        except UserError:
            with contextlib.suppress(OSError):
                (folder / f"failed-{place}").touch()
            raise


class _Unwritable(Exception):
    """Why a file could not be written."""


def _writing(work: Callable[[], Result]) -> Callable[[], Result | _Unwritable]:
    """`work`, which gives the reason where it cannot write: to be told to all ranks before one of them raises it."""

    def tried() -> Result | _Unwritable:
        try:
            return work()
        except OSError as error:
            return _Unwritable(error.strerror or str(error))

    return tried


def _written(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, _Unwritable):
            raise result
    return results
