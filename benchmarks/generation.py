"""Answers per second of accel_sft's evaluation and of plain transformers, on the same questions and the same model.

    python benchmarks/generation.py [--shape NAME ...] [--questions 128] [--rounds 3] [--alone] [--lora]
        [--unforeseen] [--samples 8] [--smoke]

All ways answer in turns in one process, in every round; medians over the rounds and their ratios are printed as a
table. They must give the same tokens: the same work is done.

Random weights hardly ever end a turn. The random head is therefore replaced: with the new head an answer counts down
from the question's last word and ends after zero, so a question says how long its answer is. The rest is computed as
usual. Rows are sorted by the lengths of expected answers, which the model gives exactly; with `--unforeseen` the
expected answers are those of other questions, as if the model had learnt nothing yet.

With `--samples N`, each question gets N sampled answers: by `accel-sft sample`'s sampler, and by `generate` with
`num_return_sequences=N`, one question at a time and 64 rows at a time. The head is then so large that the likeliest
token is always drawn: the work is that of sampling, and the tokens can still be compared.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from accel_sft.launch.environment import prepare_environment

prepare_environment()  # as the command line does before torch is imported

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig  # noqa: E402

import shapes  # noqa: E402
import smoke  # noqa: E402
from accel_sft.api.tool_configs import SampleConfig  # noqa: E402
from accel_sft.chat.encoded import Encoded  # noqa: E402
from accel_sft.evaluation.generate import Generator, common_prefix  # noqa: E402
from accel_sft.evaluation.sampling import Sampler  # noqa: E402
from accel_sft.models.architecture import cache_argument  # noqa: E402

SHAPES = {
    "series-a": shapes.SHAPES["series-a"],  # 20 + 8 + 18
    "long-instruction": shapes.SHAPES["long-instruction"],  # 300 + 30 + 20
    "long-questions": shapes.Shape(20, (240, 321), (10, 31), 0, 0),  # 20 + 280 + 20
    "mixed-answers": shapes.Shape(20, (5, 12), (2, 121), 0, 0, "log"),  # 20 + 8 + 2 to 120
    "mixed-lengths": shapes.Shape(30, (5, 60), (4, 129), 0, 0, "log"),  # 30 + 5 to 59 + 4 to 128
}
EMBEDDINGS_TIMES = 10
"""Factor on the embeddings, so that the last word decides the next word, whatever the random layers add to it."""

CERTAIN_TIMES = 100
"""Factor on the head for sampling: the likeliest token is then drawn each time."""


def count_down(model: torch.nn.Module, words: list[int], end: int) -> None:
    """Give the model a head after which word n - 1 follows word n, and the end follows word 0."""
    embeddings = model.get_input_embeddings().weight.data.mul_(EMBEDDINGS_TIMES)
    head = embeddings.clone()
    head[words[:-1]] = embeddings[words[1:]]
    head[words[-1]] = 0
    head[end] = embeddings[words[0]]
    model.lm_head.weight = torch.nn.Parameter(head)


def questions(shape: shapes.Shape, count: int, tokenizer: object, words: list[int]) -> list[Encoded]:
    """Rows of a shape; the last word of each question is as far from zero as its answer is long."""
    rows = shapes.make_rows(dataclasses.replace(shape, batch=count))
    found = []
    for index, row in enumerate(rows):
        tokens = len(row["answer"]) // 5 + 1  # a word has five characters; one more for the end
        prompt = tokenizer(row["instruction"] + row["question"])["input_ids"]
        prompt[-1] = words[tokens - 1]
        found.append(Encoded(index, [*prompt, *words[: tokens - 1][::-1], tokenizer.eos_token_id], len(prompt)))
    return found


class Transformers:
    """Plain `generate` on `rows` questions at a time, optionally with their common prefix already in the cache."""

    def __init__(
        self, model: torch.nn.Module, tokenizer: object, rows: int, most: int, prefix: int = 0, samples: int = 0
    ) -> None:
        self.model, self.tokenizer, self.rows, self.prefix = model, tokenizer, rows, prefix
        self.samples = samples or 1
        self.settings = GenerationConfig(
            **({"do_sample": True, "top_k": 0, "num_return_sequences": samples} if samples else {"do_sample": False}),
            max_new_tokens=most,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

    def __call__(self, examples: list[Encoded]) -> dict[int, list[int]]:
        ordered = sorted(examples, key=lambda example: -example.prompt_length) if self.rows > 1 else examples
        answers = {}
        for at in range(0, len(ordered), self.rows):
            batch = ordered[at : at + self.rows]
            prompts = [example.input_ids[: example.prompt_length] for example in batch]
            longest = max(map(len, prompts))
            pads = [longest - len(prompt) for prompt in prompts]
            before, pad = prompts[0][: self.prefix], [self.tokenizer.pad_token_id]
            ids = [before + pad * n + prompt[self.prefix :] for n, prompt in zip(pads, prompts, strict=True)]
            mask = [[1] * self.prefix + [0] * n + [1] * (longest - n - self.prefix) for n in pads]
            cache = {cache_argument(self.model.forward): self._cache(before, len(batch))} if self.prefix else {}
            output = self.model.generate(
                torch.tensor(ids), attention_mask=torch.tensor(mask), generation_config=self.settings, **cache
            )
            for number, answer in enumerate(output[:, longest:].tolist()):
                end, example = self.tokenizer.eos_token_id, batch[number // self.samples]
                whole = answer[: answer.index(end) + 1] if end in answer else answer
                assert answers.setdefault(example.index, whole) == whole, "samples differ"
        return answers

    def _cache(self, prefix: list[int], rows: int) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        self.model(input_ids=torch.tensor([prefix]), logits_to_keep=1, **{cache_argument(self.model.forward): cache})
        cache.batch_repeat_interleave(rows)
        return cache


def contestants(model: torch.nn.Module, tokenizer: object, examples: list[Encoded]) -> dict[str, Callable]:
    """The ways to answer by name, accel_sft's first."""
    most = max(example.supervised_tokens for example in examples)
    generator = Generator(Accelerator(cpu=True), tokenizer, model, None)
    started = time.perf_counter()
    generator.choose(examples, most)
    print(f"{generator.message}; checked once, in {time.perf_counter() - started:.1f} s\n")
    shared = common_prefix(examples)
    return {
        "accel_sft": lambda rows: {example.index: answer for example, answer in generator(rows, most).answers},
        "`generate`, 64 rows after a cached instruction": Transformers(model, tokenizer, 64, most, shared),
        "`generate`, 64 rows": Transformers(model, tokenizer, 64, most),
        "`generate`, one question at a time": Transformers(model, tokenizer, 1, most),
    }


