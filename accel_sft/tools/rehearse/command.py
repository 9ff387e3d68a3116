"""`accel-sft rehearse`: makes a complete run in minutes on a shrunk model, before you pay for the real run."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import accel_sft
from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.options import settings
from accel_sft.api.task import Task
from accel_sft.api.tool_configs import CheckConfig, RehearseConfig
from accel_sft.data.step_plan import StepPlan
from accel_sft.evaluation.evaluator import evaluated_rows
from accel_sft.io import terminal
from accel_sft.io.files import json_safe
from accel_sft.io.findings import Finding
from accel_sft.launch.audit import audit
from accel_sft.launch.environment import device_count
from accel_sft.launch.info import launch_of_yaml
from accel_sft.launch.launcher import under_launcher
from accel_sft.launch.parallelism import fitted
from accel_sft.launch.precision import precision_in_record
from accel_sft.models.source import resolved
from accel_sft.tools.check.command import Audit
from accel_sft.tools.plan.command import launch_files, words_of
from accel_sft.tools.rehearse import runs, shrunk
from accel_sft.tools.rehearse.reload import Reloaded
from accel_sft.tools.rehearse.runs import FAILS, WARNS, Stages, fails, warns
from accel_sft.training.prepare import plan_steps

_LEVELS = {"error": FAILS, "warning": WARNS}
"""What a finding of an audit means for the real run. Notes are ignored."""


def run(task_name: str, task: Task, config: RehearseConfig) -> None:
    """Rehearse a run, and exit with status 1 if a stage of it would fail."""
    if under_launcher() or "LOCAL_RANK" in os.environ:
        raise UserError(
            f"accel-sft rehearse {task_name} starts launches itself: call it without accelerate launch, and name the "
            "launch file with --launch"
        )
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="accel-sft-rehearsal-"))
    with terminal.quiet(None, config.debug, shown_on=2 if config.json else 1) as shown:
        stages = Stages(lambda line: print(line, file=shown, flush=True))
        try:
            with terminal.waiting(f"rehearse {task_name}"):
                Rehearsal(task_name, task, config, folder, stages).run()
        finally:
            keeps = config.keep or stages.failed
            if not keeps:
                shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - began
    if config.json:
        report = {
            "version": accel_sft.__version__,
            "task": task_name,
            "model": config.init_from or config.model,
            "launch": config.launch,
            "seconds": seconds,
            "folder": str(folder) if keeps else None,
            "stages": [dataclasses.asdict(stage) for stage in stages.all.values()],
        }
        print(json.dumps(json_safe(report), indent=2, ensure_ascii=False))
    else:
        verdict = "the run would fail" if stages.failed else "no stage would fail"
        print(f"{verdict}; the rehearsal took {seconds:.0f} s" + f" and left its files in {folder}" * keeps)
    if stages.failed:
        raise SystemExit(1)


class Rehearsal:
    """One rehearsal: first the audits (without a run), then the runs, then tests of the exported weights."""

    def __init__(self, task_name: str, task: Task, config: RehearseConfig, folder: Path, stages: Stages) -> None:
        self.task_name, self.task, self.folder, self.stages = task_name, task, folder, stages
        self.config = resolved(config, task)
        self.plan: StepPlan | None = None

    def run(self) -> None:
        """Go through the stages; a stage that needs a failed stage is not reached."""
        launcher = self.launch()
        audited = self.data()
        if audited is None or self.plan is None:
            return
        if audited.source and audited.source.adapter:
            raise UserError(f"--init-from {audited.source.adapter}: is an adapter; rehearse without --init-from")
        config = self.model(audited)
        if config is None or self.stages.failed:  # the real run would be refused, or fail
            return
        self.runs = runs.Runs(launcher, [self.task_name, *words_of(config, self.task)], self.folder)
        full_run = self.runs.start("whole")
        if self.reached_end(full_run):
            self.resume(full_run)
            self.reload(full_run, config, audited)

    def launch(self) -> list[str]:
        """Audit the launch as the real run does; return the words that start a rehearsal's run."""
        real, file, findings = None, None, []
        if self.config.launch:
            (_, file), *others = launch_files(self.config.launch)
            if others:
                raise UserError(f"--launch {self.config.launch}: rehearse one launch file at a time")
            real = launch_of_yaml(file)
            gpus = device_count()
            if not gpus and (real.backend == "fsdp" or real.precision[0] == "fp16"):
                gpus = real.local_world_size  # of the machine for which the run is meant
            real = fitted(real, gpus)
            for finding in audit(self.config, real, gpus):
                if finding.level in _LEVELS:
                    findings.append(dataclasses.replace(finding, level=_LEVELS[finding.level]))
        words, seen = runs.launcher_of(real, file)
        self.stages.ended("launch", *findings, seen=seen, when="the start")
        return words

    def data(self) -> Audit | None:
        """Audit the data as `accel-sft check` does, and the steps planned for the data. Return None if this fails."""
        names = {setting.name for setting in settings(TrainConfig)}
        given = {name: value for name, value in vars(self.config).items() if name in names}
        day = self.config.template_date or time.strftime("%Y-%m-%d")
        with self.stages.reported("data"):
            audited = Audit(self.task_name, self.task, CheckConfig(**given | {"template_date": day}), self.folder)
            report = audited.report()
            findings = []
            for finding in report.findings:
                if finding.grade in _LEVELS:
                    row = finding.rows[0] if finding.rows else None
                    named = f" ({'; '.join(filter(None, (row.where, row.detail)))})" if row else ""
                    what = f"{finding.code} {finding.split}: {finding.count:,}: {finding.about.what}{named}"
                    findings.append(Finding(_LEVELS[finding.grade], what, finding.about.fix))
            train = audited.encodings.get("train")
            seen = "; ".join(f"{split} {figures['rows']:,} rows" for split, figures in report.splits.items())
            if train is not None and report.steps:
                self.plan = plan_steps(train, self.config)
                findings += self._never(self.plan)
                seen += f"; {self.plan.total_steps:,} steps of {self.plan.global_batch_size}"
            self.stages.ended("data", *findings, seen=seen, when="reading the data")
            return audited
        return None

    def _never(self, plan: StepPlan) -> Iterator[Finding]:
        for flag, every, consequence in (
            ("--save-every", self.config.save_every, "a run that is killed starts over"),
            ("--eval-every", self.config.eval_every, "only the last step is scored"),
        ):
            if every != "off" and self._first(every) is None:
                what = f"{flag} {every} is never due in {plan.total_steps:,} steps: {consequence}"
                yield warns(what, f"use {flag} auto, or a smaller number of steps")

    def _first(self, every: str) -> int | None:
        """The first step of the real run at which `--save-every` or `--eval-every` is due."""
        assert self.plan is not None
        return next((step for step in range(1, self.plan.total_steps + 1) if self.plan.is_due(every, step)), None)

    def model(self, audited: Audit) -> TrainConfig | None:
        """Shrink the model; return the settings of the runs, or None if this failed."""
        source = audited.source
        assert source is not None
        with self.stages.reported("model"):
            model, seen = "tiny", "tiny is trained as it is"
            findings: list[Finding] = []
            if self.config.model != "tiny" or self.config.init_from:
                model = str(self.folder / "model")
                seen, findings = shrunk.shrink(source, Path(model), self.config)
            self.stages.ended("model", *findings, seen=seen, when="loading the model")
            longest = max(int(encoding.kept.answers.max()) for encoding in audited.encodings.values() if encoding)
            return runs.rehearsed(self.config, model, longest)
        return None

    def reached_end(self, made: runs.Run) -> bool:
        """Report for each stage of the complete run whether it was reached; return whether all were."""
        config, plan = self.config, self.plan
        assert plan is not None
        steps, evaluated = made.lines("loss"), made.lines("eval_loss")
        loaded = runs.TRAINED.search(made.output)
        saved = config.save_every == "off" or made.dir.checkpoint(runs.SAVE_EVERY).is_dir()
        first, last = f"step {self._first(config.save_every) or plan.total_steps:,}", f"step {plan.total_steps:,}"
        finite = not made.dir.nonfinite.exists()
        took = f"{len(steps)} steps; {'all losses are finite' if finite else 'steps without a finite loss are skipped'}"
        scored = config.eval_every == "off" or bool(evaluated)
        for name, reached, when, seen in (
            ("load", bool(loaded), "loading the model", loaded[0] if loaded else ""),
            ("evaluation", scored, "step 0, before training", f"{len(evaluated) or 'no'} evaluations"),
            ("steps", len(steps) >= runs.SAVE_EVERY and (finite or not made.failure), "step 1", took),
            ("checkpoint", saved, first, ""),
            ("export", made.dir.final.is_dir() and not made.failure, last, ""),
        ):
            if made.failure and not reached:
                self.stages.ended(name, *map(fails, made.failure), when=when)
                return False
            self.stages.ended(name, seen=seen, when=when)
            if name == "steps":
                self.trained(made)
        return True

    def trained(self, made: runs.Run) -> None:
        """Say what is not trained, and what gets no gradient."""
        lines = made.output.splitlines()
        seen = [line for line in lines if line.startswith(("the adapter leaves out", "not trained,", "note: in "))]
        vain = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: weights without")]
        # some models have parts that only their authors train
        level = WARNS if self.config.adapter == "none" else FAILS
        self.stages.ended("trained", *(Finding(level, line) for line in vain), seen="; ".join(seen))

    def resume(self, full_run: runs.Run) -> None:
        """Kill a second run after its first checkpoint, resume it, and compare losses and weights with `full_run`."""
        if self.config.save_every == "off":
            self.stages.ended("resume", warns("--save-every off: a run that is killed starts over"))
            return
        killed = self.runs.killed("killed")
        left = len(killed.lines("loss"))
        resumed = self.runs.start("killed", "--resume", "auto")
        findings = [*map(fails, resumed.failure)]
        losses = [[line["loss"] for line in run.lines("loss")] for run in (full_run, resumed)]
        files = [{p.name: p.read_bytes() for p in run.dir.final.glob("*.safetensors")} for run in (full_run, resumed)]
        if not findings and (losses[0] != losses[1] or files[0] != files[1]):
            first = next((n for n, (a, b) in enumerate(zip(*losses, strict=False), 1) if a != b), runs.STEPS)
            what = f"a killed and resumed run differs from an uninterrupted one, from step {first} on"
            findings = [fails(what, "check whether the task or the model draws random numbers without the run's seed")]
        stop = f"killed (SIGKILL) after {left} steps" if killed.failure else "not killed, because it had already ended"
        seen = "" if findings else f"{stop}, and resumed to the same bits"
        self.stages.ended("resume", *findings, seen=seen, when="a resume after a kill")

    def reload(self, full_run: runs.Run, config: TrainConfig, audited: Audit) -> None:
        """Load the exported weights with plain transformers and peft, merge them, and generate an answer."""
        stages, final, encoding = self.stages, full_run.dir.final, audited.encodings["validation"]
        assert encoding is not None
        rows = evaluated_rows(encoding.kept, config.eval_limit)
        # if a resume fails, the task may draw its data anew: then the run's rows differ from the rows read here
        lines = full_run.lines("eval_loss") if stages.all["resume"].state != FAILS else []
        evaluated = [line["eval_loss"] for line in lines]
        precision = precision_in_record(full_run.dir.read_record()) or "no"
        exported: Reloaded | None = None
        with stages.reported("reload"):
            exported = Reloaded(final, config, rows)
            seen, findings = exported.reload(evaluated, precision)
            stages.ended("reload", *findings, seen=seen, when="the first use of the exported weights")
        if exported is None:
            return
        with stages.reported("merge"):
            stages.ended("merge", seen=exported.merge(), when="accel-sft merge")
        with stages.reported("generate"):
            seen, findings = exported.generate()
            stages.ended("generate", *findings, seen=seen, when="the first answer")
