"""Predicts a run's memory, refuses a launch that cannot fit, and compares the prediction with the measured peaks. Also
computes a step's MFU."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.launch import host_memory
from accel_sft.launch.collectives import by_each_rank, largest
from accel_sft.launch.info import Launch
from accel_sft.memory.estimate import Estimate, estimate, loading_bytes, totals
from accel_sft.memory.flops import model_flops, peak_flops
from accel_sft.memory.job import AS_CONFIGURED, Job
from accel_sft.memory.model_config import UnusableModel, read_config, read_shape, stored_bytes
from accel_sft.memory.states import least_bytes
from accel_sft.tracking.tracker import Tracker
from accel_sft.training.step import TrainStep

GIB = 2**30


class Prediction:
    """The prediction of this run's memory by formulas; all ranks make it together, before the model is loaded.

    A model whose parameters cannot be counted gets no prediction; this is logged, and the run continues. If the model
    states alone do not fit on some rank, all ranks raise UserError, unless `--force` is given.
    """

    def __init__(
        self, accelerator: Accelerator, launch: Launch, config: TrainConfig, weights: str, log: Callable[[str], None]
    ) -> None:
        self.job = job_of_run(config, weights, launch, accelerator.device, log)
        # with --train-only, FLOPs depend on how far down the backward goes, which is not counted
        self.flops = model_flops(self.job) if self.job and self.job.train_only is None else None
        peak = _peak_flops(accelerator.device, self.job) if self.job else None
        self.peak_flops = peak * launch.world_size if peak else None  # of all devices
        lines = by_each_rank(lambda: _misfits(self.job, config.force) if self.job else [])
        for line in dict.fromkeys(line for of_rank in lines for line in of_rank):
            log(line)

    def mfu(self, train_step: TrainStep, supervised_tokens: int, grad_norm: float, seconds: float) -> dict[str, float]:
        """`mfu` of the last step, as a share of all devices' peak, for the step's line of metrics.jsonl. Empty if the
        peak is unknown, or if the step trained nothing because its gradient norm was 0, infinite or NaN."""
        if self.flops is None or self.peak_flops is None or not 0 < grad_norm < math.inf:
            return {}
        tokens, pairs = train_step.computed()
        flops = self.flops.total(tokens, min(supervised_tokens, tokens), pairs)
        return {"mfu": flops / (seconds * self.peak_flops)}

    def measured(self, tracker: Tracker, train_step: TrainStep) -> dict[str, Any]:
        """Measured memory for result.json: the largest peaks, each phase's peak, and the prediction for the largest
        forward (its tokens, supervised tokens, rows and pixels). A collective."""
        peaks = largest(tracker.peaks.largest())
        by_phase = {phase: largest(own) for phase, own in tracker.peaks.by_phase.items()}
        memory, (tokens, supervised_tokens, rows, copied_keys) = {}, train_step.largest_forward
        if self.job is not None and supervised_tokens and self.job.launch.sequence_ranks == 1:
            job = dataclasses.replace(
                self.job,
                tokens=tokens,
                supervised_tokens=supervised_tokens,
                rows=rows,
                pixels=train_step.most_pixels,
                head=train_step.batching.head,
                copied_keys=copied_keys if train_step.batching.layout == "shared" else 0,
                in_cache=train_step.batching.attention == "cache",
            )
            memory = _beside(estimate(job), by_phase)
        forward = [tokens, supervised_tokens, rows, train_step.most_pixels]
        return {**peaks, "memory_by_phase": by_phase, "memory": memory, "forward": forward}


def device_name(device: torch.device) -> str:
    """The name of a GPU, as its driver gives it; "" for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _peak_flops(device: torch.device, job: Job) -> float | None:
    """Peak FLOP/s of this rank's device for the dtype of its matrix products; None if unknown."""
    precision = job.precision
    if precision == "no":
        float32 = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(job.dtype, float32)
    return peak_flops(device_name(device), precision)


def job_of_run(
    config: TrainConfig, weights: str, launch: Launch, device: torch.device, log: Callable[[str], None]
) -> Job | None:
    """The run as a `Job`, with a forward of one token, because the real size is chosen later, by free memory. If the
    model's parameters cannot be counted, this is logged, and the result is None."""
    from transformers.utils import cached_file

    try:
        folder = Path(weights)
        if not folder.is_dir():
            folder = Path(str(cached_file(weights, "config.json"))).parent
        content = read_config(folder)
        job = Job(
            shape=read_shape(content, weights),
            launch=launch,
            device=device.type,
            stored_bytes=stored_bytes(content),
            target_modules=config.lora_target_modules,
            **{name: getattr(config, name) for name in AS_CONFIGURED},
            tokens=1,
            supervised_tokens=1,
            eval_rows=0 if config.eval_every == "off" else 1,
            saves=config.save_every != "off",
        )
        return job if job.trained else None  # 0: no module matches; loading raises the error for it
    except UnusableModel:
        raise
    except (UserError, OSError, ValueError) as error:
        log(f"memory is not predicted: {error}")
        return None


def _misfits(job: Job, force: bool) -> list[str]:
    """Return warnings if the run may not fit in this rank's free memory, else []. If the model states alone do not fit,
    raise UserError unless `force`."""
    free = {"host": float(host_memory.free_bytes())}
    if job.device == "cuda":
        free["device"] = float(torch.cuda.mem_get_info()[0])
    where = {"device": "a GPU", "host": f"{job.local_ranks} processes in host memory"}
    device, host = least_bytes(job)
    least = {"device": device, "host": max(host, loading_bytes(job)) * job.local_ranks}
    if job.on_cpu:
        least = {"host": (device + host) * job.local_ranks}
    predicted = estimate(job)
    peaks = {"device": predicted.device_peak_bytes, "host": predicted.host_needed_bytes}

    def line(place: str, need: str, size: float) -> str:
        sizes = f"{size / GIB:.1f} GiB, but only {free[place] / GIB:.1f} GiB are free"
        return f"{where[place]}: {need} {sizes}; see `accel-sft plan` for a launch that fits"

    states = "the model states alone take"
    lines = [line(place, states, size) for place, size in least.items() if size > free.get(place, math.inf)]
    if lines and not force:
        raise UserError(*(f"{text}, or add --force" for text in lines))
    peak = "memory may run out: the predicted peak is"
    return lines or [line(place, peak, peaks[place]) for place in predicted.over(free.get("device"), free["host"])]


def _beside(predicted: Estimate, measured: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Predicted and measured GiB by place (device, host) and phase; the prediction also by component.

    Torch measures only its allocator's memory, so for devices the prediction leaves out `overhead`.
    """
    inside = {phase: {**parts, "overhead": 0.0} for phase, parts in predicted.device.items()}
    places = {"device": (inside, "peak_device_memory_gib"), "host": (predicted.host, "peak_host_memory_gib")}
    compared: dict[str, dict[str, dict[str, Any]]] = {}
    for place, (memory, key) in places.items():
        for phase, size in totals(memory).items():
            if (peak := measured.get(phase, {}).get(key)) is not None:
                parts = {name: part / GIB for name, part in memory[phase].items()}
                numbers = {"predicted_gib": size / GIB, "measured_gib": peak, "components_gib": parts}
                compared.setdefault(place, {})[phase] = numbers
    return compared
