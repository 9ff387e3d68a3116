"""`Trainer`: the training loop, which evaluates, saves, resumes, and exports the best weights."""

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from accel_sft.api.config import keep_every
from accel_sft.batching import choice
from accel_sft.batching.choice import choose_batching
from accel_sft.batching.layouts import Batching
from accel_sft.batching.trial import Trial
from accel_sft.checkpoint import checkpoint, shards
from accel_sft.checkpoint.background import Checkpoints, check_disk
from accel_sft.io import manifest
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.accelerator import prepare_model
from accel_sft.launch.collectives import decided_by_main, largest, largest_of_ranks
from accel_sft.launch.describe import differences, layout_of, resume_command
from accel_sft.launch.groups import row_groups
from accel_sft.models.load import parameter_counts
from accel_sft.models.pretrained import auto_class, processor_files, stored_dtype
from accel_sft.models.tokenizer import left_out, sentencepiece_file
from accel_sft.resilience.anomalies import Anomalies
from accel_sft.resilience.signals import Interruption, StopSignals
from accel_sft.results.run_report import PAIR_LOSS, PAIR_METRICS
from accel_sft.tracking.system import peak_memory_gib
from accel_sft.tracking.time_spent import BATCHES, PAUSE, span, taken
from accel_sft.tracking.tracker import Tracker
from accel_sft.training import summary
from accel_sft.training.checks import Untrained, rounds_updates, use_liger_kernels
from accel_sft.training.optimizer import Stepper, new_optimizer
from accel_sft.training.predicted import Prediction
from accel_sft.training.preference import InitialModel
from accel_sft.training.prepare import Prepared
from accel_sft.training.state import TrainState, learning_rate
from accel_sft.training.step import TrainStep, reduce_step

OnStep = Callable[[dict[str, float], Batching], None]
"""Called on every rank after each optimizer step, with the step's line of metrics.jsonl and the rows' batching."""


