"""Finds which source, of those that `--mix` gives shares, each row of tokens comes from."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_sft.api.config import read_shares
from accel_sft.api.errors import UserError
from accel_sft.data.step_plan import StepPlan
from accel_sft.data.token_store import StoredEncoding


def check_sources(examples: Sequence[Any], mix: str) -> dict[str, int]:
    """Return each source's share by its name; the sources are what `--train-file` names, each in its order."""
    shares, names = read_shares(mix), getattr(examples, "sources", None)
    if names is None or not hasattr(examples, "sources_of"):
        raise UserError(f"--mix {mix}: this task's rows are not read from files of --train-file; leave it out")
    if len(names) != len(shares):
        raise UserError(
            f"--mix {mix}: {len(shares)} shares, and --train-file names {len(names)} ({', '.join(names)}); give each "
            "its own --train-file and a share"
        )
    if len(set(names)) < len(names):
        raise UserError(f"--mix {mix}: --train-file names {', '.join(names)}, one of them twice; add its shares up")
    return dict(zip(names, shares, strict=True))


def rows_by_source(train: StoredEncoding, mix: str) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
    """Return the indices of each source's rows of tokens by its name, and the shares."""
    examples: Any = train.examples
    shares = check_sources(examples, mix)
    indices = np.concatenate([columns.indices.copy() for columns in train.kept.columns()])
    numbers = np.asarray(examples.sources_of(indices.tolist()))
    rows_of = {name: np.flatnonzero(numbers == number) for number, name in enumerate(shares)}
    if empty := [name for name, rows in rows_of.items() if not len(rows)]:
        raise UserError(f"--mix {mix}: no row of {', '.join(empty)} is left to train on; fix them, or leave it out")
    return rows_of, tuple(shares.values())


def in_words(plan: StepPlan) -> str:
    """Say how a plan mixes its sources, such as "3 : 1 of a.jsonl (1,000 rows), b.jsonl (200 rows, seen 1.7 times an
    epoch)"."""
    described = []
    for (name, rows), passes in zip(plan.sources.items(), plan.passes(), strict=True):
        often = f", seen {passes:,.1f} times an epoch" if passes > 1 else ""
        described.append(f"{name} ({len(rows):,} rows{often})")
    return f"{' : '.join(map(str, plan.shares))} of {', '.join(described)}"
