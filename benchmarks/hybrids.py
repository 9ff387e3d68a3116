"""Compares rows that continue from a cache of their instruction with padded rows, in hybrids of 12 million parameters.

    python benchmarks/hybrids.py [--family NAME ...] [--shape NAME ...] [--rounds 5] [--peers PYTHON] [--smoke]

Both ways take optimizer steps on the same rows, in turns, in one process with one thread, in float32. Each way has the
size of forwards with the least work. The result is the smallest number of CPU seconds over the rounds: other programs
hardly change CPU seconds.

With `--peers`, accel_sft's whole trainer and TRL's then train on the same model and rows, each in its own process, in
turns. TRL is tried once with several numbers of rows a forward; the best one counts. A trainer that cannot train is
left out, and the reason is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import shapes
import smoke
import speed
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.chat.encoded import Encoded

CPU = torch.device("cpu")
LINEAR = {"linear_num_key_heads": 6, "linear_num_value_heads": 6}
LINEAR |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2, **LINEAR},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention"] * 2, "num_local_experts": 0}
    | {"shared_intermediate_size": 1024, "mamba_n_heads": 12, "mamba_d_head": 64, "mamba_d_state": 64}
    | {"mamba_expand": 2, "mamba_chunk_size": 64, "position_embedding_type": "nope", "router_aux_loss_coef": 0.0},
}
WAYS = {"padded": "causal", "shared": "cache"}
EACH_FORWARD = 64.0
"""Fixed cost of a forward with one thread, in tokens, as accel_sft counts it."""
USUAL = ("series-b", "long-instruction")
ROWS = (4, 8, 16)
"""Numbers of rows a forward with which TRL is tried."""


def make_model(family: str, tokenizer: Any) -> Any:
    """A model of this family with random weights, 384 wide with 6 layers."""
    width = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 4352}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 4096}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**width, **heads, **special, tie_word_embeddings=True, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def encoded(shape: shapes.Shape, tokenizer: Any) -> list[Encoded]:
    made = []
    for index, row in enumerate(shapes.make_rows(shape)):
        prompt, answer = (
            tokenizer(text)["input_ids"] for text in (row["instruction"] + row["question"], row["answer"])
        )
        made.append(Encoded(index, [*prompt, *answer, tokenizer.eos_token_id], len(prompt)))
    return made


def least_work(layout: str, rows: list[Encoded]) -> Batching:
    batching = Batching(layout, 0, attention=WAYS[layout], head="pieces")
    sizes = [dataclasses.replace(batching, tokens=size) for size in batching.way.cpu_tokens]
    return min(sizes, key=lambda each: each.work(rows, 1, 384, EACH_FORWARD))


def step(model: Any, optimizer: torch.optim.Optimizer, batching: Batching, rows: list[Encoded]) -> tuple[float, float]:
    """CPU seconds of an optimizer step, and its loss."""
    started, total = time.process_time(), 0.0
    supervised = sum(row.supervised_tokens for row in rows)
    for forward in batching.divide(rows, 1)[0]:
        loss = nll_sum(model, batching.batch(forward, 0, CPU)) / supervised
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - started, total


def against_peers(folder: Path, family: str, name: str, args: argparse.Namespace) -> None:
    """Print a line for accel_sft's trainer, and for each of TRL's ways."""
    shape, rows = shapes.SHAPES[name], folder / f"{name}.json"
    tokens, _ = shapes.write(rows, shape)
    common = {"variables": {"OMP_NUM_THREADS": "1"}, "model": str(folder), "rows": str(rows), "batch": shape.batch}
    common |= {"cpu_seconds": True, "warmup_steps": 1}
    one_step = dataclasses.replace(shape, steps=1)
    ours = speed.Contestant("accel_sft", sys.executable, "ours.py", **common)
    trl = [peer for peer in speed.field(args, shape) if peer[2] == "trl_sft.py"]
    for told, python, script, settings in trl:
        try:
            sizes = args.rows_per_forward or ROWS
            other = speed.at_its_best(one_step, sizes, tokens, told, python, script, **{**common, **settings})
            for _ in range(args.rounds):
                for each in (ours, other):
                    each.run(1, tokens)
        except (speed.Ended, BrokenPipeError) as error:
            speed.left_out(f"{family}, {name}: {told}", error)
            continue
        seconds = [tokens / max(each.speeds[-args.rounds :]) for each in (ours, other)]
        cells = [family, name, other.name, *(f"{each:.2f}" for each in seconds), f"{seconds[1] / seconds[0]:.2f}x"]
        cells.append(f"{abs(other.facts['loss'] / ours.facts['loss'] - 1):.0e}")
        print(f"| {' | '.join(cells)} |", flush=True)
        other.stop()
    ours.stop()


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--shape", action="append", choices=shapes.SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", metavar="PYTHON", help="Python of an environment with benchmarks/peers.txt.")
    parser.add_argument(
        "--rows-per-forward", type=int, action="append", help=f"Rows a forward to try TRL with ({ROWS})."
    )
    args = smoke.parse(parser, family=["lfm2"], shape=["series-a"], rounds=1, rows_per_forward=[8])
    args.llamafactory = None  # it trains none of these families
    torch.set_num_threads(1)
    tokenizer, families, names = shapes.make_tokenizer(), args.family or FAMILIES, args.shape or USUAL
    print("| family | rows | tokens, padded | tokens, cache | s, padded | s, cache | times padded | loss differs by |")
    print("|---|---|---|---|---|---|---|---|")
    for family in families:
        model = make_model(family, tokenizer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        for name in names:
            rows = encoded(shapes.SHAPES[name], tokenizer)
            ways = [least_work(layout, rows) for layout in WAYS]
            step(model, optimizer, ways[1], rows[:8])  # warms up
            rounds = [[step(model, optimizer, way, rows) for way in ways] for _ in range(args.rounds)]
            least = [min(seconds for seconds, _ in each) for each in zip(*rounds, strict=True)]
            (_, padded), (_, cache) = rounds[0]
            computed = [f"{sum(map(way.way.tokens_in, way.divide(rows, 1)[0])):,}" for way in ways]
            cells = [family, name, *computed, *(f"{seconds:.2f}" for seconds in least)]
            cells += [f"{least[0] / least[1]:.2f}x", f"{abs(padded / cache - 1):.0e}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    if not args.peers:
        return
    print("\n| family | rows | trainer | s, accel_sft | s, trainer | accel_sft is | first loss differs by |")
    print("|---|---|---|---|---|---|---|")
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            make_model(family, tokenizer).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            for name in names:
                against_peers(Path(folder), family, name, args)


if __name__ == "__main__":
    main()
