"""The trainer's settings, with defaults and limits, validated together before anything is loaded. Imports no torch."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import re
from fractions import Fraction
from typing import Any, Self

from accel_sft.api.limits import ADAPTERS, STATE_BYTES, adapter_conflicts
from accel_sft.api.options import chosen, flag_of, option, problems, shown

MODEL, ADAPTER, DATA, OPTIM, EVAL, RUN = SECTIONS = "Model", "Adapter", "Data", "Optimisation", "Evaluation", "Run"
_model, _adapter, _data, _optim, _eval, _run = (functools.partial(option, section=name) for name in SECTIONS)
_DTYPES = "auto", "float32", "bfloat16", "float16"
LOSSES = "sft", "dpo", "ipo"


@dataclasses.dataclass(kw_only=True)
class TrainConfig:
    """Every option of a training run. None means that an option was not given; `resolved` fills in the default."""

    model: str = _model("tiny", basic=True, help="Hub id, folder, or `tiny` (a toy model).")
    revision: str | None = _model(None, help="Branch, tag or commit of --model on the hub; default: main.")
    init_from: str | None = _model(None, basic=True, help="Start from the weights in a run's folder.")
    trust_remote_code: bool = _model(False, help="Run code that comes with the model (off: refuse it).")
    dtype: str = _model(
        "auto", choices=_DTYPES, help="Data type of the weights; auto: float32 if trained, else the launch's precision."
    )
    attn_implementation: str | None = _model(None, help="eager, sdpa, flash_attention_2, or a hub kernel (ORG/REPO).")
    use_liger_kernel: bool = _model(False, help="Use Liger's Triton kernels, after checking that they keep the loss.")
    train_only: str | None = _model(None, help="Train only weights whose names match this regular expression.")
    gradient_checkpointing: bool = _model(False, basic=True, help="Recompute activations to save memory.")
    compile: bool = _model(False, help="Compile the layers (torch.compile): first steps slow, later ones faster.")

    adapter: str = _adapter("none", basic=True, choices=("none", *ADAPTERS), help="Train an adapter, not all weights.")
    lora_r: int = _adapter(8, basic=True, min=1, help="Rank (adalora: the final rank).")
    lora_alpha: int = _adapter(16, basic=True, min=1, help="Scale of the adapter: alpha / r.")
    lora_dropout: float = _adapter(0.0, min=0, max=0.99, help="Dropout on the adapter's input.")
    lora_target_modules: str = _adapter("all-linear", help="Modules (q_proj,v_proj), or all-linear: all but the head.")
    lora_target_parameters: str | None = _adapter(None, help="Parameters to adapt, such as tensors that hold experts.")
    lora_modules_to_save: str | None = _adapter(None, help="Modules to train in full as well, such as lm_head.")
    use_rslora: bool = _adapter(False, help="Scale by alpha / sqrt(r), for high ranks (rsLoRA).")
    use_dora: bool = _adapter(False, help="Train magnitude and direction of weights separately (DoRA).")
    load_in_4bit: bool = _adapter(False, basic=True, help="Load the base's linear layers in 4-bit (QLoRA).")

    chat_template: str | None = _data(None, help="chatml, a Jinja file, or a model whose template to use.")
    train_limit: str | None = _data(
        None,
        help="Number or share (10%) of training examples: a random sample if from files, else the first ones.",
    )
    mix: str | None = _data(None, help="Shares of the --train-file sources in the training rows, such as 3,1.")
    max_length: int | None = _data(None, basic=True, min=2, help="Maximum tokens per example (see --truncation).")
    truncation: str = _data(
        "drop", choices=("drop", "right", "error"), help="Examples above --max-length: leave out, cut, or refuse."
    )
    thinking: str | None = _data(
        None,
        choices=("off", "template", "keep"),
        help="off: prompts ask for no thinking; template: the chat template decides; keep: <think>...</think> in "
        "targets is learnt and generated, but not scored. `evaluate` of a run uses the run's value.",
    )
    template_date: str | None = _data(None, help="Date for chat templates, YYYY-MM-DD; default: the run's first day.")
    control_tokens: str | None = _data(
        None,
        choices=("text", "tokens"),
        help="How to read the name of a control token in a text, such as <|im_end|>: as characters (text, the default) "
        "or as that token (tokens). `evaluate` of a run uses the run's value.",
    )
    global_batch_size: int | None = _data(None, basic=True, min=1, help="Examples per optimizer step, over all ranks.")
    micro_batch_size: str = _data("auto", basic=True, help="Examples per forward on one rank, or auto.")
    batching: str = _data(
        "auto",
        choices=("auto", "shared", "packed", "padded"),
        help="How the rows of a forward are laid out. shared: a common prefix is computed once; packed: all in one "
        "sequence; padded: to the longest row; auto: the cheapest of these.",
    )
    epochs: float | None = _data(None, basic=True, min=0, help="Passes over the training examples.")
    max_steps: int | None = _data(None, basic=True, min=1, help="Optimizer steps; overrides --epochs.")

    loss: str = _optim(
        "sft",
        basic=True,
        choices=LOSSES,
        help="sft: the target's tokens; dpo, ipo: prefer the chosen to the rejected answer of each example.",
    )
    dpo_beta: float = _optim(0.1, min=1e-6, help="dpo, ipo: the larger, the closer to the initial model.")
    dpo_sft_weight: float = _optim(0.0, min=0, help="dpo, ipo: weight of the chosen answers' own loss, added to it.")
    optimizer: str = _optim("adamw", choices=tuple(STATE_BYTES), help="adamw-8bit: AdamW with its states in 8 bits.")
    learning_rate: float | None = _optim(None, basic=True, min=0, help="Peak learning rate.")
    lr_scheduler: str = _optim(
        "cosine",
        basic=True,
        choices=("cosine", "linear", "constant", "wsd"),
        help="Schedule after warm-up; wsd (warmup-stable-decay): constant, then linear decay over the last steps.",
    )
    warmup_ratio: float = _optim(0.03, min=0, max=1, help="Share of the steps for warm-up.")
    warmup_steps: int | None = _optim(None, min=0, help="Steps of warm-up; overrides --warmup-ratio.")
    decay_ratio: float = _optim(0.2, min=0, max=1, help="wsd: share of the steps, at the end, in which the rate falls.")
    min_lr_ratio: float = _optim(0.0, min=0, max=1, help="Learning rate at the end, as a share of the peak.")
    weight_decay: float | None = _optim(None, min=0, help="AdamW's weight decay, on matrices only.")
    adam_beta1: float = _optim(0.9, min=0, max=0.9999, help="Decay of AdamW's first moment.")
    adam_beta2: float | None = _optim(None, min=0, max=0.9999, help="Decay of AdamW's second moment.")
    max_grad_norm: float = _optim(1.0, min=0, help="Clip the gradient to this norm; 0: never.")
    ema_decay: float | None = _optim(
        None, min=1e-6, max=1 - 1e-6, help="EMA decay of the weights, such as 0.999; best/ and final/ hold the EMA."
    )
    on_nonfinite: str = _optim(
        "stop", choices=("stop", "skip"), help="If loss or gradient is NaN or infinite: stop, or skip the step."
    )

    eval_every: str = _eval("auto", basic=True, help="Steps between evaluations, epoch, off, or auto (about 4 a run).")
    eval_limit: int | None = _eval(None, min=1, help="Evaluate on N validation examples, the same sample each time.")
    eval_batch_size: int | None = _eval(
        None, min=1, help="Answers per batch on each rank; default: 64, or up to 256 if they are short."
    )
    max_new_tokens: int | None = _eval(
        None, min=1, help="Maximum tokens of an answer; default: length of the longest target, or 512 with a server."
    )
    patience: int | None = _eval(None, min=1, help="Stop after N evaluations in a row without a better main metric.")

    output_dir: str | None = _run(None, basic=True, help="The run's folder; default: runs/<task>-<time>.")
    seed: int = _run(42, basic=True, min=0, max=2**31, help="Seed of weights, data order and dropout.")
    deterministic: bool = _run(False, help="Make runs bitwise reproducible on GPUs too, with slower kernels.")
    save_every: str = _run("auto", help="Steps between checkpoints, epoch, off, or auto (about 4 a run).")
    keep_checkpoints: str = _run(
        "2", help="How many of the newest checkpoints to keep; every:N: keep the newest, and one every N steps."
    )
    export_dtype: str = _run(
        "auto", choices=_DTYPES, help="Data type of exported full weights; auto: the base's. An adapter keeps its type."
    )
    resume: str = _run("off", basic=True, help="Checkpoint to continue: auto (newest complete one), a folder, or off.")
    hang_timeout: int = _run(1800, min=0, help="Seconds without progress after which the run ends; 0: never.")
    log_every: int = _run(10, min=1, help="Steps between console lines (files get every step).")
    tracker: str = _run("tensorboard", basic=True, help="Trackers: tensorboard,wandb,mlflow and others; or none.")
    tracker_project: str = _run("accel_sft", help="Project of the run in W&B, SwanLab, MLflow and the like.")
    run_name: str | None = _run(None, help="Name of the run in trackers; default: name of the run's folder.")
    profile: bool = _run(False, help="Write a torch profiler trace of steps 3-5 for TensorBoard.")
    force: bool = _run(False, help="Start even if the model states alone are predicted not to fit into memory.")
    dry_run: bool = _run(False, basic=True, help="Audit the launch, print the resolved settings, and stop.")
    debug: bool = _run(False, help="Show tracebacks and the libraries' messages.")

    def problems(self) -> list[str]:
        """Return a line for each problem, with the flag and what to give instead."""
        lines = problems(self)
        for name, (form, expected) in _FORMS.items():
            value = getattr(self, name)
            if value is not None and not re.fullmatch(form, str(value)):
                lines.append(f"{flag_of(name)} {shown(str(value))}: expected {expected}")
        every, save = re.fullmatch(f"every:({_COUNT})", str(self.keep_checkpoints)), str(self.save_every)
        if every and (save == "off" or (re.fullmatch(_COUNT, save) and int(every[1]) % int(save))):
            lines.append(f"--keep-checkpoints {every[0]}: needs a --save-every that divides {every[1]}, not {save}")
        if self.template_date is not None and not _is_day(self.template_date):
            lines.append(f"--template-date {shown(str(self.template_date))}: expected a day as YYYY-MM-DD")
        if self.mix is not None:
            try:
                read_shares(str(self.mix))
            except ValueError as error:
                lines.append(f"--mix {shown(str(self.mix))}: {error}")
        try:
            re.compile(str(self.train_only or ""))
        except (re.error, OverflowError, RecursionError) as error:
            problem = (
                f"not a regular expression ({shown(str(error))}); names look like model.layers.0.mlp.up_proj.weight"
            )
            lines.append(f"--train-only {shown(str(self.train_only))}: {problem}")
        warmup, steps, adapter = self.warmup_steps, self.max_steps, self.adapter != "none"
        if self.train_only and adapter:
            lines.append("--train-only cannot be combined with --adapter, which freezes the base; leave one out")
        if self.export_dtype != "auto" and adapter:
            lines.append("--export-dtype does not apply to an adapter; leave it out (`accel-sft merge` has --dtype)")
        if self.ema_decay is not None and self.adapter == "adalora":
            lines.append("--ema-decay does not work with --adapter adalora, which sets ranks to zero; choose lora")
        if self.use_liger_kernel and self.compile:
            lines.append("--use-liger-kernel and --compile would fuse the same layers: leave one of them out")
        if self.min_lr_ratio and self.lr_scheduler == "constant":
            lines.append("--min-lr-ratio: with --lr-scheduler constant the rate never falls; leave one of them out")
        if self.decay_ratio != TrainConfig.decay_ratio and self.lr_scheduler != "wsd":
            lines.append("--decay-ratio works only with --lr-scheduler wsd; add it, or leave --decay-ratio out")
        if isinstance(warmup, int) and isinstance(steps, int) and warmup > steps:
            lines.append(f"--warmup-steps {warmup}: the run has only {steps} steps; choose fewer warm-up steps")
        if self.loss == "sft":
            flags = map(flag_of, chosen(self, ("dpo_beta", "dpo_sft_weight")))
            lines += [f"{flag} works only with --loss dpo or ipo; add it, or leave {flag} out" for flag in flags]
        if self.patience and self.eval_every == "off":
            lines.append("--patience needs evaluations: set --eval-every")
        if self.init_from and self.model != "tiny":
            lines.append("--init-from takes the model of the earlier run: leave --model out")
        if self.revision and (self.init_from or self.model == "tiny"):
            lines.append("--revision works only with a hub id in --model: name one, or leave --revision out")
        if self.resume != "off" and not self.output_dir:
            lines.append(f"--resume {shown(str(self.resume))}: name the run's folder with --output-dir")
        return lines + adapter_conflicts(self)

    def resolved(self, defaults: dict[str, Any]) -> Self:
        """Return a copy with each None replaced by a default, if any: the model's (`defaults`) or the usual one."""
        values = {**_USUAL, **defaults}
        if self.adapter != "none":
            values = {**values, "learning_rate": max(values["learning_rate"], _ADAPTER_LEARNING_RATE)}
        if self.loss != "sft":
            values = {**values, "learning_rate": _PREFERENCE_SHARE * values["learning_rate"]}
        if self.epochs is not None and self.max_steps is None:  # --epochs wins over a default max_steps
            values["max_steps"] = None
        unset = {key: value for key, value in values.items() if getattr(self, key) is None}
        if self.save_every == "auto" and (every := keep_every(self.keep_checkpoints)):
            unset["save_every"] = str(every)
        resolved = dataclasses.replace(self, **unset)
        return resolved if resolved.max_steps is None else dataclasses.replace(resolved, epochs=None)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def keep_every(keep: str) -> int | None:
    """The N of `--keep-checkpoints every:N`; None if `keep` is a number of checkpoints."""
    return int(keep.removeprefix("every:")) if keep.startswith("every:") else None


