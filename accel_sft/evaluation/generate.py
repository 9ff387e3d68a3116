"""Greedy answers to a set of prompts: what they share is computed once, and each rank has the same work (law 4)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import GenerationConfig, StoppingCriteriaList

from accel_sft.batching.verify import REDUCED_TOLERANCE, TOLERANCE
from accel_sft.data.chat import Encoded, end_of_turn_ids
from accel_sft.evaluation.decoder import Decoder
from accel_sft.io.heartbeat import heartbeat
from accel_sft.launch.collectives import any_rank, first_reason
from accel_sft.models.adapters import merged, reason_unmergeable
from accel_sft.models.architecture import arguments, limited_layers

SHORTEST_PREFIX = 8
"""Common tokens below which there is nothing to save."""
READ_TOKENS = 2048
"""Tokens, padding included, that one forward over prompts takes."""
FEWEST_ROWS, MOST_ROWS, CACHED_TOKENS = 64, 256, 16384
"""Rows answered at once where no number is given: the fewest, or more as long as they are no more tokens than that."""
CHECKED_ROWS, CHECKED_AMONG = 3, 256


class Generator:
    """Answers prompts with a prepared model at any stage, on any number of ranks; touches no random state.

    What is exact for the very model is found out on it at first use; `told` then says what was chosen, and why.

    Args:
        batch_size: rows answered at once on one rank; None: by their length.
        max_new_tokens: of an answer, its end-of-turn token included.
        between: called by every rank before each batch of answers.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        tokenizer: Any,
        batch_size: int | None,
        max_new_tokens: int,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.between = between
        self.accelerator, self.tokenizer = accelerator, tokenizer
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        plugin = accelerator.state.deepspeed_plugin
        zero3 = plugin is not None and plugin.zero_stage == 3
        self.sharded = zero3 or accelerator.distributed_type == DistributedType.FSDP
        self.told = ""

    def __call__(self, model: torch.nn.Module, examples: Sequence[Encoded]) -> list[tuple[Encoded, list[int]]]:
        """This rank's share of the examples, each with its answer's token ids, the end-of-turn token included.

        Every rank calls it, with the same examples, in eval mode and without gradients.
        """
        self.choose(model, examples)
        unwrapped = self.accelerator.unwrap_model(model)
        prefix = common_prefix(examples)
        with self._ready(unwrapped):
            decoder = None if self.plain else self._decoder(unwrapped, examples[0].input_ids[:prefix])
            answered = []
            for ranks in divide(examples, self.accelerator.num_processes, self._rows_at_once(examples, prefix)):
                self.between()
                rows = ranks[self.accelerator.process_index]
                # a rank that has run out of rows answers any, for the ranks share their weights
                some = rows or next(filter(None, ranks))[:1]
                answers = self._answers(unwrapped, decoder, some, _forwards(ranks, prefix))
                answered += zip(rows, answers, strict=False)
        return answered

    def choose(self, model: torch.nn.Module, examples: Sequence[Encoded]) -> bool:
        """Find out, on all ranks, what is exact for this model; False from the second time on: it is known."""
        if self.told:
            return False
        unwrapped, prefix = self.accelerator.unwrap_model(model), common_prefix(examples)
        with self._ready(unwrapped) as adapter:
            self.plain = self._why_plain(unwrapped, examples, prefix)
        self.told = self._line(prefix, adapter)
        return True

    @contextlib.contextmanager
    def _ready(self, model: Any) -> Iterator[str | None]:
        """The model as it is quickest; why an adapter is not merged."""
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

    def _line(self, prefix: int, adapter: str | None) -> str:
        line = f"answers: the {prefix} tokens that all prompts begin with are computed once"
        if self.plain:
            line = f"answers by transformers' generate, as {self.plain}"
        elif not prefix:
            line = f"answers: prompts begin with fewer than {SHORTEST_PREFIX} common tokens; each is computed whole"
        return f"{line}; the adapter stays apart, as {adapter}" if adapter else line

    def _decoder(self, model: Any, prefix: Sequence[int]) -> Decoder:
        keep = "logits_to_keep" in arguments(model)
        return Decoder(model, prefix, self.accelerator.device, logits_to_keep=keep)

    def _answers(self, model: Any, decoder: Decoder | None, rows: Sequence[Encoded], forwards: int) -> list[list[int]]:
        settings = greedy(self.tokenizer, model, self.max_new_tokens)
        if decoder is None:
            return generate(model, self.tokenizer, settings, rows, self.accelerator.device)
        return decoder.answers(
            [row.input_ids[decoder.length : row.prompt_length] for row in rows],
            self.max_new_tokens,
            set(settings.eos_token_id),
            forwards=forwards,
            anyone=any_rank if self.sharded else bool,
        )

    def _rows_at_once(self, examples: Sequence[Encoded], prefix: int) -> int:
        if self.batch_size or self.plain:
            return self.batch_size or FEWEST_ROWS
        longest = max(example.prompt_length for example in examples) - prefix + self.max_new_tokens
        return min(max(CACHED_TOKENS // longest, FEWEST_ROWS), MOST_ROWS)

    def _why_plain(self, model: Any, examples: Sequence[Encoded], prefix: int) -> str | None:
        """Why the model is left to transformers' `generate`, on all ranks; None if it need not be."""
        longest = max(example.prompt_length for example in examples) + self.max_new_tokens
        empty = "a prompt is empty" if any(example.prompt_length == 0 for example in examples) else None
        reason = empty or _reason_unsupported(model, longest) or self._differs(model, examples, prefix)
        return first_reason(reason)

    def _differs(self, model: Any, examples: Sequence[Encoded], prefix: int) -> str | None:
        """What is wrong with the predictions for a few rows, compared with each row alone without a cache."""
        among = sorted(examples[:CHECKED_AMONG], key=lambda example: (-example.prompt_length, example.index))
        rows = among[:: max(len(among) // CHECKED_ROWS, 1)][:CHECKED_ROWS]
        prompts = [row.input_ids[: row.prompt_length] for row in rows]
        fed = [(row.input_ids[row.prompt_length], prompt[-1]) for row, prompt in zip(rows, prompts, strict=True)]
        try:
            decoder = self._decoder(model, prompts[0][:prefix])
            tokens = torch.tensor(fed, device=self.accelerator.device)
            found = [decoder.start([prompt[prefix:] for prompt in prompts]), decoder.step(tokens[:, 0])]
            decoder.keep(torch.arange(0, len(rows), 2, device=tokens.device))
            found.append(decoder.step(tokens[::2, 1]))
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
            return f"the model takes no shared prefix ({str(error).splitlines()[0][:100]})"
        largest = 0.0
        for number, (prompt, more) in enumerate(zip(prompts, fed, strict=True)):
            ids = torch.tensor([[*prompt, *more]], device=self.accelerator.device)
            alone = model(input_ids=ids, use_cache=False).logits[0, -3:].double().log_softmax(dim=-1)
            together = [found[0][number], found[1][number], *([found[2][number // 2]] if number % 2 == 0 else [])]
            for expected, logits in zip(alone, together, strict=False):
                off = (logits.double().log_softmax(dim=-1) - expected).abs()
                largest = max(largest, (expected.exp() * off).sum().nan_to_num(nan=math.inf).item())
        exact = self.accelerator.mixed_precision == "no" and model.dtype == torch.float32
        if largest > (TOLERANCE if exact else REDUCED_TOLERANCE):
            return f"its predictions behind a shared prefix are not those of single rows (off by {largest:.2g} nats)"
        return None


def common_prefix(examples: Sequence[Encoded]) -> int:
    """How many tokens all prompts begin with, at least one being left of each; 0 if too few to matter."""
    prompts = [example.input_ids[: example.prompt_length] for example in examples]
    first, last = min(prompts), max(prompts)
    most = min(map(len, prompts)) - 1
    length = next((at for at in range(most) if first[at] != last[at]), most)
    return length if length >= SHORTEST_PREFIX else 0


def divide(examples: Sequence[Encoded], ranks: int, batch_size: int) -> list[list[list[Encoded]]]:
    """Batches of like work, longest first, and each rank's rows of them; the same on every rank.

    A row's work is its tokens, those of the answer that is expected included. A batch gives all ranks as many rows, or
    one less, and its longest row to another rank than the batch before.
    """
    ordered = sorted(examples, key=lambda example: (-len(example.input_ids), example.index))
    count = math.ceil(len(ordered) / (ranks * batch_size))
    batches = []
    for number, places in enumerate(np.array_split(np.arange(len(ordered)), count)):
        rows = sorted((ordered[at] for at in places), key=lambda example: (-example.prompt_length, example.index))
        batches.append([rows[(rank + number) % ranks :: ranks] for rank in range(ranks)])
    return batches


def _forwards(ranks: Sequence[Sequence[Encoded]], prefix: int) -> int:
    """Among how many forwards the prompts of a batch are divided, on every rank."""
    most = max(len(rows) * max(row.prompt_length - prefix for row in rows) for rows in ranks if rows)
    return max(1, min(math.ceil(most / READ_TOKENS), *map(len, ranks)))


def _reason_unsupported(model: Any, longest: int) -> str | None:
    """Why the model's architecture or settings rule a shared prefix out, as far as its configuration tells."""
    attention = getattr(model.config, "_attn_implementation", None)
    if attention != "sdpa":
        return f"attention {attention} takes no shared prefix, sdpa does"
    if "position_ids" not in arguments(model):
        return "the model takes no positions"
    limited = limited_layers(model, longest)
    return f"the model's cache has layers of another kind ({limited})" if limited else None


def greedy(tokenizer: Any, model: Any, max_new_tokens: int) -> Any:
    """Generation settings for greedy answers; what the model's own file says of sampling or penalties is overruled."""
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(end_of_turn_ids(tokenizer, model.generation_config)),
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )


def _beats(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    """A stopping criterion that stops nothing, asked after every token."""
    heartbeat()
    return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate(
    model: Any, tokenizer: Any, settings: Any, batch: Sequence[Encoded], device: torch.device
) -> list[list[int]]:
    """Answers' token ids (end-of-turn included), one per example, from left-padded prompts in one batch."""
    longest = max(example.prompt_length for example in batch)
    rows = [example.input_ids[: example.prompt_length] for example in batch]
    input_ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)  # (B, T)
    criteria = StoppingCriteriaList([_beats])
    output = model.generate(
        input_ids=input_ids, attention_mask=mask, generation_config=settings, stopping_criteria=criteria
    )
    ends = set(settings.eos_token_id)
    answers = []
    for ids in output[:, longest:].tolist():
        stop = next((at for at, token in enumerate(ids) if token in ends), len(ids) - 1)
        answers.append(ids[: stop + 1])
    return answers
