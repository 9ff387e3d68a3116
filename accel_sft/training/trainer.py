"""The loop that trains a prepared model, and what it takes to evaluate, save and resume it; `train` is the loop."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from accel_sft.api.config import TrainConfig
from accel_sft.api.task import Task
from accel_sft.batching import choice
from accel_sft.batching.autotune import choose_batching
from accel_sft.batching.layouts import Batching
from accel_sft.checkpoint import checkpoint
from accel_sft.checkpoint.capacity import check_disk, check_host_memory
from accel_sft.data.step_plan import StepPlan
from accel_sft.data.token_store import TokenStore
from accel_sft.evaluation.evaluator import Evaluation, Evaluator
from accel_sft.io import terminal
from accel_sft.io.run_dir import read_samples, write_result
from accel_sft.launch import accelerator as launch
from accel_sft.launch.collectives import decided_by_main, largest
from accel_sft.launch.describe import differences, parallelism
from accel_sft.launch.info import read_launch
from accel_sft.models.load import compile_blocks, load_model, trainable_parameters
from accel_sft.resilience.anomalies import Anomalies
from accel_sft.resilience.signals import Interruption, StopSignals
from accel_sft.tracking import report
from accel_sft.tracking.system import peak_memory_gib
from accel_sft.tracking.tracker import Tracker
from accel_sft.training import summary
from accel_sft.training.optimizer import Stepper, adamw, learning_rate
from accel_sft.training.prepare import Prepared
from accel_sft.training.state import TrainState
from accel_sft.training.step import TrainStep, reduce_step

OnStep = Callable[[dict[str, float], Batching], None]
"""Called with a step's line of metrics.jsonl and the batching of its rows."""


