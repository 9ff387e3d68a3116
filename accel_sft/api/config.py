"""The trainer's settings, their defaults and limits, validated together before anything is loaded. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from accel_sft.api.adapters import ADAPTERS
from accel_sft.api.options import option, problems, shown

MODEL, ADAPTER, DATA, OPTIM, EVAL, RUN = "Model", "Adapter", "Data", "Optimisation", "Evaluation", "Run"


@dataclasses.dataclass(kw_only=True)
class TrainConfig:
    """Every option of a training run. Where the default is None, the value comes from `--model` or from the data."""

    model: str = option("tiny", section=MODEL, help="Hub id, local folder, or `tiny` (built on the spot).")
    init_from: str | None = option(None, section=MODEL, help="Start from the weights of an earlier run's folder.")
    trust_remote_code: bool = option(False, section=MODEL, help="Run code that comes with the model (off: refuse it).")
    dtype: str = option(
        "auto",
        section=MODEL,
        choices=("auto", "float32", "bfloat16", "float16"),
        help="Weights are loaded as; auto: float32 where trained, the launch's precision where frozen.",
    )
    attn_implementation: str | None = option(None, section=MODEL, help="eager, sdpa, flash_attention_2, ...")
    gradient_checkpointing: bool = option(False, section=MODEL, help="Recompute activations to save memory.")
    compile: bool = option(False, section=MODEL, help="torch.compile the blocks: slow first steps, faster later ones.")

    adapter: str = option(
        "none", section=ADAPTER, choices=("none", *ADAPTERS), help="Train an adapter instead of all weights."
    )
    lora_r: int = option(8, section=ADAPTER, min=1, help="Rank (adalora: the rank it ends with).")
    lora_alpha: int = option(16, section=ADAPTER, min=1, help="Scale: alpha / r.")
    lora_dropout: float = option(0.0, section=ADAPTER, min=0, max=0.99, help="Dropout before the adapter.")
    lora_target_modules: str = option(
        "all-linear", section=ADAPTER, help="Module names separated by commas, or all-linear (all but the head)."
    )

    max_length: int | None = option(None, section=DATA, min=2, help="Tokens per example; longer ones are reported.")
    truncation: str = option(
        "drop",
        section=DATA,
        choices=("drop", "right", "error"),
        help="Examples above --max-length: left out, cut at the right end, or an error. Always counted and named.",
    )
    global_batch_size: int | None = option(
        None, section=DATA, min=1, help="Examples per optimizer step, over all ranks."
    )
    micro_batch_size: str = option("auto", section=DATA, help="Examples per forward on one rank, or auto.")
    batching: str = option(
        "auto",
        section=DATA,
        choices=("auto", "shared", "packed", "padded"),
        help="Rows of a forward: behind one copy of what they share, packed, or padded; auto: the least work.",
    )
    epochs: float | None = option(None, section=DATA, min=0, help="Passes over the training examples.")
    max_steps: int | None = option(None, section=DATA, min=1, help="Optimizer steps; wins over --epochs.")

    learning_rate: float | None = option(None, section=OPTIM, min=0, help="Peak learning rate.")
    lr_scheduler: str = option("cosine", section=OPTIM, choices=("cosine", "linear", "constant"), help="After warm-up.")
    warmup_ratio: float = option(0.03, section=OPTIM, min=0, max=1, help="Share of the steps that warm up.")
    weight_decay: float | None = option(None, section=OPTIM, min=0, help="AdamW's, on matrices only.")
    adam_beta1: float = option(0.9, section=OPTIM, min=0, max=0.9999, help="AdamW's first moment decay.")
    adam_beta2: float | None = option(None, section=OPTIM, min=0, max=0.9999, help="AdamW's second moment decay.")
    max_grad_norm: float = option(1.0, section=OPTIM, min=0, help="Clip the gradient to this norm; 0: never.")
    on_nonfinite: str = option(
        "stop",
        section=OPTIM,
        choices=("stop", "skip"),
        help="A step whose loss or gradient is NaN or infinite changes no weights: stop there, or skip it.",
    )

    eval_every: str = option(
        "auto", section=EVAL, help="Steps between evaluations, epoch, off, or auto (about 4 a run)."
    )
    eval_limit: int | None = option(None, section=EVAL, min=1, help="Evaluate on the first N validation examples only.")
    eval_batch_size: int | None = option(
        None, section=EVAL, min=1, help="Questions answered at once on one rank; default: 64, short ones up to 256."
    )
    max_new_tokens: int | None = option(
        None, section=EVAL, min=1, help="Tokens generated; default: the longest answer's."
    )
    generate_with: str = option(
        "transformers",
        section=EVAL,
        choices=("transformers", "vllm"),
        help="What generates the answers; vllm: `evaluate` only, by the `vllm` on PATH or in $ACCEL_SFT_VLLM.",
    )
    patience: int | None = option(
        None, section=EVAL, min=1, help="Stop after N evaluations without a better main metric."
    )

    output_dir: str | None = option(None, section=RUN, help="The run's own folder; default runs/<task>-<time>.")
    seed: int = option(42, section=RUN, min=0, max=2**31, help="Of initial weights, data order and dropout.")
    save_every: str = option(
        "auto", section=RUN, help="Steps between checkpoints, epoch, off, or auto (with evaluations)."
    )
    keep_checkpoints: int = option(2, section=RUN, min=1, help="Newest checkpoints kept.")
    resume: str = option("off", section=RUN, help="auto (newest complete checkpoint), a checkpoint's folder, or off.")
    hang_timeout: int = option(
        1800, section=RUN, min=0, help="Seconds without progress after which the run ends and names the rank; 0: never."
    )
    log_every: int = option(10, section=RUN, min=1, help="Steps between console lines (files get every step).")
    tracker: str = option(
        "tensorboard", section=RUN, help="Accelerate's trackers by name, commas between: tensorboard, wandb, ...; none."
    )
    profile: bool = option(False, section=RUN, help="Write a torch profiler trace of steps 3-5 for TensorBoard.")
    dry_run: bool = option(False, section=RUN, help="Audit the launch, print what is resolved, and stop.")
    debug: bool = option(False, section=RUN, help="Tracebacks, and the libraries' own messages.")

    def problems(self) -> list[str]:
        """What is wrong, one line each, naming the flag and the value to give."""
        found = problems(self)
        for name in ("eval_every", "save_every"):
            value = getattr(self, name)
            if value not in ("auto", "epoch", "off") and not _positive(value):
                found.append(
                    f"--{name.replace('_', '-')} {shown(str(value))}: expected a number of steps, auto, epoch or off"
                )
        if self.micro_batch_size != "auto" and not _positive(self.micro_batch_size):
            found.append(
                f"--micro-batch-size {shown(str(self.micro_batch_size))}: expected a number of examples or auto"
            )
        if self.patience and self.eval_every == "off":
            found.append("--patience needs evaluations: set --eval-every")
        if self.init_from and self.model != "tiny":
            found.append("--init-from takes the model of the earlier run: leave --model out")
        if self.resume != "off" and not self.output_dir:
            found.append(f"--resume {shown(str(self.resume))}: name the run's folder with --output-dir")
        return found

    def resolved(self, defaults: dict[str, Any]) -> TrainConfig:
        """A copy in which every None that has a usual value is replaced by it.

        Args:
            defaults: values that suit the model better than the usual ones.
        """
        values = {**_USUAL, **defaults}
        if self.adapter != "none":
            values = {**values, "learning_rate": max(values["learning_rate"], _ADAPTER_LEARNING_RATE)}
        if self.epochs is not None and self.max_steps is None:  # an explicit length wins over a default one
            values["max_steps"] = None
        unset = {key: value for key, value in values.items() if getattr(self, key) is None}
        resolved = dataclasses.replace(self, **unset)
        return resolved if resolved.max_steps is None else dataclasses.replace(resolved, epochs=None)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_ADAPTER_LEARNING_RATE = 1e-4
_USUAL: dict[str, Any] = {
    "max_length": 2048,
    "global_batch_size": 32,
    "epochs": 1.0,
    "max_steps": None,
    "learning_rate": 2e-5,
    "weight_decay": 0.1,
    "adam_beta2": 0.999,
}

LAYOUT = frozenset(
    {"micro_batch_size", "eval_batch_size", "output_dir", "save_every", "keep_checkpoints", "resume", "log_every"}
    | {"tracker", "profile", "dry_run", "debug", "attn_implementation", "gradient_checkpointing", "eval_every"}
    | {"patience", "batching", "compile", "generate_with", "on_nonfinite", "hang_timeout"}
)
"""Settings that decide how a run is executed or observed, not what a step computes: a resume may change them."""


_MOST_DIGITS = 18
"""Most digits of a number of steps or examples: Python refuses to convert very long ones."""


def _positive(text: str) -> bool:
    return isinstance(text, str) and text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) > 0


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each setting of the mathematics in which a resumed run differs from what its folder records."""
    lines = []
    for key in sorted(before.keys() | after.keys()):
        if key not in LAYOUT and before.get(key) != after.get(key):
            flag = "--" + key.replace("_", "-")
            lines.append(f"{flag}: the run was started with {before.get(key)}, not {after.get(key)}")
    return lines
