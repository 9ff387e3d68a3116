"""A script for two real ranks: runs one small job under several layouts, each of which also resumes another's state.

    accelerate launch --config_file accelerate_configs/ddp.yaml tests/support/layouts.py FOLDER [resumed] LAYOUT ...

Writes FOLDER/found.json, which tests/laws/test_layouts.py reads. With `resumed`, which any number of ranks can run, it
has the losses and digests of an uninterrupted run and a resumed one alone.
"""

# ruff: noqa: E402, the environment comes before torch

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import math
import os
import sys
import threading
from pathlib import Path
from unittest import mock

from places import CONFIGS

from accel_sft.launch.environment import prepare_environment

prepare_environment()

import cpuinfo
import fsdp2_on_cpu
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import gather_object
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from fake_memory import Device
from transformers import LlamaConfig, LlamaForCausalLM

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import HEADS
from accel_sft.batching.trial import Trial
from accel_sft.chat.encoded import Encoded
from accel_sft.checkpoint import checkpoint, shards
from accel_sft.checkpoint.background import Checkpoints
from accel_sft.checkpoint.partition import MOMENTS, flat, partitions
from accel_sft.io.run_dir import RunDir
from accel_sft.launch import accelerator
from accel_sft.launch.info import launch_of_this_process, launch_of_yaml
from accel_sft.memory.job import Job as Planned
from accel_sft.memory.model_config import read_shape
from accel_sft.training import step as training_step
from accel_sft.training.optimizer import Stepper, new_optimizer

DECAY = 0.6
SETTINGS = ("ACCELERATE_", "FSDP_")
STEPS, STOP = 5, 3
ROWS = [Encoded(index, [3 + (7 * index + at) % 60 for at in range(6 + index % 3)], 2) for index in range(6)]


