#!/usr/bin/env bash
# Series A: LoRA on an instruction model under ZeRO 0 to 3, with and without offload; then answers of the base and the
# tuned model, one question at a time. With the built-in model, or with real weights on two GPUs of 32 GB:
#
#   bash recipes/series-a.sh
#   MODEL=Qwen/Qwen2.5-14B-Instruct bash recipes/series-a.sh
#
# More variables: LAUNCH (launch files, comma-separated), STEPS (instead of an epoch), ROUNDS, DISCARD (steps not
# counted), OUT (the folder; an interrupted comparison resumes in it). More options of `accel-sft compare` may follow.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"
MODEL=${MODEL:-tiny}
OUT=${OUT:-runs/series-a-$(basename "$MODEL")}
LAUNCH=${LAUNCH:-z0,z1,z2,z2_offload,z3,z3_offload}
length=(--epochs 1)
[[ -z ${STEPS:-} ]] || length=(--max-steps "$STEPS")

# 16 examples on each of two processes; 1,798 numbers are trained on, the 200 largest are held out; answers begin with
# the prefix of the published rows
python -m accel_sft compare math --model "$MODEL" --launch "$LAUNCH" --mixed-precision bf16 \
    --repeat "${ROUNDS:-2}" --discard-steps "${DISCARD:-3}" --keep-weights --output-dir "$OUT" \
    --max-number 1998 --train-examples 1798 --validation-examples 200 --held-out largest --addends uniform \
    --answer-prefix '王大丫丫的回答是--->' \
    --adapter lora --lora-r 8 --lora-alpha 64 --lora-dropout 0.01 \
    --lora-target-modules q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj \
    --global-batch-size 32 --micro-batch-size 16 "${length[@]}" --learning-rate 1e-4 --lr-scheduler cosine \
    --warmup-ratio 0.03 --weight-decay 0.1 --gradient-checkpointing --seed 42 "$@"

trained=$(find "$OUT/runs/" -maxdepth 2 -name round-1 -type d | sort | head -n 1)
base=$MODEL
[[ $MODEL != tiny ]] || base=$trained/base
report=$OUT/base-and-tuned
[[ -e $report/report.md ]] || python -m accel_sft evaluate math --model "$trained" --base "$base" \
    --eval-limit 20 --eval-batch-size 1 --output-dir "$report"
