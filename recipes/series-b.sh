#!/usr/bin/env bash
# Series B: full fine-tuning for named entities, on one and two processes, with one row and 32 rows a forward, under ZeRO
# 0 to 3 with and without offload. With the built-in model, or with real weights on two GPUs of 20 GB:
#
#   bash recipes/series-b.sh
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct bash recipes/series-b.sh
#   MODEL=... bash recipes/series-b.sh --train-file train.json --validation-file dev.json      # CLUENER 2020's form
#
# Each setting trains 20 steps; the time of a longer run follows from the time of a step. More variables: LAUNCH (launch
# files, comma-separated), STEPS, ROUNDS, DISCARD (steps not counted), OUT (the folder; an interrupted comparison resumes
# in it). More options of `accel-sft compare` may follow.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"
MODEL=${MODEL:-tiny}
OUT=${OUT:-runs/series-b-$(basename "$MODEL")}
LAUNCH=${LAUNCH:-single,ddp,z0,z1,z2,z2_offload,z3,z3_offload}

# a step has 64 examples in every setting, even with one row a forward
python -m accel_sft compare ner --model "$MODEL" --launch "$LAUNCH" --mixed-precision bf16 --micro-batch-size 1,32 \
    --repeat "${ROUNDS:-2}" --discard-steps "${DISCARD:-3}" --output-dir "$OUT" \
    --global-batch-size 64 --max-steps "${STEPS:-20}" --learning-rate 1e-4 --lr-scheduler cosine \
    --warmup-ratio 0.03 --weight-decay 0.1 --gradient-checkpointing --eval-limit 50 "$@"