def read_shares(text: str) -> tuple[int, ...]:
    """Return the shares in `--mix` ("3,1" or "0.75,0.25") in lowest terms: (3, 1); raise ValueError if invalid."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [Fraction(part) for part in parts if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", part)]
    if len(parts) < 2 or len(numbers) < len(parts) or not all(numbers):
        raise ValueError("expected a number above 0 for each --train-file, such as 3,1")
    unit = Fraction(math.gcd(*(n.numerator for n in numbers)), math.lcm(*(n.denominator for n in numbers)))
    shares = tuple(int(number / unit) for number in numbers)
    if sum(shares) > _LONGEST_ROUND:
        raise ValueError(f"as whole numbers the shares add up to {sum(shares):,}; round, to at most {_LONGEST_ROUND:,}")
    return shares


def _is_day(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except (TypeError, ValueError):
        return False


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each setting, outside LAYOUT, that differs between a run's record (`before`) and its resume."""
    lines = []
    for name in sorted((before.keys() | after.keys()) - LAYOUT):
        if name in _OF_DATA and name not in before:
            continue
        # if a record is older than an option, the option had its default; for --thinking that was `template`
        default = "template" if name == "thinking" else getattr(TrainConfig, name, None)
        was, now = before.get(name, default), after.get(name, REMOVED.get(name))
        if was != now:  # `shown` escapes the flag too: the record may come from anyone
            lines.append(f"{shown(flag_of(name))}: the run was started with {shown(str(was))}, not {shown(str(now))}")
    return lines


