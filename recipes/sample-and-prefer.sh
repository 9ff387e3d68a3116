#!/usr/bin/env bash
# Learn from the task's own score: a model's answers to training prompts are sampled and scored. Then the model prefers
# right answers to wrong ones (--loss dpo), or is fine-tuned on its right answers. Two rounds of each way, each round
# scored beside the one before. With the built-in model, trained a third of the way, or with a run of your own:
#
#   bash recipes/sample-and-prefer.sh
#   TASK=ner MODEL=runs/ner-20261120-101500 bash recipes/sample-and-prefer.sh
#
# More variables: ROWS (training prompts of a round), SAMPLES (answers a prompt), ROUNDS, STEPS (of the built-in model's
# training), OUT (the folder; an interrupted recipe resumes in it). Options of training may follow.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"
TASK=${TASK:-math}
OUT=${OUT:-runs/sample-and-prefer}
begin=${MODEL:-$OUT/begin}
mkdir -p "$OUT"
of_task=(--same-data) training=(--eval-every off --save-every off --held-out 0)
if [[ -z ${MODEL:-} ]]; then
    of_task=(--validation-examples 500)
    training+=(--learning-rate 3e-4 --global-batch-size 64 --epochs 3)
    [[ -e $begin/final ]] || python -m accel_sft "$TASK" "${of_task[@]}" --max-steps "${STEPS:-233}" \
        --eval-every off --save-every off --output-dir "$begin" --resume auto
fi
[[ ! -d $begin/final ]] || begin=$begin/final  # in a run, the weights that --init-from starts from

for way in pairs best; do
    before=$begin
    training_way=("${training[@]}")
    # the chosen answers' own loss keeps them likely: without it, DPO makes both answers of such close pairs unlikely
    [[ $way == best ]] || training_way+=(--loss dpo --dpo-sft-weight 1)
    for round in $(seq "${ROUNDS:-2}"); do
        run=$OUT/$way-$round
        [[ -e $run.jsonl ]] || python -m accel_sft sample "$TASK" "${of_task[@]}" --model "$before" \
            --rows "${ROWS:-1000}" --samples "${SAMPLES:-8}" --seed "$round" --keep "$way" "$run.jsonl"
        [[ -e $run/final ]] || python -m accel_sft chat --train-file "$run.jsonl" --init-from "$before" \
            "${training_way[@]}" --output-dir "$run" --resume auto "$@"
        [[ -e $run-scored/report.md ]] || python -m accel_sft evaluate "$TASK" "${of_task[@]}" --model "$run" \
            --base "$before" --output-dir "$run-scored"
        before=$run
    done
done
printf '\nEach round: metric, before, after, and the change\n\n'
for scored in "$OUT"/*-scored; do
    name=$(basename "$scored")
    printf '%-10s %s\n' "${name%-scored}" "$(grep -m 1 '^| [a-z]' "$scored/report.md")"
done
