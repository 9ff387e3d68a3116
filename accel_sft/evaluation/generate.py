"""Generates with the model in memory: by the decoder where that is exact, else by `generate`; equal work per rank."""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import GenerationConfig, StoppingCriteriaList

from accel_sft.batching.verify import REDUCED_TOLERANCE, TOLERANCE
from accel_sft.data.chat import Encoded, end_of_turn_ids
from accel_sft.evaluation.backend import Generated
from accel_sft.evaluation.decoder import Decoder
from accel_sft.io.heartbeat import heartbeat
from accel_sft.launch.collectives import any_rank, first_reason
from accel_sft.models.adapters import merged, reason_unmergeable
from accel_sft.models.architecture import arguments, limited_layers
from accel_sft.tracking.system import peak_memory_gib

SHORTEST_PREFIX = 8
"""Common tokens below which sharing them saves nothing."""
READ_TOKENS = 2048
"""Tokens, padding included, that one forward over prompts takes."""
FEWEST_ROWS, MOST_ROWS, CACHED_TOKENS = 64, 256, 16384
"""Without a batch size a batch has the fewest rows, or up to the most if their cache stays within so many tokens."""
CHECKED_ROWS, CHECKED_AMONG = 3, 256
"""The decoder is compared with single rows on a few of the first rows."""


