"""The command `how-much`: trains on growing parts of a task's rows, and forecasts what further rows would bring."""

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.options import flag_of, settings
from accel_sft.api.task import Task
from accel_sft.chat.conversation import read_split
from accel_sft.tools.compare import command as compare
from accel_sft.tools.compare.command import Offers, Params, Parse
from accel_sft.tools.compare.learning_curve import FEWEST_SIZES, ROWS

FEWEST_ROWS = 8
"""Minimum number of rows of a training, unless `--sizes` names fewer."""
_DEFAULTS = {**compare.DEFAULTS, "eval_every": "auto"}
"""Default options of each training. `epoch` would evaluate too often: a run on few rows may have hundreds of epochs."""
_VARIED = (ROWS, "seed")


def run(task: str, task_class: type[Task], offers: Offers, params: Params, parse: Parse) -> None:
    """Compare trainings on nested parts of the rows, the smallest first, each with several seeds. The parameters are
    those of `compare`, but `sizes` and `seeds` replace `train_limit` and `seed`, which are varied."""
    if taken := [flag_of(name) for name in _VARIED if name in parse([*params["run_words"]])[0]]:
        raise UserError(f"{', '.join(taken)} after --: how-much sets this for each training; use --sizes and --seeds")
    once = {**params, "repeat": 1, "discard_steps": 0}
    one_each, varied = compare.settings_of(task, task_class, offers, once, parse, _DEFAULTS)
    if varied:
        flags = ", ".join(map(flag_of, varied))
        raise UserError(f"{flags}: how-much varies only the number of rows and the seed; give one value")
    _, of_run = parse(one_each[0].words[1:])[1]()
    sizes = _sizes(params["sizes"], len(read_split(of_run, "train")), len(read_split(of_run, "validation")))
    seeds = range(1, params["seeds"] + 1)
    by_name = {setting.name: setting for setting in settings(TrainConfig)}
    all_offers = {**offers, TrainConfig: [*offers[TrainConfig], *(by_name[name] for name in _VARIED)]}
    values = {ROWS: [*map(str, sizes)], "seed": [*map(str, seeds)]}
    compare.run(task, task_class, all_offers, {**once, **values}, parse, _DEFAULTS)


def _sizes(given: str | None, rows: int, validation: int) -> list[int]:
    """The numbers of rows to train on, ascending: as given, or all rows and up to four halvings of that number."""
    if given is None:
        sizes = sorted({size for halvings in range(5) if (size := rows >> halvings) >= FEWEST_ROWS})
        few = f"{rows:,} training rows are too few for parts of at least {FEWEST_ROWS} rows"
    else:
        parts = [part.strip().replace("_", "") for part in given.split(",")]
        if wrong := [part for part in parts if not part.isdecimal() or not 0 < int(part) <= rows]:
            most = f"{rows:,} (the training rows; {validation:,} more are for validation)"
            raise UserError(f"--sizes {wrong[0]!r}: give comma-separated row counts, each at most {most}")
        sizes, few = sorted({*map(int, parts)}), f"--sizes {given}: too few sizes"
    if len(sizes) < FEWEST_SIZES:
        raise UserError(f"{few}; a curve needs at least {FEWEST_SIZES} different numbers of rows")
    return sizes