_LONGEST_ROUND = 100_000
"""Maximum sum of the shares in lowest terms, so of the rows in a round. In a round, each source has its exact share."""
_COUNT = "[1-9][0-9]{,17}"  # 19 digits may need more than 63 bits
_STEPS = f"auto|epoch|off|{_COUNT}", "a number of steps, auto, epoch or off"
_FORMS = {
    "eval_every": _STEPS,
    "save_every": _STEPS,
    "micro_batch_size": (f"auto|{_COUNT}", "a number of examples or auto"),
    "keep_checkpoints": (f"(every:)?{_COUNT}", "a number of checkpoints, or every:N for a number of steps"),
    "train_limit": (
        rf"{_COUNT}|100%|(?![0.]+%)[0-9]{{1,2}}(\.[0-9]{{1,6}})?%",
        "a number of examples, or a share of them above 0% and up to 100%",
    ),
}
"""Settings whose value is a number or a word, each with its regular expression and its description in messages."""
_USUAL: dict[str, Any] = {
    "max_length": 2048,
    "thinking": "template",
    "control_tokens": "text",
    "global_batch_size": 32,
    "epochs": 1.0,
    "max_steps": None,
    "learning_rate": 2e-5,
    "weight_decay": 0.1,
    "adam_beta2": 0.999,
}
_ADAPTER_LEARNING_RATE = 10 * _USUAL["learning_rate"]
"""Lowest default learning rate of an adapter: LoRA learns best at about ten times the rate of full fine-tuning,
whatever the adapter's rank ("LoRA Without Regret", 2025)."""
_PREFERENCE_SHARE = 0.05
"""Share of the default learning rate at which preferences are learnt: 1e-6 for all weights, as TRL does by default."""
REMOVED = {"generate_with": "transformers", "lora_init": "default"}
"""Options of earlier versions, each with the value at which it had no effect on a run."""
LAYOUT = frozenset(
    {"micro_batch_size", "eval_batch_size", "output_dir", "save_every", "keep_checkpoints", "resume", "log_every"}
    | {"tracker", "profile", "dry_run", "debug", "attn_implementation", "gradient_checkpointing", "eval_every"}
    | {"patience", "batching", "compile", "deterministic", "force", "on_nonfinite", "hang_timeout"}
    | {"use_liger_kernel", "export_dtype", "tracker_project", "run_name", "generate_with"}
)
"""Settings that decide how a run is executed or observed, not what a step computes: a resume may change them."""
_OF_DATA = frozenset({"template_date", "control_tokens"})
"""Settings that affect tokenization. A setting that a run's record lacks is not compared: the hash of the data shows
whether the tokens differ."""
