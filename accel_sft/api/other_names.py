"""What to write for options of other trainers and for removed ones; docs/command-line.md has a table for readers."""

_BATCH = "name the step's rows by --global-batch-size; how many a device computes at once is found by itself"
_PRECISION = "precision is the launch's: accelerate launch --mixed_precision {}"
OTHER_NAMES = {
    "--bf16": _PRECISION.format("bf16"),
    "--cutoff-len": "it is --max-length here",
    "--deepspeed": "ZeRO is the launch file's: accelerate launch --config_file accelerate_configs/z2.yaml",
    "--early-stopping-patience": "it is --patience here",
    "--fp16": _PRECISION.format("fp16"),
    "--generate-with": "serve the run by `accel-sft serve RUN`, then `accel-sft evaluate TASK --url URL`",
    "--gradient-accumulation-steps": _BATCH,
    "--interleave-probs": "it is --mix here",
    "--load-best-model-at-end": "every run keeps its best weights in best/, by the task's metric",
    "--lr": "it is --learning-rate here",
    "--lr-scheduler-type": "it is --lr-scheduler here",
    "--max-eval-samples": "it is --eval-limit here",
    "--max-samples": "it is --train-limit here, and --eval-limit for evaluation",
    "--max-seq-length": "it is --max-length here",
    "--max-train-samples": "it is --train-limit here",
    "--num-train-epochs": "it is --epochs here",
    "--packing": "--batching chooses the layout, by itself",
    "--per-device-eval-batch-size": "it is --eval-batch-size here",
    "--per-device-train-batch-size": _BATCH,
    "--report-to": "it is --tracker here",
    "--use-peft": "it is --adapter lora here",
}
REMOVED = {"generate_with": "transformers"}
"""Options of earlier versions, with their values in the records of runs, which mean nothing now."""
