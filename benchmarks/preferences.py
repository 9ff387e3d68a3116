"""Training on preferences (`--loss dpo`) beside TRL's DPOTrainer: the same numbers in each step, and pairs per second.

    python benchmarks/preferences.py [--peers PYTHON] [--shape NAME ...] [--rounds 3] [--smoke]

The first table has the largest differences of any step's numbers if both train a tiny model, or a saved adapter, on the
same pairs in the same order; those of loss and gradient norm are shares. For the others, both train in turns on a
shape's pairs: medians over the rounds, and of the ratios within a round, with TRL's best number of pairs a forward. The
initial model's log-probabilities are computed before the first step, and not measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

import shapes
import smoke
from accel_sft.data.step_plan import StepPlan
from accel_sft.launch.precision import cpu_name
from speed import Contestant, Ended, at_its_best, left_out, spread

SHAPES = {
    "prompt-58": shapes.Shape(40, (11, 26), (21, 34), 32, 1),  # 40 + 18 + 2 x 27
    "prompt-300": shapes.Shape(270, (20, 41), (21, 34), 16, 1),  # 270 + 30 + 2 x 27
    "prompt-300-own": shapes.Shape(0, (270, 331), (21, 34), 16, 1),  # 0 + 300 + 2 x 27
}
BEST = {"precompute_ref_log_probs": True, "gradient_checkpointing": False}
TRL = {
    "TRL": {"options": BEST},
    "TRL, head on answers only": {"options": BEST, "compact": True},
    "TRL, its defaults": {"rows_per_forward": 8},
}
STEPS, ROWS, BATCH = 20, 40, 16  # of the first table: optimizer steps, different pairs, pairs of a step


def make_pairs(shape: shapes.Shape) -> list[dict[str, str]]:
    rows, others = shapes.make_rows(shape), shapes.make_rows(shape, seed=1)
    return [{**row, "rejected": other["answer"]} for row, other in zip(rows, others, strict=True)]


def compare(peers: str, folder: Path) -> None:
    """Print the largest differences between accel_sft's and TRL's numbers in the first STEPS of 2 STEPS steps."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    shapes.make_model(folder / "tiny", hidden=64, layers=2)
    # the adapter's random weights already change what the model computes
    lora = LoraConfig(lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "tiny"), lora).save_pretrained(folder / "adapter")
    shapes.make_tokenizer().save_pretrained(folder / "adapter")
    pairs, unit = make_pairs(shapes.Shape(12, (3, 12), (2, 20), ROWS, 1)), np.ones(ROWS)
    plan = StepPlan(unit, unit, seed=42, global_batch_size=BATCH, epochs=None, max_steps=2 * STEPS)
    (folder / "ours.json").write_text(json.dumps(pairs))
    in_order = [pairs[row] for step in range(2 * STEPS) for row in plan.examples(step)]  # accel_sft's own order
    (folder / "trl.json").write_text(json.dumps(in_order))
    usual = {"max_steps": 2 * STEPS, "weight_decay": 0.1, "max_grad_norm": 0.5}
    options = {**usual, **BEST, "lr_scheduler_type": "cosine", "train_sampling_strategy": "sequential"}
    keys = "loss", "grad_norm", "pair_margin", "chosen_logprob", "rejected_logprob"
    print(f"| trained | {' | '.join(keys)} | the last margin |\n|---|{'---|' * len(keys)}---|", flush=True)
    for name, model, adapter in (("all weights", "tiny", {}), ("an adapter", "adapter", {"adapter": "lora"})):
        common = {"batch": BATCH, "warmup_steps": STEPS}
        own = {"model": str(folder / model), "rows": str(folder / "ours.json"), **common}
        own["options"] = {**usual, "loss": "dpo", "lr_scheduler": "cosine", **adapter}
        theirs = {"model": str(folder / "tiny"), "rows": str(folder / "trl.json"), "rows_per_forward": 4, **common}
        theirs |= {"options": options, **({"adapter": own["model"]} if adapter else {})}
        ours = Contestant("accel_sft", sys.executable, "ours.py", **own)
        trl = Contestant("TRL", peers, "trl_dpo.py", **theirs)
        both = [*zip(ours.facts["steps"], trl.facts["steps"], strict=True)]
        largest = (max(abs(a[key] - b[key]) / (b[key] if key in keys[:2] else 1) for a, b in both) for key in keys)
        last = both[-1][0]["pair_margin"]
        print(f"| {name} | {' | '.join(f'{value:.1e}' for value in largest)} | {last:.3f} |", flush=True)
        ours.stop()
        trl.stop()


def race(peers: str | None, rounds: int, sizes: list[int], folder: Path, name: str) -> None:
    shape, file = SHAPES[name], folder / f"{name}.json"
    file.write_text(json.dumps(make_pairs(shape)))
    print(f"\n## {name}: {shape.batch} pairs a step\n", flush=True)
    print("| trainer | pairs/s | accel_sft is | spread | first gradient norm |\n|---|---|---|---|---|", flush=True)
    common = {"model": str(folder / "model"), "rows": str(file), "batch": shape.batch}
    ours = Contestant("accel_sft", sys.executable, "ours.py", **common, options={"loss": "dpo"})
    for label, settings in TRL.items() if peers else ():
        try:
            each = at_its_best(shape, sizes, shape.batch, label, peers, "trl_dpo.py", **common, **settings)
            for _ in range(rounds):
                ours.run(shape.steps, shape.batch)
                each.run(shape.steps, shape.batch)
        except (Ended, BrokenPipeError) as error:
            left_out(label, error)
            continue
        line(each, ours.speeds[-rounds:])
        each.stop()
    while len(ours.speeds) < rounds:
        ours.run(shape.steps, shape.batch)
    line(ours, ours.speeds)
    ours.stop()


def line(each: Contestant, ours: list[float]) -> None:
    ratio = statistics.median(one / other for one, other in zip(ours, each.speeds, strict=True))
    batching = f" ({each.facts['batching']})" if "batching" in each.facts else ""
    speed = f"{statistics.median(each.speeds):.2f} | {ratio:.2f}x | {spread(each.speeds):.0%}"
    name, norm = each.name.replace("rows a", "pairs a"), each.facts["steps"][0]["grad_norm"]
    print(f"| {name}{batching} | {speed} | {norm:.5f} |", flush=True)


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--peers", metavar="PYTHON", help="Python with benchmarks/peers.txt; none: accel_sft alone.")
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, action="append", help="Numbers of pairs a forward to try (4, 8, 16).")
    parser.add_argument("--hidden", type=int, default=384)
    args = smoke.parse(parser, shape=["prompt-58"], rounds=1, pairs=[8], hidden=64)
    print(f"{cpu_name()}\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.peers:
            compare(args.peers, folder)
        shapes.make_model(folder / "model", args.hidden)
        for shape in args.shape or SHAPES:
            race(args.peers, args.rounds, args.pairs or [4, 8, 16], folder, shape)


if __name__ == "__main__":
    main()
