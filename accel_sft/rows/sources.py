"""Finds what an option's names stand for: files, folders with the split of each file, and data sets of the hub."""

from __future__ import annotations

import contextlib
import difflib
import glob
import itertools
import mimetypes
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.rows.formats import COMPRESSIONS, READERS, format_of, is_data_file
from accel_sft.rows.row_file import more

_NO_DATA = re.compile(r"\..*|config\.json|dataset_(dict|infos?)\.json|state\.json|cache-\w+\.arrow")
"""Names of hidden files, and of files in a data set that hold no rows, or only copies of rows."""
_USUAL = {"train": ["train"], "validation": ["validation", "test"]}
"""For each use: the splits to look for if none is named; the first that exists is read."""
_WORDS = {
    "validation": "validation|valid|dev|val",
    "test": "tests?|testing|evals?|evaluation|hold[-_ ]?outs?|held[-_ ]?out",
    "train": "train|training",
}
_IN_NAME = {
    split: re.compile(rf"(^|[-._ =0-9])({words})(sets?|data|split)?([-._ =0-9]|$)", re.IGNORECASE)
    for split, words in _WORDS.items()
}
"""Finds each split in names of files and folders, as `datasets` does (data_files.py), but also after "=", or
before "set" or "data" as in testset. Names of held-out data count as test, so that nobody trains on such data."""
_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")
"""Where a capital letter begins a new word, as in TestData."""
_SHARD = re.compile(r"data/(.+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
"""Names of data files in data sets of the hub. If a folder has such files, only these belong to splits."""

_SPLIT = r"[\w.-]+(\[[\d%:-]+\])?"
_NAME = re.compile(
    rf"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w.-]+))?(:(?P<config>[\w.-]+)(?=:))?(:(?P<split>{_SPLIT}))?"
)
EXPECTED = "a JSON, JSONL, CSV, Parquet or text file"


def row_names(names: str | Path) -> list[Path]:
    """Return the files, folders and data sets of the hub that an option names, with commas between several."""
    parts = str(names).split(",")
    if not all(parts):
        raise UserError(
            f"{str(names)!r}: has an empty name; give a file, a folder or a data set, with commas between several"
        )
    return [Path(os.path.expanduser(part)) for part in parts]


def absent_rows(names: str, flag: str) -> list[str]:
    """Return a line for each file or folder that an option names and that does not exist."""
    try:
        paths = row_names(names)
    except UserError as error:
        return [f"{flag} {line}" for line in error.problems]
    lines = []
    for name in paths:
        try:
            if not (is_dataset_name(str(name)) or folder_of(name)):
                os.stat(name)
        except OSError as error:
            folder = Path(name).parent
            beside = [path.name for path in itertools.islice(folder.glob("*"), 1000)]
            near = difflib.get_close_matches(Path(name).name, beside, n=1)
            hint = f"; did you mean {folder / near[0]}?" if near else ""
            lines.append(f"{flag} {name}: {unreadable(error)}{hint}")
    return lines


def unreadable(error: OSError) -> str:
    """Say that a file cannot be opened, why, and what to do."""
    return f"cannot be read ({error.strerror}); name {EXPECTED} that exists"


def folder_of(name: str | Path) -> tuple[str, str] | None:
    """The folder that FOLDER or FOLDER:SPLIT names, and the split or ""; None if there is no such folder."""
    if os.path.exists(name):
        return (str(name), "") if os.path.isdir(name) else None
    folder, _, split = str(name).rpartition(":")
    return (folder, split) if split and os.path.isdir(folder) else None


def chosen_split(name: str, splits: Collection[str], use: str) -> tuple[str, list[str]]:
    """Return the split of `name` to read for `use` (train or validation), and a line on other splits, if any."""
    usual = [split for split in _USUAL.get(use, [use]) if split in splits] or ["train"] * ([*splits] == ["train"])
    others = [split for split in splits if split not in usual[:1]]
    if not usual:
        near = next((split for split in others if split.startswith(use)), others[0])
        raise UserError(f"{name}: has no split {use}, but {', '.join(others)}; name one: {name}:{near}")
    if not others or use == "validation":
        return usual[0], [f"{name}: the split {usual[0]} is read"] * bool(others)
    advice = f"to evaluate: --validation-file {name}:{min(others, key='validation'.__ne__)}"
    return usual[0], [f"{name}: the split {usual[0]} is read, not {' or '.join(others)}; {advice}"]


def data_files(folder: Path, split: str = "", use: str = "train") -> tuple[list[Path], list[str]]:
    """Return the data files of one split of a folder (with its subfolders), and lines about files that are not read.

    Data files are all files but hidden ones and those that describe a data set. Links are followed, and each folder is
    read once. Texts (.txt) are data only if there is no other data; a README.md is never data. If `split` is "", `use`
    ("train" or "validation") decides.
    """
    paths, others = _all_files(folder)
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    if (folder / "dataset_dict.json").is_file():  # written by `save_to_disk`
        exact = {name: name.partition("/")[0] for name in names if "/" in name}
    else:
        exact = {name: shard[1] for name in names if (shard := _SHARD.fullmatch(name))}
    configs = _configurations(folder / "README.md")
    by_card = _by_card(folder, names, configs)
    exact = by_card or exact
    splits: dict[str, list[Path]] = {}
    for name, path in names.items():
        splits.setdefault(exact.get(name, "") if exact else _split_by_name(name), []).append(path)
    beside, lines = splits.pop("", []), list[str]()
    if not split:
        split, lines = chosen_split(str(folder), sorted(splits), use)
    if split not in splits:
        raise UserError(f"{folder}: has no split {split}; it has {', '.join(sorted(splits))}")
    if beside:
        lines.append(f"{folder}: not read (in none of its splits): {beside[0].name}{more(len(beside) - 1)}")
    if others:
        lines.append(f"{folder}: not read (unknown format): {others[0].name}{more(len(others) - 1)}")
    if any("data_files" in config for config in configs) and not by_card:
        lines.append(f"{folder}/README.md: the files that it names do not exist; file names decide the splits")
    if len(configs) > 1:
        configurations = ", ".join(str(config.get("config_name")) for config in configs)
        lines.append(f"{folder}: all its configurations are read: {configurations}; for one, name its files or folder")
    return splits[split], lines


def _by_card(folder: Path, names: Collection[str], configs: list[dict[str, Any]]) -> dict[str, str]:
    """Return the splits of the files for which the folder's card (README.md) names one, by the files' names."""
    exact: dict[str, str] = {}
    for pattern, split in _splits_by_card(configs):
        for name in {*glob.glob(pattern, root_dir=folder, recursive=True)}.intersection(names):
            if (other := exact.setdefault(name, split)) != split:
                problem = f"lists {name} in two splits, {other} and {split}"
                raise UserError(f"{folder}/README.md: {problem}; name the files of one configuration")
    return exact


def _configurations(card: Path) -> list[dict[str, Any]]:
    """The configurations that a folder's card describes; none if the file is no card, or not YAML."""
    head = re.match(r"---\n(.*?)\n---", card.read_text(errors="replace"), re.DOTALL) if card.is_file() else None
    if not head or "configs" not in head[1]:
        return []
    import yaml  # not at the top: completion of file names needs the standard library alone

    try:
        content = yaml.safe_load(head[1])
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):  # ValueError: `date: 2026-13-45`
        return []
    configs = content.get("configs") if isinstance(content, dict) else None
    return [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []


def _splits_by_card(configs: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The patterns of paths under `data_files` of a card's configurations, each with its split."""
    for config in configs:
        files = config.get("data_files")
        for entry in files if isinstance(files, list) else [files]:
            of_split = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
            paths = of_split.get("path")
            for path in paths if isinstance(paths, list) else [paths]:
                if isinstance(path, str):
                    yield path.removeprefix("./"), str(of_split.get("split", "train"))


def _split_by_name(name: str) -> str:
    """Return a file's split by its path: the one that the innermost folder names, else the one that the file names,
    else train. Folders that name train, such as train_test_split, do not count."""
    *folders, file = name.split("/")
    for part in (*reversed(folders), file):
        signs = [split for split, sign in _IN_NAME.items() if sign.search(_CAPITAL.sub("_", part))]
        if signs and signs != ["train"] and (part == file or "train" not in signs):
            return signs[0]  # "train" is the last
    return "train"


def _all_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The data files of a folder, and files that may hold data in a format that is not read."""

    def failed(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); make it readable, or remove it")

    data: list[Path] = []
    texts: list[Path] = []
    others: list[Path] = []
    seen = set()
    for parent, folders, names in os.walk(folder, onerror=failed, followlinks=True):
        if (real := os.path.realpath(parent)) in seen:  # a link has led to a folder that was read already
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(parent, name) for name in names if not _NO_DATA.fullmatch(name)]
        # a broken link is kept, so that the reader reports it
        there = [path for path in paths if path.is_file() or not path.exists()]
        data += filter(is_data_file, there)
        texts += [path for path in there if format_of(path).suffix == ".txt"]
        others += [path for path in there if path.suffix and not (format_of(path).suffix or _is_medium(path))]
    data = sorted(data or texts)
    if not data:
        compressed = ", ".join(COMPRESSIONS)
        raise UserError(
            f"{folder}: no data files in this folder; expected {', '.join(READERS)}, also with {compressed}"
        )
    return data, sorted(others)


def _is_medium(path: Path) -> bool:
    """Whether a file's suffix is that of an image, audio, video or text."""
    kind, _ = mimetypes.guess_type(path.name, strict=False)
    return (kind or "").startswith(("image/", "audio/", "video/", "text/"))


def is_dataset_name(name: str) -> bool:
    """Whether `name` is ORG/NAME, ORG/NAME:SPLIT or ORG/NAME:CONFIG:SPLIT, no folder ORG exists, and `name` does not
    end like a data file. NAME may be followed by @REVISION: a branch, tag or commit. A split may have a slice in the
    form of `datasets`, such as train[:500] or train[10%:20%]."""
    path = Path(name)
    return bool(_NAME.fullmatch(name)) and not os.path.exists(path.parent) and not is_data_file(path)


def load_dataset(name: str, use: str) -> tuple[Any, list[str]]:
    """The `datasets.Dataset` called `name`. If `name` has no split, `use` decides, and a line names the others."""
    try:
        import datasets
        from datasets.packaged_modules.cache.cache import Cache
    except ImportError:
        raise UserError(
            f"{name}: not a file or folder; to read it as a data set of the hub: pip install datasets"
        ) from None
    parts = _NAME.fullmatch(name)
    assert parts  # callers ask `is_dataset_name` first
    split, revision = parts["split"], parts["revision"]
    of_split = f", split {split}" if split else ""
    try:
        builder = datasets.load_dataset_builder(parts["id"], parts["config"], revision=revision)
        # if the hub does not answer, `datasets` reads the newest revision in its cache, whichever is asked for; before
        # 4.5 also if the hub has no such revision
        if revision and isinstance(builder, Cache) and builder.hash != _cached_commit(parts["id"], revision):
            raise ValueError(f"no revision {revision} was found; the newest one in the cache is {builder.hash}")
        builder.download_and_prepare()
        loaded = builder.as_dataset(split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = one_line(f"{type(error).__name__}: {' '.join(str(error).split())}", LONGEST_ERROR)
        raise UserError(
            f"{name}: not a file or folder, and the hub gives no data set {parts['id']}{of_split} ({cause}); "
            "write ORG/NAME:SPLIT, or ORG/NAME:CONFIG:SPLIT"
        ) from None
    if split:
        return loaded, []
    split, lines = chosen_split(name, [*loaded], use)
    return loaded[split], lines


def _cached_commit(id: str, revision: str) -> str | None:
    """Return the commit that a data set's branch, tag or commit is in the hub's cache; None if it is not cached."""
    from huggingface_hub import snapshot_download

    with contextlib.suppress(OSError):
        folder = snapshot_download(id, repo_type="dataset", revision=revision, allow_patterns=[], local_files_only=True)
        return Path(folder).name
    return None
