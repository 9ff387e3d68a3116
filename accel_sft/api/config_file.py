"""Reads a `--config` file: options by name in YAML, and reports all its problems together. Imports no torch.

`OTHER_NAMES` says what to write instead of options of TRL, LLaMA-Factory, axolotl and ms-swift, and of removed
options; docs/command-line.md has a table for users.
"""

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from accel_sft.api.config import REMOVED
from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, Setting, flag_of, settings, shown

_HERE = """
adapter: finetuning-type peft-type train-type tuner-type; chat-template: chat-template-path;
attn-implementation: attn-impl flash-attention flash-attn sdp-attention xformers-attention;
dtype: infer-dtype torch-dtype; epochs: num-epochs num-train-epochs; eval-batch-size: per-device-eval-batch-size;
dpo-beta: beta pref-beta rl-beta; loss: loss-type pref-loss;
eval-every: eval-steps eval-strategy evals-per-epoch evaluation-strategy; eval-limit: max-eval-samples;
hang-timeout: ddp-timeout; init-from: adapter-name-or-path adapters lora-model-dir;
keep-checkpoints: save-total-limit; learning-rate: lr; load-in-4bit: quant-bits quantization-bit;
log-every: logging-steps; lora-r: lora-rank; lora-target-modules: lora-target target-modules;
lr-scheduler: lr-scheduler-type; max-length: cutoff-len max-seq-len max-seq-length model-max-length sequence-len;
mix: interleave-probs; model: base-model model-id model-id-or-path model-name model-name-or-path;
optimizer: optim; patience: early-stopping-patience; resume: auto-resume-from-checkpoints resume-from-checkpoint;
revision: model-revision;
run-name: wandb-name; save-every: save-steps save-strategy saves-per-epoch; tracker: report-to use-wandb;
tracker-project: wandb-project; train-limit: max-train-samples;
train-only: freeze-trainable-layers freeze-trainable-modules unfrozen-parameters;
use-liger-kernel: enable-liger-kernel liger-kernel use-liger
"""
"""This trainer's options, each with its names in other trainers."""
_HINTS = """
assistant-only-loss completion-only-loss train-on-inputs train-on-prompt = in chats, only the answers are learnt
batch-size gradient-accumulation-steps per-device-train-batch-size = use --global-batch-size, rows per step on all ranks
bf16 pure-bf16 = the launcher sets the precision: accelerate launch --mixed_precision bf16
config-file gpu-ids machine-rank main-process-ip mixed-precision = a launcher's flag: write it before -m
main-process-port multi-gpu num-machines num-processes zero-stage = a launcher's flag: write it before -m
data-path dataset dataset-dir dataset-name datasets = the task chat takes --train-file, also for data sets of the hub
dataloader-num-workers dataset-num-proc overwrite-cache plot-loss remove-unused-columns = leave it out: it is not needed
dataset-test-split eval-dataset test-datasets val-dataset = the task chat takes --validation-file
dataset-text-field = the task chat takes --columns
deepspeed = the launch file sets ZeRO: accelerate launch --config_file accelerate_configs/z2.yaml
do-eval do-predict do-train = leave it out: a task's name alone trains, and evaluates before and after
enable-thinking = --thinking off asks for no thinking, and --thinking keep trains on it
fp16 = the launcher sets the precision: accelerate launch --mixed_precision fp16
fsdp fsdp-config = the launch file sets FSDP: accelerate launch --config_file accelerate_configs/fsdp2.yaml
generate-with = serve the run with `accel-sft serve RUN`, then `accel-sft evaluate TASK --url URL`
dataset-processes gradient-checkpointing-kwargs preprocessing-num-workers = leave it out: it is not needed
group-by-length neat-packing packing padding-free sample-packing = --batching auto chooses the layout
hub-model-id push-to-hub = `accel-sft push RUN ORG/NAME` uploads a run
init-lora-weights lora-init = leave it out: PiSSA and OLoRA, which change the base, are not offered
load-best-model-at-end = every run keeps its best weights in best/, by the task's metric
load-in-8bit = training on 8-bit weights is not offered; for QLoRA use --load-in-4bit
lora-target-linear = leave it out: --lora-target-modules is all-linear by default
max-samples = it is --train-limit here for training, and --eval-limit for evaluation
metric-for-best-model = the task chat takes --metric
neftune-alpha neftune-noise-alpha = leave it out: noise on embeddings (NEFTune) is not offered
overwrite-output-dir = name a new --output-dir, or continue the run in it with --resume auto
pref-ftx rpo-alpha = --dpo-sft-weight adds the loss of the chosen answers
precompute-ref-log-probs ref-model ref-model-name-or-path = leave it out; the model before step 1 is the reference
label-smoothing reference-free simpo-gamma = not offered; --loss dpo and ipo are
rl rlhf-type stage = leave it out: --loss sft, dpo or ipo says what is learnt
split-dataset-ratio val-set-size val-size = the task chat takes --held-out
template template-type = the model's own chat template is used; --chat-template names another
use-lora use-peft = --adapter lora trains an adapter
"""
_COMMANDS = """
dpo ipo = `accel-sft chat --loss dpo --train-file PAIRS` learns from rows with prompt, chosen and rejected
cpo grpo kto orpo ppo reward rlhf rloo rm simpo = not offered; pairs are learnt by `accel-sft chat --loss dpo`
deploy vllm-serve = `accel-sft serve RUN` serves a model
export merge-lora = `accel-sft merge RUN OUT` merges an adapter into its base
fine-tune finetune llm-sft sft train = train on chat files with `accel-sft chat --model MODEL --train-file FILE`
infer inference = `accel-sft generate RUN` answers prompts
pre-train pretrain pt = train on raw text with `accel-sft chat --model MODEL --train-file TEXTS`
"""