class Trainer:
    """Trains, evaluates and saves one run's model: `resume`, then `train`, then `finalize`."""

    def __init__(
        self,
        run_dir: RunDir,
        task_name: str,
        prepared: Prepared,
        tracker: Tracker,
        signals: StopSignals,
        on_step: OnStep | None,
        made_by: dict[str, Any],
    ) -> None:
        self.run_dir, self.task_name, self.prepared = run_dir, task_name, prepared
        self.tracker, self.signals, self.on_step, self.made_by = tracker, signals, on_step, made_by
        assembly, train, validation = prepared.assembly, prepared.train, prepared.validation
        self.plan, self.train_examples = prepared.plan, train.kept
        self.accelerator, self.task, self.config = assembly.accelerator, assembly.task, assembly.config
        accelerator, config, log = self.accelerator, self.config, tracker.log
        self.state = TrainState()
        torch.set_grad_enabled(True)  # a task whose own model scores answers may have turned gradients off
        self.anomalies = Anomalies(
            run_dir, config.on_nonfinite, accelerator.mixed_precision, log, writes=accelerator.is_main_process
        )
        self.answering: list[str] = []
        self.batching_asked = [config.batching, config.micro_batch_size]
        self.prediction = Prediction(accelerator, prepared.launch, config, assembly.source.weights, log)
        tracker.peaks.begin("load")
        model = assembly.load_model(train, validation, total_steps=self.plan.total_steps, log=log)
        self.model_class, self.beside = auto_class(model).__name__, processor_files(assembly.source.weights, model)
        if not (assembly.template and assembly.template.new_tokens):  # sentencepiece's file lacks the new tokens
            self.beside += sentencepiece_file(assembly.source)
        self.left_out = left_out(model.generation_config) if model.can_generate() else {}
        self.exported: dict[str, Any] = {}  # empty for an adapter, which is exported in the dtype of training
        if config.adapter == "none":
            base = AutoConfig.from_pretrained(assembly.source.weights, trust_remote_code=config.trust_remote_code)
            self.exported["dtype"] = (
                stored_dtype(base) if config.export_dtype == "auto" else getattr(torch, config.export_dtype)
            )
            self.exported["base"], _ = PreTrainedConfig.get_config_dict(assembly.source.weights)
        tracker.phase("model")
        self.load_peaks = largest(peak_memory_gib(accelerator.device), "load_")
        self.trained_parameters, parameters = parameter_counts(model)
        self.trained = f"{self.trained_parameters:,} of {parameters:,} parameters are trained"
        tracker.peaks.begin("shard")
        optimizer = new_optimizer(model, config)
        self.model, self.optimizer = prepare_model(accelerator, prepared.launch, model, optimizer, config.max_grad_norm)
        self.stepper = Stepper(accelerator, self.model, self.optimizer, config.max_grad_norm, config.ema_decay)
        self.averages = self.stepper.averages
        if config.adapter == "none" and rounds_updates(accelerator, prepared.launch, self.model):
            log(f"warning: --dtype {config.dtype}: 16-bit weights lose small updates; leave --dtype out")
        self.untrained = Untrained(accelerator, self.model, self.optimizer, log)
        written = run_dir, config.keep_checkpoints, self.averages, log
        self.checkpoints = Checkpoints(accelerator, prepared.launch, self.model, self.optimizer, *written)
        tracker.phase("sharded")
        tracker.peaks.begin(None)
        self.evaluator = assembly.evaluator(
            self.model,
            validation,
            prepared.longest_answer,
            sharded=prepared.launch.shards_weights,
            between=self.between_answers,
            log=self.note_answering,
        )

    def resume(self) -> None:
        """Load the checkpoint that `--resume` names, if it exists; check that the next checkpoints fit on the disk."""
        accelerator, resume = self.accelerator, self.config.resume
        path, passed_over = decided_by_main(accelerator, lambda: checkpoint.newest(self.run_dir, resume))
        for line in passed_over:
            self.tracker.log(line)
        saved, layout = manifest.about(path) if path else {}, layout_of(accelerator)
        self.train_step = self.new_train_step(saved.get("batching") if saved.get("layout") == layout else None)
        if self.config.loss != "sft":
            self.prefer()
        if path:
            saved = checkpoint.load(accelerator, self.model, self.optimizer, path, self.averages)
            extra = shards.read_extra(path)
            self.stepper.adapter.set_extra_state(self.stepper.adapted, extra, accelerator.device)
            self.state = TrainState.of(saved, path)
            if resume != "auto" and accelerator.is_main_process:
                for aside in checkpoint.undo_after(self.run_dir, self.state.step):
                    self.tracker.log(f"{aside}: this checkpoint was renamed, because the resumed run repeats its step")
            changes = differences(saved["layout"], layout)
            how = f"; written under another layout ({'; '.join(changes)})" if changes else ""
            self.tracker.log(f"resumed {path} at step {self.state.step} of {self.plan.total_steps}{how}")
        self.tracker.rewind(self.state.step, self.state.evaluated_step == self.state.step, saved.get("chain", ""))
        self.anomalies.rewind(self.state.step)
        self.tracker.phase("ready")
        self.tracker.phases()
        self.saved_step = self.state.step
        if self.config.save_every != "off":
            every, total = keep_every(self.config.keep_checkpoints), self.plan.total_steps
            count = total // every - self.state.step // every if every else 1
            averaged = self.averages is not None
            check_disk(accelerator, self.model, self.run_dir, averaged=averaged, checkpoints=max(count, 1))

    def new_train_step(self, before: dict[str, Any] | None) -> TrainStep:
        """Make the train step. A resumed run keeps its recorded batching, unless the settings name a different one. The
        chosen batching is recorded."""
        job = [self.prepared.fingerprint(), self.plan.global_batch_size]
        if before is None and self.config.resume != "off":
            before = choice.read(self.accelerator, self.run_dir, job)
        restored = choice.restored(before, self.batching_asked)
        pad_token_id, blank = self.prepared.assembly.tokenizer.pad_token_id, self.prepared.assembly.blank
        run, some = (self.accelerator, self.model, self.config), self.train_examples.some()
        trial = Trial(*run, some, pad_token_id, blank=blank, job=self.prediction.job)
        if self.config.use_liger_kernel:
            self.tracker.log(use_liger_kernels(trial))
        # the validation loss is computed in the same layout
        batching, message = choose_batching(trial, before=restored, also=self.prepared.validation.kept.extremes())
        self.tracker.log(f"model     {self.trained}; {message}")
        choice.write(self.accelerator, self.run_dir, self.batching_asked, batching, job)
        return TrainStep(self.stepper, batching, pad_token_id, self.run_dir, self.tracker.log, blank)

    def prefer(self) -> None:
        """Set the loss of pairs. Called before a checkpoint is loaded, because the reference is the initial model."""
        initial = InitialModel(self.accelerator, self.model, self.train_step.batching, self.prepared, self.tracker.log)
        self.train_step.objective = initial.train_loss()
        if self.prepared.pairs and self.config.eval_every != "off":
            self.evaluator.further = initial.validation_metrics(self.prepared.pairs.kept)

    def train(self) -> None:
        """Evaluate the untrained model, then train to the end. On a signal, save a checkpoint and end the run.

        From now on, a signal only requests a stop after the current step. `finalize` is never interrupted: it takes
        seconds, and cannot be resumed halfway.
        """
        self.signals.deferred = True
        with self.tracker.profiler() as profiler:  # the trace is slow to write, so the checkpoint is written first
            try:
                self.evaluate_and_save()  # including an evaluation that a signal prevented in an earlier start
                self.loop(profiler)
            except Interruption:
                self.save(wait=True)
                raise

    def loop(self, profiler: Any) -> None:
        """Make optimizer steps until the plan ends, patience runs out, or a signal comes."""
        plan, stepper, state, config = self.plan, self.stepper, self.state, self.config
        masks = row_groups(self.accelerator)[1]  # ranks that compute the same rows draw the same dropout masks
        phase = "first_step"  # the first step allocates AdamW's moments
        gc.collect()  # free unreachable objects, such as tensors of a failed trial, before the freeze
        gc.freeze()  # all objects so far live to the end: the collector need not scan them during steps
        self.model.train()
        while state.step < plan.total_steps and not state.out_of_patience(config.patience):
            started = time.perf_counter()
            self.tracker.peaks.begin(phase)
            rows = plan.examples(state.step)
            tokens, supervised_tokens = int(plan.lengths[rows].sum()), int(plan.supervised[rows].sum())
            rate = learning_rate(state.step, plan.total_steps, config)
            stepper.set_learning_rate(rate)
            _seed(self.accelerator.device, plan.seed_of(state.step, masks))
            with span(BATCHES):
                examples = self.train_examples.take(rows.tolist())
                following = (
                    self.train_examples.take(plan.examples(state.step + 1).tolist()) if self.looks_ahead() else []
                )
            terms = supervised_tokens if config.loss == "sft" else len(examples)
            share, oom = self.train_step.forward_backward(examples, terms, state.step + 1, following)
            self.signals.exit_if_orphaned()
            (loss, *of_pairs), oom, signal, unwritten, system = reduce_step(
                share, oom, self.signals.number, self.tracker.system(), self.checkpoints.failed
            )
            if oom.tokens:
                self.train_step.retry_smaller(oom, state.step + 1)
                taken()  # only the repetition counts in the step's time
                continue
            grad_norm, phase = stepper.update(state.step), "step"
            state.step += 1
            self.anomalies.look(state.step, loss, grad_norm, examples)
            self.untrained.look(grad_norm, last=state.step == plan.total_steps)
            seconds = time.perf_counter() - started
            state.seconds, state.tokens = state.seconds + seconds, state.tokens + tokens
            record = {
                "step": state.step,
                "epoch": plan.epoch(state.step),
                "loss": loss,
                "grad_norm": grad_norm,
                "learning_rate": rate,
                "supervised_tokens": supervised_tokens,
                **dict(zip(PAIR_METRICS, of_pairs, strict=False)),
                **self.prediction.mfu(self.train_step, supervised_tokens, grad_norm, seconds),
                "tokens": tokens,
                "seconds": seconds,
            }
            self.tracker.step(record, system, self.train_step.forward_seconds())
            if self.on_step:
                self.on_step(record, self.train_step.batching)
            profiler.step()
            if unwritten:
                self.checkpoints.finish()  # if one rank failed to write, all ranks raise
            self.stop_if(signal)
            self.evaluate_and_save()

    def looks_ahead(self) -> bool:
        """Whether to preprocess the next step's images during this step; not on a CPU, which is never idle."""
        images, more = len(self.train_examples.pictured), self.state.step + 1 < self.plan.total_steps
        return bool(images) and more and self.accelerator.device.type != "cpu"

    @span(PAUSE)
    def evaluate_and_save(self) -> None:
        """Evaluate and save if due at this step, unless already done."""
        state, config = self.state, self.config
        evaluated = state.step in (0, self.plan.total_steps) and config.eval_every != "off"
        if state.evaluated_step != state.step and (evaluated or self.plan.is_due(config.eval_every, state.step)):
            with self.averaged():
                self.evaluate()
        if self.saved_step != state.step and self.plan.is_due(config.save_every, state.step):
            self.save()

    def stop_if(self, signal: int) -> None:
        """Raise Interruption if there was a signal; `signal` is the same on all ranks."""
        if signal:
            raise Interruption(signal, self.state.step, resume_command(self.run_dir.path, self.config.output_dir))

    def between_answers(self) -> None:
        """Let a signal end an evaluation, on all ranks, before its next batch of answers."""
        self.stop_if(int(largest_of_ranks(self.signals.number)))

    def note_answering(self, line: str) -> None:
        """Keep this line about answer generation for result.json. Show it only if generation is slower than usual."""
        self.answering.append(line)
        if not line.startswith("answers: "):
            self.tracker.log(line)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context, the model has the averages of its weights, if `--ema-decay` is given.

        After an error, the averages stay in the model: swapping back is a collective, which ranks without an error
        would not join.
        """
        if self.averages is None:
            yield
            return
        self.averages.put_in()
        try:
            yield
        except Interruption:
            self.averages.take_out()
            raise
        self.averages.take_out()

    def evaluate(self) -> None:
        """Evaluate the current weights; export them as best/ if they are the best so far."""
        state = self.state
        self.tracker.peaks.begin("evaluate")
        with torch.compiler.set_stance("force_eager"):  # each token of an answer makes a new shape
            evaluation = self.evaluator(self.model, self.train_step.batching)
        self.tracker.evaluation(state.step, evaluation.metrics, evaluation.samples)
        state.latest, state.evaluated_step = {**evaluation.metrics, **self.load_peaks}, state.step
        if state.step == 0:
            state.before = state.latest
            return
        metric = evaluation.metrics[self.task.main_metric]
        loss = evaluation.metrics.get(PAIR_LOSS, evaluation.metrics["eval_loss"])
        if math.isnan(metric):
            self.tracker.log(f"step {state.step}: {self.task.main_metric} is NaN, which is never the best")
        if state.update_best(metric, loss, self.task.higher_is_better):
            self.export(self.run_dir.best, behind=self.checkpoints)

    def export(self, target: Path, scored: str = "these weights", behind: Checkpoints | None = None) -> None:
        """Write the current weights, with a model card, for plain transformers or peft; `scored` names the weights that
        the card's scores belong to. An export written in the background (`behind`) is complete before the next
        checkpoint."""
        self.tracker.peaks.begin("export")
        about = self.model_class, scored, self.left_out
        card = summary.card(self.task_name, self.prepared, self.state, *about)
        tokenizer, written = self.prepared.assembly.tokenizer, (card, self.beside, behind)
        checkpoint.export(self.accelerator, self.model, tokenizer, target, *written, **self.exported)

    def save(self, wait: bool = False) -> None:
        """Begin a checkpoint of this step, with counters, metrics and batching so far; with `wait`, complete it."""
        batching = choice.recorded(self.batching_asked, self.train_step.batching)  # a resumed run uses it
        self.signals.exit_if_orphaned()
        self.tracker.flush()
        saved = {"step": self.state.step, "progress": dataclasses.asdict(self.state), "batching": batching}
        saved |= self.evidence()
        self.tracker.peaks.begin("save")
        self.checkpoints.save(saved, self.stepper.adapter.extra_state(self.stepper.adapted), wait=wait)
        self.saved_step = self.state.step

    def evidence(self) -> dict[str, Any]:
        """Evidence that `verify` compares the run's records with; complete on rank 0 only."""
        return {"chain": self.tracker.chain, "made_by": self.made_by}

    def finalize(self) -> None:
        """Export final/ and final-plain/, write result.json and report.md, and print the metrics before and after."""
        with self.averaged():
            self.export(self.run_dir.final)
        if self.averages:
            self.export(self.run_dir.final_plain, "the averages of these weights (in final/)")
        self.checkpoints.finish()
        measured = {
            **self.prediction.measured(self.tracker, self.train_step),
            "answering": self.answering,
            "trained_parameters": self.trained_parameters,
            "steps_left_out": self.anomalies.left_out(),
            "without_gradient": self.untrained.names,
            "batching": dataclasses.asdict(self.train_step.batching),
            "phases": self.tracker.phases(),
            **self.tracker.watched(),
        }
        if self.accelerator.is_main_process:
            self.tracker.close()
            run = self.run_dir, self.task_name, self.prepared, self.state
            for line in summary.publish(*run, measured, self.evidence()):
                self.tracker.log(line)
        self.accelerator.wait_for_everyone()


def _seed(device: torch.device, seed: int) -> None:
    """Seed a step's random numbers. On a CPU, `torch.manual_seed` would also record the call's stack for GPUs that are
    not started, which takes half a millisecond each time."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