class Job:
    """A model under a layout, at step 0."""

    def __init__(self, yaml: str, precision: str, dropout: float, folder: Path) -> None:
        halves = precision == "bfloat16"  # weights and moments themselves are bfloat16, as with --dtype
        precision = "no" if halves else precision
        for name in [name for name in os.environ if name.startswith(SETTINGS)]:
            del os.environ[name]
        told = launch_of_yaml(CONFIGS / f"{yaml}.yaml", "--mixed_precision", precision).environment
        os.environ.update({name: value for name, value in told.items() if name.startswith(SETTINGS)})
        AcceleratorState._reset_state(reset_partial_state=True)
        config = TrainConfig(adapter="none", adam_beta2=0.95).resolved({})
        # the launcher of these ranks names none
        launch = dataclasses.replace(launch_of_this_process(), users_precision_variable=precision)
        self.accelerator, self.launch = accelerator.create_accelerator(config, launch)
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": dropout}
        model = LlamaForCausalLM(LlamaConfig(**shape, **heads))
        model.lm_head.weight.requires_grad_(False)  # frozen weights stay the source's
        if halves or (precision == "bf16" and os.environ.get("ACCELERATE_USE_DEEPSPEED")):
            model.to(torch.bfloat16)
        self.model, self.optimizer = accelerator.prepare_model(
            self.accelerator, self.launch, model.train(), new_optimizer(model, config), config.max_grad_norm
        )
        self.stepper = Stepper(self.accelerator, self.model, self.optimizer, config.max_grad_norm, DECAY)
        self.averages = self.stepper.averages
        self.folder = folder
        self.is_last = self.accelerator.process_index == self.accelerator.num_processes - 1
        self.two_rows = Batching("padded", 0, rows=2).batch(ROWS[:2], 0, torch.device("cpu"))
        self.forwards_of(rows=2)

    def forwards_of(self, rows: int) -> None:
        padded = Batching("padded", 0, rows=rows)
        self.train_step = training_step.TrainStep(self.stepper, padded, 0, RunDir(self.folder), print)

    def steps(self, begin: int, end: int) -> list[float]:
        """Make the steps from `begin` up to `end`; returns their losses."""
        losses, rank, step = [], self.accelerator.process_index, begin
        supervised = sum(row.supervised_tokens for row in ROWS)
        while step < end:
            torch.manual_seed(100 * step + rank)
            share, oom = self.train_step.forward_backward(list(ROWS), supervised, step)
            (loss,), oom, *_ = training_step.reduce_step(share, oom, 0, [])
            if oom.tokens:
                self.train_step.retry_smaller(oom, step)
                continue
            self.stepper.set_learning_rate(0.01)
            self.stepper.update(step)
            losses.append(loss)
            step += 1
        return losses

    def spoiled(self, how: str) -> dict[str, bool]:
        """Whether a step whose loss, or only its gradient, is infinite on the last rank showed it in its loss, whether
        the state was kept, and whether the normal step after it changed the state."""
        nll_sum = training_step.nll_sum

        def spoiling(*arguments):
            value = nll_sum(*arguments)
            if not self.is_last:
                return value
            if how == "loss":
                return value + math.inf  # its gradients are finite
            value.register_hook(lambda gradient: gradient * math.inf)
            return value

        before = self.digest()
        with mock.patch.object(training_step, "nll_sum", spoiling):
            (loss,) = self.steps(0, 1)
        after = self.digest()
        self.steps(0, 1)
        return {
            "told": math.isfinite(loss) == (how != "loss"),
            "kept": after == before,
            "goes on": self.digest() != after,
        }

    @contextlib.contextmanager
    def cramped(self, tokens: int):
        """While inside, forwards of more than `tokens` tokens are out of memory on the last rank."""

        def look(module, inputs):
            if self.is_last and torch.is_grad_enabled() and inputs[0].numel() > tokens:
                raise torch.OutOfMemoryError("no room")

        hook = self.accelerator.unwrap_model(self.model).model.embed_tokens.register_forward_pre_hook(look)
        yield
        hook.remove()

    def save(self, run_dir: Path, error: OSError | None = None) -> Path:
        """Begin a checkpoint, of which nothing is written before `written` is called; then comes the error."""
        where = self.launch, self.model, self.optimizer, RunDir(run_dir)
        self.checkpoints, self.held = Checkpoints(self.accelerator, *where, "1", self.averages), threading.Event()
        write = shards.write

        def later(*arguments, **options):
            self.held.wait()
            if error:
                raise error
            return write(*arguments, **options)

        with mock.patch.object(shards, "write", later):
            return self.checkpoints.save({"step": STOP})

    def refused(self, run_dir: Path) -> list[object]:
        """What each rank knows, and says, after the last one found the disk full."""
        path = self.save(run_dir, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if self.is_last else None)
        self.held.set()
        self.checkpoints._written.exception()
        none = torch.zeros(1), training_step.OutOfMemory(), 0, []
        told, said = training_step.reduce_step(*none, self.checkpoints.failed)[3], "nothing"
        try:
            self.checkpoints.finish()
        except UserError as error:
            said = str(error)
        return gather_object([[self.checkpoints.failed, told, said, path.exists()]])

    def written(self) -> None:
        self.held.set()
        self.checkpoints.finish()

    def load(self, path: Path) -> None:
        checkpoint.load(self.accelerator, self.model, self.optimizer, path, self.averages)

    def averaged(self) -> list[float]:
        """The loss of two rows with the averages in the weights' place, and numbers that tell each weight's average."""
        self.averages.put_in()
        self.model.eval()
        with torch.no_grad():
            loss = training_step.nll_sum(self.model, self.two_rows).item()
        weights = self.accelerator.get_state_dict(self.model) or {}
        self.model.train()
        numbers = [told(weights[name].float()) for name in sorted(weights)]
        self.averages.take_out()
        return [loss, *numbers]

    def digest(self) -> str:
        """SHA-256, on each rank, of the whole weights in their own precision, and of the rank's optimizer state and
        averages, without what pads them to one size on all ranks."""
        digest = hashlib.sha256()
        for _, weight in sorted((self.accelerator.get_state_dict(self.model) or {}).items()):
            digest.update(bits(weight))
        every = partitions(self.accelerator, self.model, self.optimizer)
        for held, average in zip(every, self.averages.tensors, strict=True):
            moments = [flat(held.state[key]) for key in MOMENTS if MOMENTS[0] in held.state]
            for tensor in (*moments, average):
                for span in held.spans:
                    digest.update(bits(tensor[span.offset : span.offset + span.size]))
        return " ".join(gather_object([digest.hexdigest()]))