class Generator:
    """Answers prompts with a prepared model at any stage, on any number of ranks; touches no random state.

    The first call finds out whether the decoder is exact for this model. `message` then says what was chosen, and why.

    Args:
        model: in eval mode whenever the generator is called, without gradients.
        batch_size: rows answered at once on one rank; None: by their length.
        between: called by every rank before each batch of answers.
        log: takes `message` once, on rank 0.
    """

    uses_model = True

    def __init__(
        self,
        accelerator: Accelerator,
        tokenizer: Any,
        model: torch.nn.Module,
        batch_size: int | None,
        between: Callable[[], None] = lambda: None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.accelerator, self.tokenizer = accelerator, tokenizer
        self.model: Any = accelerator.unwrap_model(model)
        self.batch_size, self.between, self.log = batch_size, between, log
        plugin = accelerator.state.deepspeed_plugin
        zero3 = plugin is not None and plugin.zero_stage == 3
        self.sharded = zero3 or accelerator.distributed_type == DistributedType.FSDP
        self.message = ""

    def __call__(self, examples: Sequence[Encoded], max_new_tokens: int) -> Generated:
        """Answer this rank's share of the examples; every rank calls it with the same ones."""
        self.choose(examples, max_new_tokens)
        self.accelerator.wait_for_everyone()
        started = time.perf_counter()
        with self._ready():
            answers = self._answer_all(examples, max_new_tokens)
        return Generated(answers, time.perf_counter() - started, peak_memory_gib(self.accelerator.device))

    def choose(self, examples: Sequence[Encoded], max_new_tokens: int) -> None:
        """Find out, on all ranks together, whether the decoder is exact for this model, unless that is known."""
        if self.message:
            return
        prefix = common_prefix(examples)
        longest = max(example.prompt_length for example in examples) + max_new_tokens
        with self._ready() as adapter:
            reason = _reason_unsupported(self.model, examples, longest) or self._reason_inexact(examples, prefix)
            self.plain = first_reason(reason)
        self.message = f"answers: the {prefix} tokens that all prompts begin with are computed once"
        if self.plain:
            self.message = f"answers by transformers' generate, as {self.plain}"
        elif not prefix:
            self.message = (
                f"answers: prompts begin with fewer than {SHORTEST_PREFIX} common tokens; each is computed whole"
            )
        if adapter:
            self.message += f"; the adapter stays apart, as {adapter}"
        if self.accelerator.is_main_process:
            self.log(self.message)

    def _answer_all(self, examples: Sequence[Encoded], max_new_tokens: int) -> list[tuple[Encoded, list[int]]]:
        device, anyone = self.accelerator.device, any_rank if self.sharded else bool
        ends = end_of_turn_ids(self.tokenizer, self.model.generation_config)
        prefix, most = common_prefix(examples), self.batch_size or FEWEST_ROWS
        if not self.plain:
            decoder = Decoder(self.model, examples[0].input_ids[:prefix], device)
            longest = max(example.prompt_length for example in examples) - prefix + max_new_tokens
            most = self.batch_size or min(max(CACHED_TOKENS // longest, FEWEST_ROWS), MOST_ROWS)
        answered = []
        for ranks in divide(examples, self.accelerator.num_processes, most):
            self.between()
            rows = ranks[self.accelerator.process_index]
            # a rank that has run out of rows answers any, for the ranks share their weights
            prompts = [row.input_ids[: row.prompt_length] for row in rows or next(filter(None, ranks))[:1]]
            if self.plain:
                answers = generate(self.model, prompts, max_new_tokens, ends, self.tokenizer.pad_token_id, device)
            else:
                own, forwards = [prompt[prefix:] for prompt in prompts], _forwards(ranks, prefix)
                answers = decoder.answers(own, max_new_tokens, ends, forwards=forwards, anyone=anyone)
            answered += zip(rows, answers, strict=False)
        return answered

    @contextlib.contextmanager
    def _ready(self) -> Iterator[str | None]:
        """Inside, the adapter is merged where that changes no answer; yields the reason why it is not."""
        model = self.model
        with contextlib.ExitStack() as stack:
            if hasattr(model, "_original_forward"):  # autocast: casts of the weights are kept from forward to forward
                stack.enter_context(self.accelerator.autocast())
            if not hasattr(model, "peft_config"):
                yield None
            elif self.sharded:
                yield "the weights are shared out"
            elif self.accelerator.mixed_precision != "no":
                yield "its sum with the weights would be rounded"
            else:  # where memory is short on one rank, all leave it, so that all answer alike
                reason = first_reason(reason_unmergeable(model))
                if not reason:
                    stack.enter_context(merged(model))
                yield reason

    def _reason_inexact(self, examples: Sequence[Encoded], prefix: int) -> str | None:
        """How the decoder's predictions for a few rows differ from those of each row alone; None if they do not."""
        among = sorted(examples[:CHECKED_AMONG], key=lambda example: (-example.prompt_length, example.index))
        rows = among[:: max(len(among) // CHECKED_ROWS, 1)][:CHECKED_ROWS]
        prompts = [row.input_ids[: row.prompt_length] for row in rows]
        fed = [(row.input_ids[row.prompt_length], prompt[-1]) for row, prompt in zip(rows, prompts, strict=True)]
        try:
            decoder = Decoder(self.model, prompts[0][:prefix], self.accelerator.device)
            tokens = torch.tensor(fed, device=self.accelerator.device)
            found = [decoder.start([prompt[prefix:] for prompt in prompts]), decoder.step(tokens[:, 0])]
            decoder.keep(torch.arange(0, len(rows), 2, device=tokens.device))
            found.append(decoder.step(tokens[::2, 1]))
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
            return f"the model takes no shared prefix ({str(error).splitlines()[0][:100]})"
        largest = 0.0
        for number, (prompt, more) in enumerate(zip(prompts, fed, strict=True)):
            ids = torch.tensor([[*prompt, *more]], device=self.accelerator.device)
            alone = self.model(input_ids=ids, use_cache=False).logits[0, -3:].double().log_softmax(dim=-1)
            together = [found[0][number], found[1][number], *([found[2][number // 2]] if number % 2 == 0 else [])]
            for expected, logits in zip(alone, together, strict=False):
                off = (logits.double().log_softmax(dim=-1) - expected).abs()
                largest = max(largest, (expected.exp() * off).sum().nan_to_num(nan=math.inf).item())
        exact = self.accelerator.mixed_precision == "no" and self.model.dtype == torch.float32
        if largest > (TOLERANCE if exact else REDUCED_TOLERANCE):
            return f"its predictions behind a shared prefix are not those of single rows (off by {largest:.2g} nats)"
        return None


def common_prefix(examples: Sequence[Encoded]) -> int:
    """The number of tokens that all prompts begin with, less than any prompt has; 0 if below SHORTEST_PREFIX."""
    prompts = [example.input_ids[: example.prompt_length] for example in examples]
    first, last, most = min(prompts), max(prompts), min(map(len, prompts)) - 1
    length = next((at for at in range(most) if first[at] != last[at]), most)
    return length if length >= SHORTEST_PREFIX else 0


def divide(examples: Sequence[Encoded], ranks: int, batch_size: int) -> list[list[list[Encoded]]]:
    """Batches of similar work, longest first, each as a list of rows per rank; the same on every rank.

    The work of a row is its number of tokens, with those of the expected answer. Within a batch the ranks' numbers of
    rows differ by one at most, and the longest row goes to another rank than in the batch before.
    """
    ordered = sorted(examples, key=lambda example: (-len(example.input_ids), example.index))
    count = math.ceil(len(ordered) / (ranks * batch_size))
    batches = []
    for number, places in enumerate(np.array_split(np.arange(len(ordered)), count)):
        rows = sorted((ordered[at] for at in places), key=lambda example: (-example.prompt_length, example.index))
        batches.append([rows[(rank + number) % ranks :: ranks] for rank in range(ranks)])
    return batches


def _forwards(ranks: Sequence[Sequence[Encoded]], prefix: int) -> int:
    """The number of forwards that read the prompts of a batch, the same on every rank."""
    most = max(len(rows) * max(row.prompt_length - prefix for row in rows) for rows in ranks if rows)
    return max(1, min(math.ceil(most / READ_TOKENS), *map(len, ranks)))


def _reason_unsupported(model: Any, examples: Sequence[Encoded], longest: int) -> str | None:
    """Why a prompt or the model's configuration rules out the decoder; None if they do not."""
    if any(example.prompt_length == 0 for example in examples):
        return "a prompt is empty"
    attention = getattr(model.config, "_attn_implementation", None)
    if attention != "sdpa":
        return f"attention {attention} takes no shared prefix, sdpa does"
    if "position_ids" not in arguments(model):
        return "the model takes no positions"
    limited = limited_layers(model, longest)
    return f"the model's cache has layers of another kind ({limited})" if limited else None


def generate(
    model: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    ends: Collection[int],
    pad_token_id: int,
    device: torch.device,
) -> list[list[int]]:
    """Greedy answers by transformers, up to the first of `ends`, which is part of them, from left-padded prompts."""
    longest = max(map(len, prompts))
    rows = [[pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    output = model.generate(
        input_ids=torch.tensor(rows, device=device),
        attention_mask=torch.tensor(mask, device=device),
        generation_config=GenerationConfig(  # overrides sampling and penalties in the model's own
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(ends),
            pad_token_id=pad_token_id,
            use_cache=True,
        ),
        stopping_criteria=StoppingCriteriaList([_heartbeat_criterion]),
    )
    answers = []
    for ids in output[:, longest:].tolist():
        stop = next((at for at, token in enumerate(ids) if token in ends), len(ids) - 1)
        answers.append(ids[: stop + 1])
    return answers


def _heartbeat_criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    """A stopping criterion that never stops; it is called after every token."""
    heartbeat()
    return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