def _by_name(lines: list[str], prefix: str = "") -> dict[str, str]:
    pairs = (line.split(" = ") for line in lines)
    return {prefix + name: hint for names, hint in pairs for name in names.split()}


OTHER_COMMANDS = _by_name(_COMMANDS.strip().splitlines())
"""What to use instead of commands that only other trainers have."""
_pairs = (entry.split(":") for entry in _HERE.split(";"))
OTHER_NAMES = _by_name([f"{names} = it is --{ours.strip()} here" for ours, names in _pairs], "--")
OTHER_NAMES |= _by_name(_HINTS.strip().splitlines(), "--")


TASK = "task"
"""The key that names the task, in a file that describes a whole run."""
_OFF = ("eval_every", "save_every", "resume")
"""Options that take the value `off`; `no` and `false` mean the same, as in YAML 1.1."""


def load_yaml(path: str, *classes: type, given: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Read a `--config` file. Its keys are the fields of `classes`, with - or _; its values are read as on the command
    line. Return all values by name, wrong ones too, and the problems. `given`: names of the command line's options."""
    setting_of = {setting.name: setting for cls in classes for setting in settings(cls)}
    values: dict[str, Any] = {}
    problems: list[str | None] = []
    first_lines: dict[str, int] = {}
    nodes = _mapping(path)
    if any(_text(key) in ("compute_environment", "distributed_type") for key, _ in nodes):
        command = f"accelerate launch --config_file {path} -m accel_sft TASK"
        raise UserError(f"--config {path}: this is a launch file; give it to accelerate: {command}")
    for key, node in nodes:
        number = key.start_mark.line + 1
        line, name = f"line {number}", (_text(key) or "").replace("-", "_")
        setting = setting_of.get(name)
        if name in first_lines:
            problems.append(f"{shown(name)} is given twice, on lines {first_lines[name]} and {number}; keep one")
        elif setting and _value(setting, node) == HIDDEN:
            lacking = f"{line}: {setting.flag}: a run's file holds no secrets; give this one on the command line"
            problems.append(None if name in given else lacking)
        elif setting:
            values[name] = _value(setting, node)
            problem = setting.problem(values[name])
            problems.append(problem and f"{line}: {problem}")
        elif name == TASK:
            problems.append(None if _text(node) else f"{line}: task: expected a task's name")
        elif name in REMOVED and _text(node) == REMOVED[name]:
            pass  # from the run.yaml of an earlier version
        elif advice := OTHER_NAMES.get(flag_of(name)):
            problems.append(f"{line}: unknown option {key.value!r}: {advice}")
        else:
            near = difflib.get_close_matches(name, [*setting_of, TASK], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"{line}: unknown option {name[:80]!r}{hint}")
        first_lines.setdefault(name, number)
    return values, [f"--config {path}: {problem}" for problem in problems if problem]


def task_in(path: str) -> str | None:
    """Return the task that a `--config` file names, as a command line would name it; None if the file names no task."""
    return next((_text(node) for key, node in _mapping(path) if _text(key) == TASK), None)


def _mapping(path: str) -> list[tuple[Any, Any]]:
    """The YAML nodes of a file's keys, each with the node of its value."""
    import yaml

    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror}); name a YAML file") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"--config {path}: expected option names and values, one `name: value` per line")
    return list(root.value)


def _text(node: Any) -> str | None:
    return node.value or None if node.id == "scalar" else None


def _value(setting: Setting, node: Any) -> Any:
    """The value of a YAML node for this setting. A nested value becomes an empty collection, which is refused."""
    parts = node.value if node.id == "sequence" else [node]
    if any(part.id != "scalar" for part in parts):
        return [] if node.id == "sequence" else {}
    if node.tag == "tag:yaml.org,2002:null":
        return None
    text = ",".join(part.value for part in parts)  # options that take several names separate them by commas
    return "off" if setting.name in _OFF and text.lower() in ("off", "no", "false") else setting.read(text)
