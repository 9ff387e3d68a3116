#!/usr/bin/env bash
# Series C: LoRA and AdaLoRA on one process, without ZeRO and at stages 2 and 3: which of them fit, their memory and
# speed, and the memory of each start-up phase (in comparison.html). With the built-in text model, or with real weights
# on one GPU of 24 GB:
#
#   bash recipes/series-c.sh
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct bash recipes/series-c.sh
#
# With IMAGES=1 the rows have images, and stage 3 has its weights on the host. The vision-language model is a random one,
# or MODEL. Images are squares of EDGE pixels. This needs pip install 'accel-sft[images]'.
#
#   IMAGES=1 bash recipes/series-c.sh
#   IMAGES=1 EDGE=448 MODEL=Qwen/Qwen2-VL-2B-Instruct bash recipes/series-c.sh
#
# AdaLoRA reads whole weights and gradients in each step; at stages 2 and 3 they are gathered for it.
# More variables: LAUNCH (launch files, comma-separated), STEPS, ROUNDS, DISCARD (steps not counted), OUT (the folder; an
# interrupted comparison resumes in it). More options of `accel-sft compare` may follow.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"
MODEL=${MODEL:-tiny}
OUT=${OUT:-runs/series-c-$(basename "$MODEL")${IMAGES:+-images}}
TASK=(math)
LAUNCH=${LAUNCH:-single,z2,z3${IMAGES:+_offload}}
if [[ ${IMAGES:-} ]]; then
    python recipes/pictures.py "$OUT-data" "${EDGE:-56}"
    if [[ $MODEL = tiny ]]; then MODEL=$OUT-data/model; fi
    TASK=(chat --train-file "$OUT-data/train.jsonl" --validation-file "$OUT-data/validation.jsonl" --metric exact)
fi

python -m accel_sft compare "${TASK[@]}" --model "$MODEL" --launch "$LAUNCH" --num-processes 1 --mixed-precision bf16 \
    --adapter lora,adalora --repeat "${ROUNDS:-2}" --discard-steps "${DISCARD:-3}" --output-dir "$OUT" \
    --global-batch-size 32 --micro-batch-size 16 --max-steps "${STEPS:-20}" --eval-limit 50 "$@"
