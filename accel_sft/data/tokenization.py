"""Tokenizes a split once for all runs, on all ranks of a machine together; every rank gets the same tokens.

A split's key in the cache is a hash of everything that decides its tokens.
"""

import contextlib
import copy
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import conversation
from accel_sft.chat.encode import OnRefused, encode_parts
from accel_sft.chat.encoded import Encoding, Rules
from accel_sft.chat.image_inputs import ImageInputs, ImageSource, no_processor
from accel_sft.chat.rendering import Rendering
from accel_sft.data.token_store import StoredEncoding, TokenStore, merge, write_part
from accel_sft.io import cache
from accel_sft.io.terminal import terminal
from accel_sft.launch.collectives import Team
from accel_sft.rows.fingerprint import code_fingerprint
from accel_sft.rows.rows import with_places

KIND = "tokens"
_KEPT_BESIDE_TOKENS = "left_out", "cut", "raw", "windowed", "unpaired", "control_tokens"
"""Fields of an Encoding that are kept beside its tokens."""
_COMPARED = 32
"""Maximum number of examples that each start or resume tokenizes again, to compare the tokens with the cached ones."""
_ANNOUNCED = 50_000
"""Minimum number of examples for a line that announces that they are being tokenized."""


class SplitEncoder:
    """Encodes a task's splits as `encode_parts` does, on all ranks of a machine together, and once for all runs.

    The tokens are in a TokenStore, so memory does not grow with the data. All ranks must construct and call an encoder
    together. `processor` is called when an example has images; it returns the model's processor or raises UserError.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        tokenizer: Any,
        task: Task,
        rules: Rules,
        processor: Callable[[], Any] = no_processor,
    ) -> None:
        self.team = Team(accelerator)
        self.task, self.rules, self.images = task, rules, ImageInputs(processor)
        self.rendering = Rendering(tokenizer, rules.thinking, rules.day, rules.control_tokens)
        self._returned_notes = 0
        self._decided = decided_without_examples(tokenizer, rules)

    def __call__(self, examples: Sequence[Any], split: str) -> StoredEncoding:
        """Return a split's tokens from the cache, or make them now and cache them. Every rank raises the error of the
        first bad example. Ranks must have equal examples, and the task's methods must return the same each time."""
        team = self.team
        keys = team.all(lambda: self.key(examples, split))
        if len(set(keys)) > 1:  # `datasets` draws a random fingerprint if it cannot compute one
            keys = team.all(lambda: self.key(examples, split, read=True))
        if len(set(keys)) > 1:
            raise UserError(
                "ranks got different examples from dataset(), or run different versions; make dataset() pure (no order "
                "of sets, no unseeded random), and install equal versions"
            )
        key = keys[0]
        entries = team.firsts(lambda: cache.find(KIND, key))
        if all(entries):
            folder, about = entries[team.rank]
            encoding = self._opened(folder, about, examples, split)
            if all(team.all(lambda: self._agrees(encoding, examples) and self._sees_the_same(encoding))):
                encoding.notes.append(f"{split}: {encoding.kept.examples:,} examples, tokens from the cache")
                return self._with_notes(encoding)
            cache.log(f"{folder}: the task now makes other examples from its rows; they are tokenized again")
            team.firsts(lambda: cache.discard(KIND, key))
        if len(examples) >= _ANNOUNCED and team.is_main:
            print(f"{split}: tokenizing {len(examples):,} examples, once", file=terminal(), flush=True)
        encoding = self._made(examples, split, key)
        if not all(team.all(lambda: self._agrees(encoding, examples))):
            raise UserError(
                f"{split}: the task's messages() and target() returned something else on a second call; make them pure "
                "functions of example and options"
            )
        return self._with_notes(encoding)

    def of_pairs(self) -> "SplitEncoder":
        """Return an encoder that makes examples into pairs, with their rejected answers."""
        encoder = copy.copy(self)
        encoder.rules = dataclasses.replace(self.rules, pairs=True)
        encoder._decided = [*self._decided, "pairs"]
        return encoder

    def _with_notes(self, encoding: StoredEncoding) -> StoredEncoding:
        """Return the encoding with the notes of its examples, and with the rendering's notes since the last split."""
        encoding.notes[:0] = [f"{encoding.split}: {note}" for note in getattr(encoding.examples, "notes", ())]
        encoding.notes += self.rendering.notes[self._returned_notes :]
        self._returned_notes = len(self.rendering.notes)
        rows, examples = len(encoding.kept), encoding.kept.examples
        if encoding.windowed:
            encoding.notes.append(
                f"{encoding.split}: {len(encoding.windowed):,} texts above --max-length become windows that overlap by "
                "one token, so that each token is learnt once"
            )
        elif rows > examples:
            encoding.notes.append(
                f"{encoding.split}: {examples:,} examples make {rows:,} rows: the chat template writes an answer "
                "differently once other turns follow"
            )
        return encoding

    def key(self, examples: Sequence[Any], split: str, *, read: bool = False) -> str:
        """Return the name of the cache entry: a hash of the fingerprints of `examples` and of the task's code, if both
        are known; otherwise, or with `read`, a hash of every message and target."""
        of_datasets = type(examples).__module__.partition(".")[0] == "datasets"
        fingerprint = getattr(examples, "_fingerprint" if of_datasets else "fingerprint", None)
        code = code_fingerprint(self.task) if fingerprint and isinstance(fingerprint, str) and not read else None
        content = hashlib.sha256(f"{fingerprint} {code}".encode() if code else b"")
        if not code:
            for index in range(len(examples)):
                content.update(json.dumps(conversation(self.task, examples, split, index), default=repr).encode())
        parts = [self._decided, len(examples), content.hexdigest()]
        return _sha256(json.dumps(parts, sort_keys=True).encode())[:32]

    def parts(
        self,
        examples: Sequence[Any],
        indices: Sequence[int],
        split: str,
        rules: Rules | None = None,
        on_refused: OnRefused | None = None,
    ) -> Iterator[Encoding]:
        """Encode some of a split's examples with `encode_parts`, by the run's rules unless `rules` are given."""
        rules = rules or self.rules
        return encode_parts(self.rendering, self.task, examples, indices, split, rules, self.images, on_refused)

    def leniently(self, examples: Sequence[Any], split: str, folder: Path, on_refused: OnRefused) -> Encoding:
        """Encode a split for an audit, in one process and without the cache, and leave out examples that would stop
        training. The result is a StoredEncoding in `folder`; if no example remains, an Encoding."""
        refused = []

        def refuse(index: int, error: UserError) -> None:
            refused.append(index)
            on_refused(index, error)

        part, indices = folder / "part-0", range(len(examples))
        encoding = write_part(part, self.parts(examples, indices, split, on_refused=refuse), split)
        if len(refused) + sum(map(len, encoding.left_out.values())) == len(examples):
            return encoding
        about = {name: getattr(encoding, name) for name in _KEPT_BESIDE_TOKENS}
        about["fingerprint"] = merge([part], folder)
        return self._with_notes(self._opened(folder, about, examples, split))

    def _agrees(self, encoding: StoredEncoding, examples: Sequence[Any]) -> bool:
        """Whether some of the examples, tokenized again by this process, give the stored tokens."""
        some = range(0, len(examples), -(-len(examples) // _COMPARED))
        stored = [row for index in some for row in encoding.kept.of(index)]
        return [row for part in self.parts(examples, some, encoding.split) for row in part.kept] == stored

    def _sees_the_same(self, encoding: StoredEncoding) -> bool:
        """Whether all images in this rank's share of the rows are unchanged: a file may change and keep its name."""
        ranks, place = len(self.team.local_ranks), self.team.rank - self.team.first
        kept, source = encoding.kept, encoding.kept.source
        pictured = (kept[row].images for row in kept.pictured[place::ranks].tolist())
        return all(source.is_as_before(images) for images in pictured if source and images)

    def _opened(self, folder: Path, about: dict[str, Any], examples: Sequence[Any], split: str) -> StoredEncoding:
        encodings = []

        def read() -> None:
            try:
                source = ImageSource(self.images, self.task, examples, split)
                store = TokenStore(folder, about["fingerprint"], source, pairs=self.rules.pairs)
            except OSError as error:
                raise UserError(f"{folder}: can no longer be read ({error}); start again") from None
            beside = {name: about[name] for name in _KEPT_BESIDE_TOKENS}
            encodings.append(StoredEncoding(split, store, **beside, examples=examples))

        self.team.all(read)
        return encodings[0]

    def _made(self, examples: Sequence[Any], split: str, key: str) -> StoredEncoding:
        """Tokenize a split into the cache of each machine, and return the encoding."""
        team = self.team
        with contextlib.ExitStack() as stack:

            def entered() -> Path:
                with _writes():
                    return stack.enter_context(cache.partial(KIND))

            folder = team.firsts(entered)[team.rank]
            shares = team.all(lambda: self._share(folder, examples, split))
            encoding = Encoding(split, examples=examples)
            for rank in team.local_ranks:
                encoding.add(shares[rank])
            encoding.check(len(examples), self.rules)

            def merged() -> tuple[Path, dict[str, Any]]:
                parts = [folder / f"part-{number}" for number in range(len(team.local_ranks))]
                about = {name: getattr(encoding, name) for name in _KEPT_BESIDE_TOKENS}
                with _writes():
                    about["fingerprint"] = merge(parts, folder)
                    for part in parts:
                        shutil.rmtree(part)
                    return cache.publish(folder, KIND, key, about), about

            folder, about = team.firsts(merged)[team.rank]
            return self._opened(folder, about, examples, split)

    def _share(self, folder: Path, examples: Sequence[Any], split: str) -> Encoding:
        """Write the tokens of this rank's contiguous share of examples; return which were left out or truncated."""
        ranks, place = len(self.team.local_ranks), self.team.rank - self.team.first
        indices = range(len(examples) * place // ranks, len(examples) * (place + 1) // ranks)
        try:
            with _writes():
                return write_part(folder / f"part-{place}", self.parts(examples, indices, split), split)
        except UserError as error:
            raise UserError(*with_places(error.problems, examples, split)) from error


@contextlib.contextmanager
def _writes() -> Iterator[None]:
    """Turn an error in writing to the cache into a UserError."""
    try:
        yield
    except OSError as error:
        where = f"{cache.folder()} ({error.strerror or error}, on {socket.gethostname()})"
        raise UserError(f"tokens cannot be written to {where}; set ACCEL_SFT_CACHE to another folder") from error


def decided_without_examples(tokenizer: Any, rules: Rules) -> list[Any]:
    """Return everything that decides the tokens, except for the examples, as JSON values."""
    own = code_fingerprint(encode_parts)
    if own is None:  # without the fingerprint, tokens of an earlier version would be used
        raise UserError("some files of accel_sft cannot be read, or are not plain files; install accel_sft again")
    cls, template = type(tokenizer), json.dumps(tokenizer.chat_template)
    model_code = None
    if not cls.__module__.startswith("transformers."):  # the tokenizer's code came with the model
        model_code = _files(Path(sys.modules[cls.__module__].__file__ or "").parent.glob("*.py"))
    return [
        {name: importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")},
        own,
        [cls.__qualname__, model_code, _vocabulary(tokenizer), tokenizer.eos_token_id],
        [template, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}],
        getattr(tokenizer, "split_special_tokens", None),
        (rules.day or datetime.date.today().isoformat()) if "strftime_now" in template else None,  # e.g. Llama's
        [sorted(rules.eos_ids), rules.max_length, rules.truncation, rules.thinking, rules.control_tokens],
    ]


def _vocabulary(tokenizer: Any) -> str:
    if getattr(tokenizer, "is_fast", False):
        return _sha256(tokenizer.backend_tokenizer.to_str().encode())
    with tempfile.TemporaryDirectory() as folder:  # a tokenizer in Python: its saved files decide the tokens
        tokenizer.save_pretrained(folder)
        return _files(Path(folder).rglob("*"))


def _files(paths: Iterable[Path]) -> str:
    return _sha256(b"".join(path.name.encode() + path.read_bytes() for path in sorted(paths) if path.is_file()))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
