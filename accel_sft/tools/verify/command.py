"""`accel-sft verify`: checks whether a run matches its records: its files are compared, and segments are run again."""

import contextlib
import json
import secrets
from pathlib import Path

import click

from accel_sft.api.errors import UserError
from accel_sft.io.findings import Finding, lines, worst
from accel_sft.io.run_dir import RunDir
from accel_sft.io.terminal import waiting, wrapped
from accel_sft.launch.launcher import under_launcher

_COLORS = {"holds": "green", "open": "yellow", "differs": "red"}


@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--segments",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Segments between checkpoints to run again; 0: only compare files, and run nothing.",
)
@click.option("--seed", type=click.IntRange(0), help="Seed for drawing the segments; default: a new one each time.")
@click.option(
    "--from-start",
    is_flag=True,
    help="Also pick segments from before the first checkpoint, even if that is many steps to re-run.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=0.01,
    show_default=True,
    help="Allowed relative difference of losses where bits may differ: on GPUs without --deterministic, or with other "
    "libraries or processors than the run's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(run: Path, segments: int, seed: int | None, from_start: bool, tolerance: float, as_json: bool) -> None:
    """Compare a run with its own records, and run segments of it again.

    For example: accel-sft verify runs/sums --segments 3

    First the files of the folder RUN are compared with each other and with the data, code and libraries on this
    machine. Then segments, drawn at random, are run again from the checkpoint at their start: by the recorded launch,
    offline, in a temporary folder (TMPDIR says where). Their results are compared bit by bit. This runs the task's code
    and reads the files that run.yaml names: verify only runs that you trust, in the folder where the run was started.

    If bits may differ although nothing was changed, the segment's line says why, and only losses are compared: verify
    on the same kind of machine as the run's.

    The exit status is 1 if anything differs from what is recorded, or a segment cannot be run again.
    """
    from accel_sft.tools.verify import segments as parts
    from accel_sft.tools.verify.records import LEVELS, Recorded, examine

    if under_launcher():
        raise UserError("accel-sft verify starts the run's launch itself: start it without accelerate launch")
    run_dir = RunDir(run.expanduser())
    if not run_dir.record.is_file():
        raise UserError(f"{run}: no run.json in it; name the folder of a run")
    seed = secrets.randbelow(2**31) if seed is None else seed
    recorded = Recorded.read(run_dir)
    findings = [_shown(finding, as_json) for finding in examine(recorded)]
    possible = parts.candidates(recorded, from_start=from_start)
    drawn = parts.chosen(possible, segments, seed)
    again = []
    for segment in drawn:
        with contextlib.nullcontext() if as_json else waiting(f"running {segment} again"):
            finding = parts.run_again(recorded, segment, tolerance)
        findings.append(_shown(finding, as_json))
        if finding.level != "open":
            again.append(segment)
    failed = len(drawn) - len(again)
    notes = parts.conclusions(recorded, possible, again)
    same = worst(findings, LEVELS) != "differs"
    if as_json:
        report = {
            "run": str(run),
            "same": same,
            "seed": seed,
            "findings": [finding.as_dict() for finding in findings],
            "segments": [[segment.begin, segment.end] for segment in again],
            "notes": notes,
        }
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        verdict = "nothing differs from its records" if same else "it differs from its records"
        verdict += f"; {failed} of {len(drawn)} segments could not be run again here" * bool(failed)
        for line in (*notes, f"{run}: {verdict}{f' (--seed {seed})' if again else ''}"):
            click.echo(wrapped(line))
    if failed or not same:
        raise SystemExit(1)


def _shown(finding: Finding, as_json: bool) -> Finding:
    """Return the finding; print it at once unless the report is JSON."""
    for line in () if as_json else lines(finding, _COLORS):
        click.echo(line)
    return finding