def memory(yaml: str, precision: str, folder: Path) -> dict[str, int]:
    """Bytes reserved for the first steps, bytes that they left allocated, and their peak without activations."""
    with Device() as device:
        job = Job(yaml, precision, 0.0, folder)
        shape = read_shape(job.accelerator.unwrap_model(job.model).config.to_dict(), "model")
        planned = Planned(shape=shape, launch=job.launch, device="cuda", stored_bytes=4)
        trial = Trial(job.accelerator, job.model, TrainConfig().resolved({}), ROWS, 0, job=planned)
        before, device.peak = device.live, device.live
        if job.stepper.forwards_alone:  # else the peak also has gathered weights and activations
            trial.run(job.train_step.batching, ROWS[:2])
        activations = device.peak - before
        reserved = trial.reserved()
        job.steps(0, 2)
        found = {"reserved": reserved, "left": device.live - before}
        return found | ({"peak": device.peak - before - activations} if job.stepper.forwards_alone else {})


def under_fsdp2(folder: Path) -> dict[str, bool]:
    """Whether gradients between micro-batches are this rank's shards, whether losses and averaged gradients are float32
    in a bf16 run, and whether weights that an evaluation of averages left gathered are gathered anew."""
    reduced = Job("fsdp2", "bf16", 0.0, folder)
    two_at_once = dataclasses.replace(reduced.two_rows, most_logits=64)
    losses = HEADS["pieces"](reduced.model, two_at_once)  # within the model
    reduced.stepper.backward(losses.sum())
    averages = reduced.accelerator.state.fsdp_plugin.mixed_precision_policy.reduce_dtype
    job = Job("fsdp2", "no", 0.0, folder)
    with job.stepper.boundary(last=False):
        job.stepper.backward(training_step.nll_sum(job.model, job.two_rows))
    trained = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
    shards = sum(parameter.to_local().numel() for parameter in trained)
    later = []
    for averaged in (False, True):
        kept = Job("fsdp2", "no", 0.0, folder)
        kept.model.set_reshard_after_forward(False)  # what an evaluation gathers is there afterwards
        kept.steps(0, 2)
        if averaged:
            kept.averages.put_in()
            with torch.no_grad():
                training_step.nll_sum(kept.model, kept.two_rows)
            kept.averages.take_out()
        later.append(kept.steps(2, 4))
    return {
        "restored": later[0] == later[1],
        "gradients": all(parameter.grad is not None for parameter in trained),
        "losses": not torch.equal(losses, losses.bfloat16().float()),
        "averages": averages == torch.float32,
        "sharded": shards < sum(parameter.numel() for parameter in trained),
    }


def norms(yaml: str, folder: Path) -> list[float]:
    """Norms of the same gradient in bf16: of one forward, and of the mean over 16 equal forwards.

    Summed in bf16, these are off by more than a thousandth.
    """
    found = []
    for forwards in (1, 16):
        job = Job(yaml, "bf16", 0.0, folder)
        for number in range(forwards):
            with job.stepper.boundary(last=number == forwards - 1):
                job.stepper.backward(training_step.nll_sum(job.model, job.two_rows) / forwards)
        found.append(job.stepper.update(0))
    return found


def beside_the_buckets(folder: Path) -> int:
    """Bytes of the gradients, in the first step's first backward, that are not views of DDP's buckets."""
    job = Job("ddp", "no", 0.0, folder)
    held: list[dict[int, int]] = []
    for last in (False, True):
        with job.stepper.boundary(last=last):
            job.stepper.backward(training_step.nll_sum(job.model, job.two_rows))
        gradients = [p.grad.untyped_storage() for p in job.model.parameters() if p.grad is not None]
        held.append({storage.data_ptr(): storage.nbytes() for storage in gradients})
    return sum(size for at, size in held[0].items() if at not in held[1])


def as_on_a_gpu() -> None:
    """From now on, Twin-Flow has a device beside the host, to which DeepSpeed gives no other name than "cpu"."""
    make_states = DeepSpeedZeroOptimizer_Stage3.initialize_optimizer_states

    def placed(zero: DeepSpeedZeroOptimizer_Stage3) -> None:
        groups = len(zero.fp16_groups)
        for at in range(int((1 - zero.partial_offload) * groups)) if zero.offload_optimizer else ():
            zero.subgroup_to_device[at] = "cpu:0"
        make_states(zero)

    DeepSpeedZeroOptimizer_Stage3.initialize_optimizer_states = placed