def sampling(model: torch.nn.Module, tokenizer: object, examples: list[Encoded], samples: int) -> dict[str, Callable]:
    """The ways to sample by name, accel_sft's first."""
    most, config = max(example.supervised_tokens for example in examples), SampleConfig(samples=samples)
    sampler = Sampler(Accelerator(cpu=True), tokenizer, model, None)
    sampler.choose(examples, most)
    print(f"{sampler.message}\n")

    def ours(rows: list[Encoded]) -> dict[int, list[int]]:
        sampled = sampler.sample(rows, most, config)
        assert len(sampled) == samples * len(rows)
        answers = {row.index: ids for row, _, ids, _ in sampled}
        assert all(answers[row.index] == ids for row, _, ids, _ in sampled), "samples differ"
        return answers

    return {
        "accel_sft": ours,
        "`generate`, 64 rows": Transformers(model, tokenizer, max(64 // samples, 1), most, samples=samples),
        "`generate`, one question at a time": Transformers(model, tokenizer, 1, most, samples=samples),
    }


def unforeseen(examples: list[Encoded]) -> list[Encoded]:
    """The questions, each with the answer of another question."""
    drawn = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
    others = (examples[at].input_ids[examples[at].prompt_length :] for at in drawn)
    return [
        Encoded(own.index, [*own.input_ids[: own.prompt_length], *other], own.prompt_length)
        for own, other in zip(examples, others, strict=True)
    ]


@torch.no_grad()
def measure(
    ways: dict[str, Callable], examples: list[Encoded], expected: dict[int, list[int]], rounds: int
) -> dict[str, list[float]]:
    """The seconds of every round, by the name of the way."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for answer in ways.values():
        answer(examples[:8])
    for _ in range(rounds):
        for name, answer in ways.items():
            started = time.perf_counter()
            answers = answer(examples)
            seconds[name].append(time.perf_counter() - started)
            if answers != expected:
                raise SystemExit(f"{name}: other answers than the questions ask for")
    return seconds


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lora", action="store_true", help="With an adapter of rank 8 on all linear layers.")
    parser.add_argument("--unforeseen", action="store_true", help="The expected answers are those of other questions.")
    parser.add_argument("--samples", type=int, default=0, help="Sampled answers to each question; 0: a greedy one.")
    parser.add_argument("--alone", action="store_true", help="Measure accel_sft alone.")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    args = smoke.parse(parser, shape=["series-a"], questions=8, rounds=1, hidden=64, layers=2)
    torch.set_num_threads(os.cpu_count())
    with tempfile.TemporaryDirectory() as folder:
        shapes.make_model(Path(folder), args.hidden, args.layers)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = tokenizer.convert_tokens_to_ids([f"w{n:04}" for n in range(shapes.WORDS)])
    count_down(model, words, tokenizer.eos_token_id)
    if args.samples:
        model.lm_head.weight.data.mul_(CERTAIN_TIMES)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")).eval()
    for name in args.shape or SHAPES:
        examples = questions(SHAPES[name], args.questions, tokenizer, words)
        prompts = sum(example.prompt_length for example in examples)
        answered = sum(example.supervised_tokens for example in examples)
        print(f"\n## {name}: {len(examples)} questions, {prompts:,} tokens of prompts, {answered:,} of answers\n")
        expected = {example.index: example.input_ids[example.prompt_length :] for example in examples}
        examples = unforeseen(examples) if args.unforeseen else examples
        answered *= args.samples or 1
        kind = (args.samples,) if args.samples else ()
        ways = (sampling if kind else contestants)(model, tokenizer, examples, *kind)
        ways = {"accel_sft": ways["accel_sft"]} if args.alone else ways
        seconds = measure(ways, examples, expected, args.rounds)
        print("| way | answers/s | generated tokens/s | accel_sft is |\n|---|---|---|---|")
        ours = statistics.median(seconds["accel_sft"])
        for way, taken in seconds.items():
            median = statistics.median(taken)
            speeds = f"{len(examples) * (args.samples or 1) / median:,.1f} | {answered / median:,.0f}"
            print(f"| {way} | {speeds} | {median / ours:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