class Trainer:
    """A prepared model and what it takes to train, evaluate and save it; `train` is the loop.

    Args:
        on_step: called on every rank after each optimizer step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run_dir: Path,
        task_name: str,
        task: Task,
        config: TrainConfig,
        prepared: Prepared,
        tracker: Tracker,
        signals: StopSignals,
        on_step: OnStep | None = None,
    ) -> None:
        self.signals, self.on_step = signals, on_step
        self.accelerator, self.run_dir, self.task_name, self.task = accelerator, run_dir, task_name, task
        self.config, self.prepared, self.tracker = config, prepared, tracker
        self.plan: StepPlan = prepared.plan
        self.train_examples: TokenStore = prepared.train.kept
        self.state = TrainState()
        self.anomalies = Anomalies(
            run_dir, config, accelerator.mixed_precision, tracker.log, writes=accelerator.is_main_process
        )
        self.batching_asked = [config.batching, config.micro_batch_size]

        deepspeed = accelerator.state.deepspeed_plugin is not None
        model = load_model(
            prepared.source,
            config,
            precision=accelerator.mixed_precision,
            deepspeed=deepspeed,
            total_steps=self.plan.total_steps,
        )
        if prepared.source.adapter and config.adapter == "none":
            tracker.log(
                "the adapter is merged into its base, and all weights are trained (to go on with it: --adapter)"
            )
        if config.compile:
            compile_blocks(model)
        tracker.phase("model")
        self.load_peaks = largest(peak_memory_gib(accelerator.device), "load_")
        self.trained_parameters = trainable_parameters(model)
        optimizer = adamw(model, config)
        check_host_memory(accelerator, model, read_launch())
        self.model, self.optimizer = launch.prepare(accelerator, model, optimizer, config)
        tracker.phase("sharded")
        self.stepper = Stepper(accelerator, self.model, self.optimizer, config.max_grad_norm)
        self.evaluator = Evaluator(
            accelerator,
            prepared.tokenizer,
            task,
            prepared.validation_examples,
            prepared.validation.kept,
            config,
            prepared.longest_answer,
            self.between_answers,
            tracker.log,
        )

    def resume(self) -> None:
        """Continue from the newest whole checkpoint where `--resume` asks for it; else judge the untrained model."""
        path = None
        if self.config.resume != "off":
            path, skipped = decided_by_main(
                self.accelerator, lambda: checkpoint.newest(self.run_dir, self.config.resume)
            )
            for line in skipped:
                self.tracker.log(line)
        saved = {}
        if path:
            saved = checkpoint.load(self.accelerator, self.model, self.optimizer, path)
            self.stepper.adapter.set_extra_state(self.stepper.adapted, checkpoint.load_extra(path))
        here = parallelism(self.accelerator)
        before = saved.get("layout", here)
        self.train_step = self.new_train_step(saved["batching"] if path and before == here else None)
        if path is None:
            self.tracker.rewind(0)
        else:
            self.state = TrainState(**saved["progress"])
            if self.config.resume != "auto" and self.accelerator.is_main_process:
                for aside in checkpoint.undo_after(self.run_dir, self.state.step):
                    self.tracker.log(f"{aside}: of a later step, put aside")
            self.tracker.rewind(self.state.step, evaluated=self.state.evaluated_step == self.state.step)
            other = differences(before, here)
            told = f"; written under another layout ({'; '.join(other)})" if other else ""
            self.tracker.log(f"resumed {path} at step {self.state.step} of {self.plan.total_steps}{told}")
        self.anomalies.rewind(self.state.step)
        self.tracker.phase("ready")
        self.tracker.phases()
        self.saved_step = self.state.step
        if self.config.save_every != "off":
            check_disk(self.accelerator, self.model, self.run_dir)

    def new_train_step(self, before: dict[str, Any] | None) -> TrainStep:
        """Rows laid out as before the run stopped, unless asked for otherwise now; else what is exact and fast here.

        The choice is in the run's folder before the first step, and a run without a checkpoint goes on with it.
        """
        job = [self.prepared.fingerprint(), self.plan.global_batch_size]
        if before is None and self.config.resume != "off":
            before = choice.read(self.accelerator, self.run_dir, job)
        kept = choice.restored(before, self.batching_asked)
        accelerator, pad_token_id = self.accelerator, self.prepared.tokenizer.pad_token_id
        some, evaluated = self.train_examples.some(), self.prepared.validation.kept
        longest = (
            [evaluated[int(evaluated.lengths.argmax())]] if len(evaluated) else []
        )  # its loss is taken in the same layout
        batching, told = choose_batching(
            accelerator, self.model, self.config, some, pad_token_id, before=kept, also=longest
        )
        self.tracker.log(told)
        choice.write(accelerator, self.run_dir, self.batching_asked, batching, job)
        return TrainStep(accelerator, self.model, self.stepper, batching, pad_token_id, self.run_dir, self.tracker.log)

    def train(self) -> None:
        """The loop: learn from one global batch, look, evaluate, save. A signal ends it in order.

        From here on signals are deferred: what comes after the loop takes seconds, and has no checkpoint of its own.
        """
        self.signals.deferred = True
        try:
            self.evaluate_and_save()  # a run starts with a judgement, or was stopped before one
            self.loop()
        except Interruption:
            self.save()
            raise

    def loop(self) -> None:
        """Steps to the end, or until patience runs out or a signal comes."""
        plan, stepper, state, config = self.plan, self.stepper, self.state, self.config
        self.model.train()
        with self.tracker.profiler() as profiler:
            while state.step < plan.total_steps and not self.out_of_patience():
                started = time.perf_counter()
                rows = plan.examples(state.step)
                tokens, supervised_tokens = int(plan.lengths[rows].sum()), int(plan.supervised[rows].sum())
                rate = learning_rate(state.step, plan.total_steps, config)
                stepper.set_learning_rate(rate)
                torch.manual_seed(plan.seed_of(state.step, self.accelerator.process_index))  # dropout masks
                examples = self.train_examples.take(rows.tolist())
                share, oom = self.train_step.forward_backward(examples, supervised_tokens, state.step + 1)
                self.signals.exit_if_orphaned()
                mine = share, oom, self.signals.asked, self.tracker.system()
                loss, oom, signal, system = reduce_step(self.accelerator, *mine)
                if oom.tokens:
                    self.train_step.retry_smaller(oom, state.step + 1)
                    continue
                grad_norm = stepper.update(state.step)
                state.step += 1

                self.anomalies.look(state.step, loss, grad_norm, examples)
                record = state.counted(
                    epoch=plan.epoch(state.step),
                    loss=loss,
                    grad_norm=grad_norm,
                    learning_rate=rate,
                    supervised_tokens=supervised_tokens,
                    tokens=tokens,
                    seconds=time.perf_counter() - started,
                )
                self.tracker.step(record, system)
                if self.on_step:
                    self.on_step(record, self.train_step.batching)
                profiler.step()
                self.stop_if(signal)
                self.evaluate_and_save()

    def evaluate_and_save(self) -> None:
        """The evaluation and the checkpoint that are due at this step, unless they were made."""
        state, config = self.state, self.config
        evaluated = state.step in (0, self.plan.total_steps) and config.eval_every != "off"
        if state.evaluated_step != state.step and (evaluated or self.due(config.eval_every)):
            self.evaluate()
        if self.saved_step != state.step and self.due(config.save_every):
            self.save()

    def stop_if(self, signal: int) -> None:
        """Raise Interruption if there was a signal, which all ranks know of."""
        if signal:
            raise Interruption(signal, self.state.step)

    def between_answers(self) -> None:
        """Let a signal end an evaluation, on all ranks, before its next batch of answers."""
        asked = torch.tensor([self.signals.asked], device=self.accelerator.device)
        self.stop_if(int(self.accelerator.gather(asked).max()))

    def due(self, setting: str) -> bool:
        """Whether `--eval-every` or `--save-every` asks for it now."""
        step = self.state.step
        if setting == "epoch":
            return self.plan.ends_epoch(step)
        every = math.ceil(self.plan.total_steps / 4) if setting == "auto" else int(setting) if setting != "off" else 0
        return every > 0 and step % every == 0

    def out_of_patience(self) -> bool:
        return self.config.patience is not None and self.state.without_better >= self.config.patience

    def evaluate(self) -> None:
        """Judge the weights as they are; keep them as best/ if the task's main metric says so."""
        state = self.state
        self.tracker.peak()
        with torch.compiler.set_stance("force_eager"):  # answers grow by a token at a time, each another shape
            evaluation = self.evaluator(self.model, self.train_step.batching)
        self.tracker.evaluation(state.step, evaluation.metrics, evaluation.samples)
        state.latest, state.evaluated_step = {**evaluation.metrics, **self.load_peaks}, state.step
        if state.step == 0:
            state.before = state.latest
            return
        metrics = evaluation.metrics
        if state.update_best(metrics[self.task.main_metric], metrics["eval_loss"], self.task.higher_is_better):
            self.export("best", evaluation)

    def export(self, name: str, evaluation: Evaluation | None = None) -> None:
        """The weights as they are, with a card, for plain transformers or peft."""
        after = evaluation.metrics if evaluation else self.state.latest
        card = summary.card(self.config, self.task_name, self.task, self.prepared, self.state.before, after)
        checkpoint.export(self.accelerator, self.model, self.prepared.tokenizer, self.run_dir / name, card)

    def save(self) -> None:
        """A checkpoint of this step, with what was measured and judged so far."""
        batching = choice.recorded(
            self.batching_asked, self.train_step.batching
        )  # so that a resume keeps to it (law 3)
        self.signals.exit_if_orphaned()
        saved = {"step": self.state.step, "progress": dataclasses.asdict(self.state), "batching": batching}
        self.tracker.flush()
        extra, keep = self.stepper.adapter.extra_state(self.stepper.adapted), self.config.keep_checkpoints
        checkpoint.save(self.accelerator, self.model, self.optimizer, self.run_dir, saved, keep, extra)
        self.saved_step = self.state.step

    def finalize(self) -> None:
        """Export final/, write result.json and report.md, and show before beside after."""
        state, accelerator = self.state, self.accelerator
        self.export("final")
        result = {
            **summary.summary(self.config, self.task_name, self.task, state, self.plan.total_steps),
            **largest(self.tracker.peak()),
            "trained_parameters": self.trained_parameters,
            "steps_left_out": self.anomalies.left_out(),
            "batching": dataclasses.asdict(self.train_step.batching),
            "phases": self.tracker.phases(),
        }
        if accelerator.is_main_process:
            before, after = (read_samples(self.run_dir, step) for step in (0, state.evaluated_step))
            report.write_report(self.run_dir, result, before, after)
            write_result(self.run_dir, result)
            self.tracker.close()
            report.print_report(result, before, after, console=Console(file=terminal.terminal(), highlight=False))
            best = f"best/ (step {state.best_step}) and " if state.best_step else ""
            if left_out := result["steps_left_out"]:
                self.tracker.log(
                    f"{left_out} of {state.step} steps were not finite and left out: {self.anomalies.file}"
                )
            self.tracker.log(f"{self.run_dir}: weights in {best}final/ (step {state.step}), numbers in report.md")
        accelerator.wait_for_everyone()
