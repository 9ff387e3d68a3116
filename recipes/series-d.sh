#!/usr/bin/env bash
# Series D: why is the GPU idle? Rows a forward, precision, and two tasks' data, with a torch profiler trace of each.
# The findings say which share of a step goes into reading rows and making batches: it is all that loader workers,
# prefetching and pinned memory could save. Each run's report.md says what its process did in the rest of the time; what
# a GPU did, its copies and gaps, is in the traces (profile/, for ui.perfetto.dev). Here with the built-in model, or with real weights on one GPU:
#
#   bash recipes/series-d.sh
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct bash recipes/series-d.sh
#
# Use of the GPU over time is in TensorBoard (tensorboard --logdir FOLDER), its dips at evaluations and checkpoints too.
# Also read: LAUNCH (launch files, commas between), STEPS (more than 5, of which 3 are traced), ROUNDS, TASKS, OUT (the
# folder; the same one goes on where it was interrupted). More options of `accel-sft compare` may follow.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"
MODEL=${MODEL:-tiny}
OUT=${OUT:-runs/series-d-$(basename "$MODEL")}

for task in ${TASKS:-math ner}; do
    python -m accel_sft compare "$task" --model "$MODEL" --launch "${LAUNCH:-single}" --mixed-precision no,bf16 \
        --micro-batch-size 2,32,64 --repeat "${ROUNDS:-2}" --discard-steps 5 --profile --output-dir "$OUT/$task" \
        --global-batch-size 64 --max-steps "${STEPS:-20}" --eval-limit 50 "$@"
done
