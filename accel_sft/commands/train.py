"""Trains a task's model, from launch to result, and explains failures that end the run."""

import contextlib
import shutil
import traceback
from collections.abc import Iterator

from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError, first_line
from accel_sft.api.task import Task
from accel_sft.api.task_file import recorded_name
from accel_sft.batching.device_memory import out_of_memory
from accel_sft.io import terminal
from accel_sft.io.files import expanded, trouble_of_writing
from accel_sft.io.heartbeat import heartbeats_only
from accel_sft.io.lock import release
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import one_line
from accel_sft.launch.describe import resume_command
from accel_sft.launch.precision import precision_in_record
from accel_sft.launch.recordable import masked
from accel_sft.launch.start import begin, show, start
from accel_sft.models.kernels import trouble_of_compiling
from accel_sft.models.source import resolved
from accel_sft.resilience.exit import EXPLAIN_SECONDS, leave_together
from accel_sft.resilience.signals import Interruption, StopSignals
from accel_sft.resilience.watchdog import Watchdog
from accel_sft.tools.check.tokens import quick_findings, quick_lines
from accel_sft.tracking.tracker import Tracker
from accel_sft.training.folder import claim_run_dir
from accel_sft.training.prepare import Prepared, prepare_data
from accel_sft.training.record import write_run_record
from accel_sft.training.trainer import OnStep, Trainer


def run(task_name: str, task: Task, config: TrainConfig, *, on_step: OnStep | None = None) -> None:
    """Train `task` as `config` says; call it in the main thread of every process that `accelerate launch` started.

    Args:
        on_step: called on every rank after each optimizer step, with the step's line of metrics.jsonl and the batching
            of its rows. Benchmarks use it. An exception that it raises ends the run.
    """
    launch, name = begin(), recorded_name(task_name)
    requested = config = resolved(config, task)
    with StopSignals() as signals, contextlib.ExitStack() as at_end:
        at_end.callback(release)
        with Watchdog(config.hang_timeout):
            precision_of_run = _precision_of_run(output_dir=config.output_dir, resume=config.resume)
            accelerator, launch = start(launch, config, task, precision_of_run=precision_of_run)
            if config.dry_run:
                return
            claim = claim_run_dir(accelerator, launch, name, task, config)
            run_dir, config = claim.run_dir, claim.config
        if claim.finished:
            accelerator.print(f"{run_dir}: this run is finished; its report is {run_dir.report}")
            return
        show(accelerator, launch, requested, task, str(run_dir))
        signals.run_dir, signals.to_continue = run_dir, resume_command(run_dir.path, config.output_dir)
        watch, log = Watchdog(config.hang_timeout, run_dir), run_dir.log(accelerator.process_index)
        with _ending(accelerator, run_dir, claim.fresh, signals), terminal.quiet(log, config.debug), watch:
            prepared = prepare_data(accelerator, launch, run_dir, task, config)
            made_by = write_run_record(run_dir, name, prepared)
            with Tracker(
                accelerator,
                run_dir,
                config,
                total_steps=prepared.plan.total_steps,
                main_metric=task.main_metric,
                terminal=terminal.terminal(),
            ) as tracker:
                for line in (*prepared.lines, *_warnings(accelerator, task_name, prepared)):
                    tracker.log(line)
                tracker.phase("data")
                trainer = Trainer(run_dir, name, prepared, tracker, signals, on_step, made_by)
                with heartbeats_only(), trainer.checkpoints:
                    trainer.resume()
                    write_run_record(run_dir, name, prepared, resumed=True)
                    trainer.train()
                    trainer.finalize()
            leave_together()


def _precision_of_run(*, output_dir: str | None, resume: str) -> str | None:
    """Return the precision of the run to resume; None for a new run. A launch that names a precision overrides it."""
    run_dir = RunDir(expanded(output_dir or ""))
    resumes = output_dir and resume != "off" and run_dir.record.is_file() and run_dir.has_trained()
    return precision_in_record(run_dir.read_record()) if resumes else None


def _warnings(accelerator: Accelerator, task_name: str, prepared: Prepared) -> list[str]:
    """Return the warnings of the quick token check; empty except on rank 0, which prints them."""
    if not accelerator.is_main_process:
        return []
    assembly = prepared.assembly
    data = prepared.train, prepared.validation, assembly.tokenizer
    return quick_lines(quick_findings(*data, assembly.encode.rules.eos_ids), task_name)


@contextlib.contextmanager
def _ending(accelerator: Accelerator, run_dir: RunDir, fresh: bool, signals: StopSignals) -> Iterator[None]:
    """In this context, an exception is explained and written to result.json before it is raised again.

    If a UserError comes before the first evaluation, a `fresh` folder (new or empty before the run) is deleted instead:
    otherwise TensorBoard and `report` would list a run without values.
    """
    try:
        yield
    except BaseException as raised:
        signals.failing()  # ends a rank whose launcher is gone: errors of lost connections are not the cause
        error = _explained(run_dir, signals, raised)
        if fresh and isinstance(raised, UserError) and not signals.deferred:
            if accelerator.is_main_process:
                shutil.rmtree(run_dir.path, ignore_errors=True)
        else:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            run_dir.write_ended(status, masked(str(error)) or type(error).__name__)
        if error is raised:
            raise
        raise error from raised


def _explained(run_dir: RunDir, signals: StopSignals, error: BaseException) -> BaseException:
    """A UserError that says what to do, if the cause is known; otherwise the error itself."""
    if isinstance(error, SystemExit):  # other ranks would wait for a rank that exits with status 0
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno}"
        return UserError(f"{where}: sys.exit({error.code!r}) during the run; raise an error instead")
    interrupted = isinstance(error, KeyboardInterrupt) and not isinstance(error, Interruption)
    if interrupted and (lost := signals.lost_peers()):
        return UserError(lost)  # when a rank is lost, its launcher sends the others SIGTERM
    if isinstance(error, UserError) or not isinstance(error, Exception):
        return error
    if out_of_memory(error):
        advice = "lower --micro-batch-size or --eval-batch-size, or add --gradient-checkpointing"
        return UserError(f"out of device memory ({one_line(first_line(error), 46)}); {advice}")
    if problem := trouble_of_compiling(error):
        return UserError(problem)
    if problem_and_fix := trouble_of_writing(error, run_dir.path):
        return UserError(f"{run_dir}: {problem_and_fix}, then go on with --resume auto")
    if "Expected to have finished reduction" in str(error):  # by DDP, which waits for every gradient
        problem = "a trained weight gets no gradient, but DDP waits for one"
        return UserError(f"{problem}; leave the weight out with --train-only (a launch with z2.yaml names it)")
    if lost := signals.lost_peers(EXPLAIN_SECONDS):  # a broken collective's error does not name the lost ranks
        return UserError(lost)
    return error
