"""Runs accel_sft's command line up to its first optimizer step and times each phase; it replaces `-m accel_sft`.

After that step it writes `rank-N.json` into the folder named by FIRST_STEP_FOLDER and ends the process.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path

began = time.time()
sys.path.insert(1, str(Path(__file__).parent.parent))

from clock import Clock  # noqa: E402


def watched(part: str, begins: bool) -> None:
    """Prints the part that begins or ends among the lines of `-X importtime`."""
    print(f"import time: # {part if begins else ''}", file=sys.stderr, flush=True)


clock = Clock(watched if os.environ.get("PYTHONPROFILEIMPORTTIME") else lambda part, begins: None)


class Ours:
    """The command's imports, in its order, as calls that can be timed."""

    @staticmethod
    def command_line() -> None:
        from accel_sft import __main__  # noqa: F401

    @staticmethod
    def libraries() -> None:
        with importing():
            from accel_sft.commands import train  # noqa: F401


clock.time(Ours, Ours.command_line, "imports of the command line")
clock.time(Ours, Ours.libraries, "imports of the libraries")
Ours.command_line()

from accel_sft.launch.environment import importing, prepare_environment  # noqa: E402

prepare_environment()  # as the command line does before torch is imported
Ours.libraries()

from accel_sft import __main__  # noqa: E402
from accel_sft.commands import train  # noqa: E402
from accel_sft.evaluation import generate  # noqa: E402
from accel_sft.launch import start  # noqa: E402
from accel_sft.training import prepare, trainer  # noqa: E402

for owner, call, part in (
    (start, start.audit, "audit of the launch"),
    (start, start.create_accelerator, "Accelerator"),
    (train, train.start, "description of the launch"),
    (train, train.claim_run_dir, "run folder"),
    (prepare, prepare.read_split, "data: the task's rows"),
    (prepare, prepare.build_tiny, "data: building tiny"),
    (prepare, prepare.load_tokenizer, "data: tokenizer"),
    (prepare.SplitEncoder, prepare.SplitEncoder.__init__, "data: encoding"),
    (prepare.SplitEncoder, prepare.SplitEncoder.__call__, "data: encoding"),
    (train, train.prepare_data, "data: the rest"),
    (train, train.write_run_record, "run record"),
    (train.Tracker, train.Tracker.__init__, "trackers"),
    (prepare, prepare.load_model, "model: loading"),
    (trainer, trainer.prepare_model, "model: accelerator.prepare"),
    (trainer.Trainer, trainer.Trainer.__init__, "model: the rest"),
    (trainer.Trainer, trainer.Trainer.new_train_step, "layout trials"),
    (generate.Generator, generate.Generator.__call__, "evaluation: generating"),
    (trainer.Trainer, trainer.Trainer.evaluate, "evaluation: the rest"),
    (trainer.Trainer, trainer.Trainer.resume, "records of the start"),
):
    clock.time(owner, call, part)


def stepped(*_: object) -> None:
    answer = {"began": began, "stepped": time.time(), "parts": clock.lap("the end of step 1")}
    answer["uncalled"] = sorted(clock.uncalled)
    folder, rank = os.environ["FIRST_STEP_FOLDER"], os.environ.get("RANK", "0")
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(answer))
    os._exit(0)


train.run = functools.partial(train.run, on_step=stepped)
__main__.main()
