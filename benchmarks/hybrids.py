"""Rows that go on from a cache of their instruction against padded rows, in hybrids of about 12 million parameters.

    python benchmarks/hybrids.py [--family NAME ...] [--shape NAME ...] [--rounds 5] [--smoke]

Optimizer steps of the same rows, in turns, in one process with one thread, in float32. Each way takes the size of
forwards with the least work. CPU seconds of the process are counted, in which other programs hardly show; the least of
the rounds.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import shapes
import smoke
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
    | {"mamba_expand": 2, "mamba_chunk_size": 64, "position_embedding_type": "nope"},
}
WAYS = {"padded": "causal", "shared": "cache"}
EACH_FORWARD = 64.0
"""Fixed cost of a forward with one thread, in tokens, as accel_sft counts it."""


def make_model(family: str) -> Any:
    """A model of this family with random weights, 384 wide with 6 layers."""
    width = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 4352}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 4096}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": True}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**width, **heads, **special, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def tokens(text: str) -> list[int]:
    return [int(text[at + 1 : at + 5]) + 2 for at in range(0, len(text), 5)]


def encoded(shape: shapes.Shape) -> list[Encoded]:
    made = []
    for index, row in enumerate(shapes.make_rows(shape)):
        prompt = tokens(row["instruction"] + row["question"])
        made.append(Encoded(index, [*prompt, *tokens(row["answer"]), 1], len(prompt)))
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


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--shape", action="append", choices=shapes.SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    args = smoke.parse(parser, family=["lfm2"], shape=["series-a"], rounds=1)
    torch.set_num_threads(1)
    print("| family | rows | tokens, padded | tokens, cache | s, padded | s, cache | times padded | loss differs by |")
    print("|---|---|---|---|---|---|---|---|")
    for family in args.family or FAMILIES:
        model = make_model(family)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        for shape in args.shape or ("series-b", "long-instruction"):
            rows = encoded(shapes.SHAPES[shape])
            ways = [least_work(layout, rows) for layout in WAYS]
            step(model, optimizer, ways[1], rows[:8])  # warms up
            rounds = [[step(model, optimizer, way, rows) for way in ways] for _ in range(args.rounds)]
            least = [min(seconds for seconds, _ in each) for each in zip(*rounds, strict=True)]
            (_, padded), (_, cache) = rounds[0]
            computed = [f"{way.computed_tokens(rows, 1):,}" for way in ways]
            cells = [family, shape, *computed, *(f"{seconds:.2f}" for seconds in least)]
            cells += [f"{least[0] / least[1]:.2f}x", f"{abs(padded / cache - 1):.0e}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
