"""The closed form of `accel-sft plan` against its simulation on fake tensors: models for GPUs, of which none is needed.

    python benchmarks/plan_simulation.py [--models 0.5B 7B ...] [--tokens 1024 ...] [--layers 4] [--smoke]

Compared is what a forward and backward add to the model states at their peak (activations, logits, gradients on their
way), in which the two answers differ; and with it the peak of one GPU of eight under ZeRO-2, without overhead.
`--layers` cuts the models, which a machine in a hurry takes; both answers are about the same cut model.
"""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import smoke
from accel_sft.launch.info import launch_of_yaml
from accel_sft.launch.precision import assume_precision
from accel_sft.memory.estimate import Estimate, assemble, estimate
from accel_sft.memory.job import Job
from accel_sft.memory.model_config import read_shape
from accel_sft.memory.states import placed
from simulated_memory import forward_backward

GIB = 2**30
MARK = 0.10
"""Mean relative difference up to which the two answers count as agreeing."""
LAUNCH = Path(__file__).parent.parent / "accelerate_configs/z2.yaml"


def _qwen(hidden: int, inner: int, layers: int, heads: int, key_value: int, vocabulary: int, tied: bool) -> dict:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


MODELS: dict[str, dict[str, Any]] = {
    "0.5B": _qwen(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": _qwen(1536, 8960, 28, 12, 2, 151936, True),
    "7B": _qwen(3584, 18944, 28, 28, 4, 152064, False),
    "14B": _qwen(5120, 13824, 48, 40, 8, 152064, False),
    "30B-A3B": _qwen(2048, 6144, 48, 32, 4, 151936, False)
    | {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
"""Models with the shapes of Qwen2.5's and Qwen3's published configurations."""


def compare(name: str, adapter: str, recomputed: bool, tokens: int, layers: int | None) -> dict[str, Any]:
    """The result of one case: both answers in GiB, and the seconds that the simulation took."""
    config = dict(MODELS[name])
    config["num_hidden_layers"] = min(config["num_hidden_layers"], layers or config["num_hidden_layers"])
    job = Job(
        shape=read_shape(config, name),
        launch=assume_precision(launch_of_yaml(LAUNCH, "--num_processes", "8"), bf16=True),
        device="cuda",
        adapter=adapter,
        gradient_checkpointing=recomputed,
        tokens=tokens,
        supervised_tokens=tokens // 2,
    )
    begun = time.perf_counter()
    followed = forward_backward(job, config)
    seconds = time.perf_counter() - begun
    states = placed(job)[0]
    simulated = assemble(job, placed(job), {"activations": followed.activations, "logits": followed.logits})
    resident = states.weights + states.master + states.moments + states.held + states.buffers + states.gradients
    closed = estimate(job)
    found = {"closed form": _peak(closed) / GIB, "simulation": _peak(simulated) / GIB}
    return {
        "case": (name, adapter, "recomputed" if recomputed else "kept", tokens),
        **found,
        "forward closed form": found["closed form"] - resident / GIB,
        "forward simulation": found["simulation"] - resident / GIB,
        "seconds": seconds,
    }


def _peak(found: Estimate) -> float:
    return sum(size for name, size in found.device["step"].items() if name != "overhead")


def error(case: dict[str, Any], prefix: str = "") -> float:
    return case[f"{prefix}closed form"] / case[f"{prefix}simulation"] - 1


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--adapters", nargs="+", choices=("none", "lora"), default=["none", "lora"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--layers", type=int, help="Cut models to so many layers.")
    asked = smoke.parse(parser, models=["0.5B"], adapters=["none"], tokens=[1024], layers=2)
    print("| model | adapter | activations | tokens | forward: closed form | forward: simulated | difference |", end="")
    print(" peak: closed form | peak: simulated | difference of peaks | s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    cases = []
    for name, adapter, recomputed, tokens in itertools.product(
        asked.models, asked.adapters, (False, True), asked.tokens
    ):
        case = compare(name, adapter, recomputed, tokens, asked.layers)
        cases.append(case)
        cells = [*map(str, case["case"])]
        for prefix in ("forward ", ""):
            cells += [f"{case[f'{prefix}{which}']:.2f}" for which in ("closed form", "simulation")]
            cells += [f"{error(case, prefix):+.0%}"]
        print("| " + " | ".join([*cells, f"{case['seconds']:.0f}"]) + " |", flush=True)
    for prefix, what in (("forward ", "forward and backward"), ("", "peak of a GPU")):
        errors = [abs(error(case, prefix)) for case in cases]
        mean = statistics.mean(errors)
        within = "within" if mean <= MARK else "beyond"
        print(f"{what}: mean difference {mean:.1%}, worst {max(errors):.1%}; {within} {MARK:.0%} (GiB)")


if __name__ == "__main__":
    main()