def averages_by_hand(folder: Path) -> dict[str, list[float]]:
    """What `Job.averaged` tells of each weight, and the same of averages that are computed here."""
    job = Job("ddp", "no", 0.0, folder)
    averages = {name: weight.clone() for name, weight in job.accelerator.get_state_dict(job.model).items()}
    for step in range(STEPS):
        job.steps(step, step + 1)
        decay = min(DECAY, (1 + step) / (10 + step))
        for name, weight in job.accelerator.get_state_dict(job.model).items():
            averages[name] = decay * averages[name] + (1 - decay) * weight
    return {"got": job.averaged()[1:], "expected": [told(averages[name]) for name in sorted(averages)]}


def told(weight: torch.Tensor) -> float:
    return (weight.flatten() * torch.linspace(1, 2, weight.numel())).sum().item()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def resumed(yaml: str, precision: str, folder: Path) -> tuple[Job, Job, dict[str, object]]:
    """An uninterrupted run, one that resumes its checkpoint, and the losses and final digests of both."""
    run_dir = folder / f"{yaml}-{precision}"
    run_dir.mkdir(exist_ok=True)
    job = Job(yaml, precision, 0.2, run_dir)
    losses = job.steps(0, STOP)
    path = job.save(run_dir)
    job.averaged()  # and the rest as if that had not been
    losses += job.steps(STOP, STEPS)
    assert not path.exists()
    job.written()  # as it was then, although steps have gone on from there
    whole = job.digest()
    again = Job(yaml, precision, 0.2, run_dir)
    again.load(path)
    assert again.steps(STOP, STEPS) == losses[STOP:], f"{yaml} {precision}: other losses"
    return job, again, {"losses": losses, "whole": whole, "resumed": again.digest()}


def everything(folder: Path, layouts: list[str]) -> dict[str, object]:
    as_on_a_gpu()
    # DeepSpeed asks for the processor's name for every optimizer on the host, which starts a process each time
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    found = {}
    for yaml in layouts:
        found[f"{yaml} memory"] = memory(yaml, "bf16", folder)
        if yaml in ("z2", "z3"):
            found[f"{yaml} norms"] = norms(yaml, folder)
    if "ddp" in layouts:
        found["beside the buckets"] = beside_the_buckets(folder)
        found["averages"] = averages_by_hand(folder)
        (folder / "refused").mkdir(exist_ok=True)  # by both ranks
        found["refused"] = Job("ddp", "no", 0.0, folder).refused(folder / "refused")
    for precision in ("no", "bf16", "bfloat16"):
        for yaml in layouts if precision != "bfloat16" else ["ddp"]:
            job, again, record = resumed(yaml, precision, folder)
            parts = partitions(job.accelerator, job.model, job.optimizer)
            record["optimizers"] = sorted({type(each.optimizer).__name__ for each in parts if each.state})
            found[f"{yaml} {precision}"] = {**record, **{how: again.spoiled(how) for how in ("loss", "gradient")}}
    written = {}
    for yaml in layouts:
        job = Job(yaml, "no", 0.0, folder)
        (folder / f"plain-{yaml}").mkdir(exist_ok=True)
        losses = job.steps(0, STOP)
        written[yaml] = job.save(folder / f"plain-{yaml}"), losses + job.steps(STOP, STEPS)
        job.written()
        found[yaml] = {"losses": written[yaml][1], "averaged": job.averaged()}
        if job.stepper.forwards_alone:
            job.load(written[yaml][0])
            job.forwards_of(rows=3)
            with job.cramped(tokens=10):
                found[yaml]["cramped"] = job.steps(STOP, STEPS)
            found[yaml]["tokens"] = job.train_step.batching.tokens
    for at, yaml in enumerate(layouts):
        source = layouts[at - 1]  # each is written once and read once by another
        job = Job(yaml, "no", 0.0, folder)
        job.load(written[source][0])
        got = job.steps(STOP, STEPS)
        found[f"{source} to {yaml}"] = {"expected": written[yaml][1][STOP:], "got": got, "averaged": job.averaged()}
    if "fsdp2" in layouts:
        found["only under fsdp2"] = under_fsdp2(folder)
    return found


if __name__ == "__main__":
    fsdp2_on_cpu.allow()
    folder, *layouts = sys.argv[1:]
    if layouts[0] == "resumed":
        found = {yaml: resumed(yaml, "no", Path(folder))[2] for yaml in layouts[1:]}
    else:
        found = everything(Path(folder), layouts)
    if PartialState().is_main_process:
        Path(folder, "found.json").write_text(json.dumps(found))
    PartialState().wait_for_everyone()
