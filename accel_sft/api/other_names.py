"""What to write for options and commands of TRL, LLaMA-Factory, axolotl and ms-swift, and for removed options.

docs/command-line.md has a table for readers.
"""

_HERE = """
adapter: finetuning-type peft-type train-type tuner-type;
attn-implementation: attn-impl flash-attention flash-attn sdp-attention xformers-attention;
dtype: infer-dtype torch-dtype; epochs: num-epochs num-train-epochs; eval-batch-size: per-device-eval-batch-size;
eval-every: eval-steps eval-strategy evals-per-epoch evaluation-strategy; eval-limit: max-eval-samples;
hang-timeout: ddp-timeout; init-from: adapter-name-or-path adapters lora-model-dir;
keep-checkpoints: save-total-limit; learning-rate: lr; load-in-4bit: quant-bits quantization-bit;
log-every: logging-steps; lora-r: lora-rank; lora-target-modules: lora-target target-modules;
lr-scheduler: lr-scheduler-type; max-length: cutoff-len max-seq-len max-seq-length model-max-length sequence-len;
mix: interleave-probs; model: base-model model-id model-id-or-path model-name model-name-or-path;
optimizer: optim; patience: early-stopping-patience; resume: auto-resume-from-checkpoints resume-from-checkpoint;
run-name: wandb-name; save-every: save-steps save-strategy saves-per-epoch; tracker: report-to use-wandb;
tracker-project: wandb-project; train-limit: max-train-samples;
train-only: freeze-trainable-layers freeze-trainable-modules unfrozen-parameters;
use-liger-kernel: enable-liger-kernel liger-kernel use-liger
"""
"""An option here and its names elsewhere, entry by entry."""
_ANSWERS = "answers alone are learnt; `accel-sft check` shows which tokens"
_BATCH = "--global-batch-size is a step's rows over all devices; a forward's rows are chosen by itself"
_FILES = "the task chat takes {}, a file, a folder or a data set of the hub"
_LAUNCH = "it is the launch file's: accelerate launch --config_file accelerate_configs/{}.yaml"
_LAYOUT = "--batching chooses the layout, by itself"
_PRECISION = "precision is the launch's: accelerate launch --mixed_precision {}"
_TRAINS = "leave it out: a task's name alone trains, and evaluates before and after"
_ELSEWHERE = {
    _ANSWERS: "assistant-only-loss completion-only-loss train-on-inputs train-on-prompt",
    _BATCH: "batch-size gradient-accumulation-steps per-device-train-batch-size",
    _FILES.format("--train-file"): "data-path dataset dataset-dir dataset-name datasets",
    _FILES.format("--validation-file"): "dataset-test-split eval-dataset test-datasets val-dataset",
    _LAUNCH.format("fsdp2"): "fsdp fsdp-config",
    _LAUNCH.format("z2"): "deepspeed",
    _LAYOUT: "group-by-length neat-packing packing padding-free sample-packing",
    _PRECISION.format("bf16"): "bf16 pure-bf16",
    _PRECISION.format("fp16"): "fp16",
    _TRAINS: "do-eval do-predict do-train",
    "leave it out: supervised fine-tuning is the only stage here": "rl rlhf-type stage",
    "leave it out: it is not needed here": (
        "dataloader-num-workers dataset-num-proc dataset-processes ddp-find-unused-parameters "
        "gradient-checkpointing-kwargs overwrite-cache plot-loss preprocessing-num-workers "
        "remove-unused-columns save-safetensors"
    ),
    "8 bits are not trained on; --load-in-4bit is QLoRA": "load-in-8bit",
    "leave it out: noise on embeddings (NEFTune) is not offered": "neftune-alpha neftune-noise-alpha",
    "leave it out: --lora-target-modules is all-linear by default": "lora-target-linear",
    "it is --train-limit here, and --eval-limit for evaluation": "max-samples",
    "the model's own chat template is used; --chat-template names another": "template template-type",
    "the task chat takes --columns": "dataset-text-field",
    "the task chat takes --held-out": "split-dataset-ratio val-set-size val-size",
    "the task chat takes --metric": "metric-for-best-model",
    "every run keeps its best weights in best/, by the task's metric": "load-best-model-at-end",
    "name a new --output-dir, or continue the run in it by --resume auto": "overwrite-output-dir",
    "`accel-sft push RUN ORG/NAME` uploads a run": "hub-model-id push-to-hub",
    "serve the run by `accel-sft serve RUN`, then `accel-sft evaluate TASK --url URL`": "generate-with",
    "--adapter lora trains an adapter": "use-lora use-peft",
}
"""Hints, each with the options elsewhere that it is for."""
_HINTS = {f"it is --{ours.strip()} here": names for ours, names in (each.split(":") for each in _HERE.split(";"))}
OTHER_NAMES = {f"--{name}": hint for hint, names in (_HINTS | _ELSEWHERE).items() for name in names.split()}

_ANSWERS_ONLY = "preferences are not trained here; `accel-sft chat` learns answers from rows of messages"
_COMMANDS = {
    "train on chat files by `accel-sft chat --model MODEL --train-file FILE`": "fine-tune finetune llm-sft sft train",
    "train on raw text by `accel-sft chat --model MODEL --train-file TEXTS`": "pre-train pretrain pt",
    _ANSWERS_ONLY: "cpo dpo grpo kto orpo ppo reward rlhf rloo rm simpo",
    "`accel-sft generate RUN` asks a model": "infer inference",
    "`accel-sft merge RUN OUT` writes an adapter's weights into its base's": "export merge-lora",
    "`accel-sft serve RUN` serves a model": "deploy vllm-serve",
}
OTHER_COMMANDS = {name: hint for hint, names in _COMMANDS.items() for name in names.split()}
"""What to write for commands of other trainers, none of which is a command here."""

REMOVED = {"generate_with": "transformers"}
"""Options of earlier versions, with their values in the records of runs, which mean nothing now."""
