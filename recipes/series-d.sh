#!/usr/bin/env bash
# Series D: why is the GPU idle? Compares rows a forward, precisions and two tasks, with a torch profiler trace of each.
# The findings say which share of a step goes into reading rows and making batches: loader workers, prefetching and
# pinned memory could save no more than this share. Each run's report.md says what its process did in the rest of the
# time. What a GPU did, with its copies and gaps, is in the traces (profile/, for ui.perfetto.dev).
# With the built-in model, or with real weights on one GPU:
#
#   bash recipes/series-d.sh
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct bash recipes/series-d.sh
#
# TensorBoard shows the use of the GPU over time (tensorboard --logdir FOLDER), with dips at evaluations and checkpoints.
# More variables: LAUNCH (launch files, comma-separated), STEPS (more than 5; 3 are traced), ROUNDS, TASKS, OUT (the
# folder; an interrupted comparison resumes in it). More options of `accel-sft compare` may follow.
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
