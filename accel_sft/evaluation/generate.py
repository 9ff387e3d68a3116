"""Generates answers with the model in memory, on all ranks. The decoder is used if it is exact for this model, else
transformers' `generate`, with left padding unless a test shows that padding changes the predictions."""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import StoppingCriteriaList

from accel_sft.api.errors import first_line
from accel_sft.batching.device_memory import done_within_memory, in_halves, out_of_memory
from accel_sft.batching.verify import REDUCED_TOLERANCE, TOLERANCE
from accel_sft.chat.encoded import Encoded, end_of_turn_ids
from accel_sft.evaluation.decoder import Choice, Decoder, Row
from accel_sft.evaluation.evaluator import Generated
from accel_sft.io.heartbeat import heartbeat
from accel_sft.io.text import common_length
from accel_sft.launch.collectives import any_rank, first_reason
from accel_sft.launch.groups import row_groups, tensor_ranks
from accel_sft.models.architecture import REFUSALS, arguments, limited_layers, takes_sdpa
from accel_sft.models.tokenizer import left_out
from accel_sft.tracking.system import peak_memory_gib

MET_EVERY = 32
"""Number of forwards between two meetings of the ranks, where a signal to end the evaluation reaches all of them."""
FEWEST_ROWS, MOST_ROWS, CACHED_TOKENS = 64, 256, 16384
"""Without a batch size, a batch's rows fill CACHED_TOKENS of KV cache, within the limits FEWEST_ROWS and MOST_ROWS."""
SHORTEST_PREFIX = 8
"""Prompts share a common prefix only if it has at least this many tokens; sharing a shorter one saves nothing."""
CHECKED_ROWS, CHECKED_AMONG = 3, 256
"""Before use, the decoder is compared with forwards of single rows, on CHECKED_ROWS of the first CHECKED_AMONG rows."""
CHECKED_TOKENS = 3
"""Number of tokens that are generated for each prompt, once in a padded batch and once alone, to compare the two."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """Divisor of the logits before a token is drawn; 0: the most likely token is taken."""
    top_p: float = 1.0
    """Tokens are drawn from the most likely ones that together have this probability."""
    top_k: int = 0
    """Tokens are drawn from this many of the most likely ones; 0: from all."""
    repetition_penalty: float = 1.0
    """Factor by which logits of tokens that occurred before get smaller; 1: no change."""

    def settings(self) -> dict[str, Any]:
        """Arguments of a GenerationConfig that override the model's own settings."""
        chosen = {"do_sample": self.temperature > 0, "num_beams": 1, "repetition_penalty": self.repetition_penalty}
        if self.temperature <= 0:
            return chosen
        return {**chosen, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": None}


GREEDY = Sampling()


class Generator:
    """Answers prompts with a model, sharded or not, on any number of ranks. Greedy answers draw no random numbers.

    The first call finds out whether the decoder is exact for this model; `message` then says how answers are generated,
    and why. Prompts with images, and sampled answers, always use transformers' `generate`. The model must be in eval
    mode, with gradients off. Every rank calls `between` before each batch of answers. If weights are `sharded`, all
    ranks take part in each forward.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        tokenizer: Any,
        model: torch.nn.Module,
        batch_size: int | None,
        between: Callable[[], None] = lambda: None,
        log: Callable[[str], None] = lambda line: None,
        sampling: Sampling = GREEDY,
        sharded: bool = False,
    ) -> None:
        self.accelerator, self.tokenizer, self.sampling = accelerator, tokenizer, sampling
        self.model: Any = accelerator.unwrap_model(model)
        self.batch_size, self.between, self.log, self.sharded = batch_size, between, log, sharded
        self.synced = sharded and accelerator.num_processes > 1
        self.message = ""
        self.plain: str | None = None  # why transformers' `generate` is used; None: the decoder is used
        self.unpadded: str | None = None  # why a batch has only prompts of equal length; None: prompts are padded

    def __call__(self, examples: Sequence[Encoded], max_new_tokens: int) -> Generated:
        """Answer this rank's share of the examples. Every rank must call this with the same examples."""
        texts = [example for example in examples if not example.images]
        pictured = [example for example in examples if example.images]
        if texts:
            self.choose(texts, max_new_tokens)
        self.accelerator.wait_for_everyone()
        started = time.perf_counter()
        answers: list[tuple[Encoded, list[int]]] = []
        with self.casts_once():
            if texts:
                answers += (self._by_generate if self.plain else self._by_decoder)(texts, max_new_tokens)
            if pictured:
                answers += self._by_generate(pictured, max_new_tokens)
        seconds = time.perf_counter() - started
        # ranks that share matrices have all answered the same rows: the first of them returns the answers
        first = self.accelerator.process_index % tensor_ranks(self.accelerator) == 0
        return Generated(answers if first else [], seconds, peak_memory_gib(self.accelerator.device))

    def choose(self, examples: Sequence[Encoded], max_new_tokens: int) -> None:
        """Find out, on all ranks together, whether the decoder is exact for this model, unless already known."""
        if self.message:
            return
        prefix = common_prefix(examples)
        longest = max(example.prompt_length for example in examples) + max_new_tokens
        with self.casts_once():
            reason = None if self.sampling == GREEDY else "tokens are sampled"
            reason = reason or _reason_unsupported(self.model, examples, longest)
            reason = reason or self._reason_inexact(examples, prefix)
            self.plain = first_reason(reason)
            self.unpadded = first_reason(self._reason_unpadded(examples)) if self.plain else None
        shared = f"the {prefix} tokens that all prompts begin with are computed once"
        self.message = f"answers: {shared if prefix else 'each prompt is computed in full'}"
        if self.plain:
            self.message = f"answers are generated by transformers, because {self.plain}"
            if self.unpadded:
                self.message += f"; only prompts of equal length are answered together, because {self.unpadded}"
        if self.accelerator.is_main_process:
            self.log(self.message)

    def stream(self, prompt: list[int], max_new_tokens: int, streamer: Any) -> None:
        """Generate one answer by transformers' `generate`; `streamer` gets each token. Weights must not be sharded."""
        self._generate([prompt], max_new_tokens, streamer=streamer)

    def ends(self) -> set[int]:
        """The ids that end an answer."""
        return end_of_turn_ids(self.tokenizer, self.model.generation_config)

    def _generate(self, prompts: list[list[int]], max_new_tokens: int, **more: Any) -> tuple[list[list[int]], Any]:
        pad, device = self.tokenizer.pad_token_id, self.accelerator.device
        settings = {"sampling": self.sampling, **more}
        return generate(self.model, prompts, max_new_tokens, self.ends(), pad, device, **settings)

    def _by_decoder(self, examples: Sequence[Encoded], max_new_tokens: int) -> list[tuple[Encoded, list[int]]]:
        groups, group = row_groups(self.accelerator)
        prefix = common_prefix(examples)
        share = [row for ranks in divide(examples, groups, 1) for row in ranks[group]]  # the longest first
        rows = {Row(example.input_ids[prefix : example.prompt_length]): example for example in share}
        self.decode(rows, examples, max_new_tokens)
        return [(example, row.answer) for row, example in rows.items()]

    def decode(self, rows: dict[Row, Encoded], every: Sequence[Encoded], most: int, *choose: Choice) -> None:
        """Answer rows by the decoder, each in at most `most` tokens; neighbours of one example become twins. All ranks
        must call this together, with the same examples in `every`, whose common prefix the rows' prompts lack."""
        prefix = common_prefix(every)
        longest = max(example.prompt_length for example in every) - prefix + most
        places = self.batch_size or min(max(CACHED_TOKENS // longest, FEWEST_ROWS), MOST_ROWS)
        waiting, meeting, ends = dict.fromkeys(rows), _Meeting(self.between, self.sharded), self.ends()

        def answer() -> None:
            twins = [[*alike] for _, alike in itertools.groupby(waiting, key=lambda row: id(rows[row]))]
            for row, *others in twins:
                row.twins = others
            for row in waiting:
                row.answer.clear()
            decoder = Decoder(self.model, every[0].input_ids[:prefix], self.accelerator.device)
            for row in decoder.answers([row for row, *_ in twins], places, most, ends, meeting, *choose):
                del waiting[row]

        while not done_within_memory(answer, at_once := min(places, len(waiting)), alone=not self.sharded):
            places = at_once // 2

    def _by_generate(self, examples: Sequence[Encoded], max_new_tokens: int) -> list[tuple[Encoded, list[int]]]:
        """Answer examples without images in batches, or examples that all have images one at a time."""
        groups, group = row_groups(self.accelerator)
        answered: list[tuple[Encoded, list[int]]] = []

        def answer(rows: list[Encoded]) -> list[list[int]]:
            prompts = [row.input_ids[: row.prompt_length] for row in rows]
            # keeps all ranks going until the last one is done; by default, transformers does this only under ZeRO-3
            more: dict[str, Any] = {"synced_gpus": self.synced or None}
            if images := rows[0].images:
                arrays = images.origin.inputs.tensors(prompts, [images], (1, len(prompts[0])))
                more |= {name: torch.as_tensor(array, device=self.accelerator.device) for name, array in arrays.items()}
            return self._generate(prompts, max_new_tokens, **more)[0]

        alike = {} if examples[0].images else {"equal_lengths": bool(self.unpadded)}
        size = 1 if examples[0].images else self.batch_size or FEWEST_ROWS
        for ranks in divide(examples, groups, size, **alike):
            self.between()
            rows = ranks[group]
            if not (rows or self.sharded):
                continue
            # with sharded weights, a rank that has no rows must still take part: it answers any row
            answers = in_halves(answer, rows or next(filter(None, ranks))[:1], alone=not self.sharded)
            answered += zip(rows, answers, strict=False)
        return answered

    def casts_once(self) -> contextlib.AbstractContextManager[Any]:
        """Within this context, autocast (if used) casts each weight only once for all forwards."""
        uses_autocast = hasattr(self.model, "_original_forward")
        return self.accelerator.autocast() if uses_autocast else contextlib.nullcontext()

    def _reason_inexact(self, examples: Sequence[Encoded], prefix: int) -> str | None:
        """Why the decoder's predictions for a few rows are not those of single rows; None if they agree."""
        among = sorted(examples[:CHECKED_AMONG], key=lambda example: (-example.prompt_length, example.index))
        rows = among[:: max(len(among) // CHECKED_ROWS, 1)][:CHECKED_ROWS]
        prompts = [row.input_ids[: row.prompt_length] for row in rows]
        fed = [(row.input_ids[row.prompt_length], prompt[-1]) for row, prompt in zip(rows, prompts, strict=True)]
        together_logits: list[list[torch.Tensor]] = []

        def staggered() -> None:
            together_logits[:] = self._staggered([Row(prompt[prefix:]) for prompt in prompts], fed, prompts[0][:prefix])

        try:
            while not done_within_memory(staggered, len(prompts), alone=not self.sharded):
                del prompts[0], fed[0]  # the longest
        except REFUSALS as error:
            if out_of_memory(error):  # this says nothing about what the model supports
                raise
            return f"the model does not support a shared prefix ({first_line(error)[:100]})"
        largest, last = 0.0, {"logits_to_keep": 3} if "logits_to_keep" in arguments(self.model) else {}
        for prompt, more, together in zip(prompts, fed, together_logits, strict=True):
            ids = torch.tensor([[*prompt, *more]], device=self.accelerator.device)
            alone = self.model(input_ids=ids, use_cache=False, **last).logits[0, -3:]
            largest = max(largest, *map(nats_apart, alone, together))
        if largest > self._tolerance():
            return f"its predictions after a shared prefix differ from those of single rows (by {largest:.2g} nats)"
        return None

    def _staggered(
        self, rows: Sequence[Row], fed: Sequence[Sequence[int]], prefix: Sequence[int]
    ) -> list[list[torch.Tensor]]:
        """The decoder's logits after each row's prompt and each token of `fed`; the last row starts a forward later."""
        decoder = Decoder(self.model, prefix, self.accelerator.device)
        logits_of: dict[Row, list[torch.Tensor]] = {row: [] for row in rows}
        left = {row: [*tokens] for row, tokens in zip(rows, fed, strict=True)}
        starting = [*filter(None, (rows[:-1], rows[-1:]))]
        while starting or decoder.live:
            logits = decoder.forward(starting.pop(0) if starting else ())
            ended = {row for row in decoder.live if not left[row]}
            for row, of_row in zip(decoder.live, logits, strict=True):
                logits_of[row].append(of_row)
                row.answer += [left[row].pop(0)] if left[row] else []
            decoder.drop(ended)
        return [*logits_of.values()]

    def _reason_unpadded(self, examples: Sequence[Encoded]) -> str | None:
        """Why prompts cannot be padded: predictions for left-padded prompts differ from those for single prompts. None
        if they agree. Recurrent layers, for example, may read padding as text."""
        ordered = sorted(examples, key=lambda example: (-example.prompt_length, example.index))
        rows = [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
        if rows[0].prompt_length == rows[-1].prompt_length:
            return None
        prompts = [row.input_ids[: row.prompt_length] for row in rows]
        largest, settings = 0.0, {"sampling": GREEDY, "output_logits": True}
        _, together = self._generate(prompts, CHECKED_TOKENS, **settings)
        for number, prompt in enumerate(prompts):
            _, alone = self._generate([prompt], CHECKED_TOKENS, **settings)
            for mine, others in zip(alone, together, strict=False):
                largest = max(largest, nats_apart(mine[0], others[number]))
                if mine[0].argmax() != others[number].argmax():  # from here on, the two answers are different texts
                    break
        wrong = f"padding changes its predictions (by {largest:.2g} nats)"
        return wrong if largest > self._tolerance() else None

    def _tolerance(self) -> float:
        exact = self.accelerator.mixed_precision == "no" and self.model.dtype == torch.float32
        return TOLERANCE if exact else REDUCED_TOLERANCE


class _Meeting:
    """Synchronizes ranks between forwards; every rank takes part in the same number of synchronizations. They meet in
    `between`, which raises on all ranks or on none. With sharded weights (`every_forward`), they also agree before each
    forward whether to continue."""

    def __init__(self, between: Callable[[], None], every_forward: bool) -> None:
        self.between, self.every_forward, self.forwards = between, every_forward, 0

    def __call__(self, busy: bool) -> bool:
        """Return whether to do one more forward. A rank that is not `busy` waits here, still calling `between`, until
        all ranks have finished; with `every_forward`, it takes part in other ranks' forwards instead."""
        due = self.forwards % MET_EVERY == 0
        self.forwards += 1
        if self.every_forward:
            if due:
                self.between()
            return any_rank(busy)
        while due or not busy:
            self.between()
            if not any_rank(busy):
                return False
            due = False
        return True


def _reason_unsupported(model: Any, examples: Sequence[Encoded], longest: int) -> str | None:
    """Return why a prompt or the model's configuration rules out the decoder; None if nothing does."""
    attention = getattr(model.config, "_attn_implementation", None)
    if attention != "sdpa":
        advice = "; sdpa supports it" if takes_sdpa(model) else ""
        return f"attention {attention} does not support a shared prefix{advice}"
    if "position_ids" not in arguments(model):
        return "the model does not accept position_ids"
    limited = limited_layers(model, longest)
    return f"the model has layers without full attention ({limited})" if limited else None


def common_prefix(examples: Sequence[Encoded]) -> int:
    """Return the length of the prompts' common prefix (shorter than every prompt); 0 if below SHORTEST_PREFIX."""
    prompts = [example.input_ids[: example.prompt_length] for example in examples]
    length = min(common_length(prompts), min(map(len, prompts)) - 1)
    return length if length >= SHORTEST_PREFIX else 0


def divide(
    examples: Sequence[Encoded], ranks: int, batch_size: int, *, equal_lengths: bool = False
) -> list[list[list[Encoded]]]:
    """Divide examples into batches of similar length (expected answer included), longest first. A batch has a list of
    rows for each rank. Within a batch the ranks' numbers of rows differ by at most one, and the rank that gets the
    longest prompt changes from batch to batch. With `equal_lengths`, a batch's prompts have equal numbers of tokens."""
    ordered = sorted(examples, key=lambda example: (-len(example.input_ids), example.index))
    groups: dict[int, list[Encoded]] = {}
    for example in ordered:
        groups.setdefault(example.prompt_length if equal_lengths else 0, []).append(example)
    batches: list[list[list[Encoded]]] = []
    for group in groups.values():
        count = math.ceil(len(group) / (ranks * batch_size))
        for places in np.array_split(np.arange(len(group)), count):
            rows = sorted((group[at] for at in places), key=lambda example: (-example.prompt_length, example.index))
            batches.append([rows[(rank + len(batches)) % ranks :: ranks] for rank in range(ranks)])
    return batches


def generate(
    model: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    ends: Collection[int],
    pad_token_id: int,
    device: torch.device,
    sampling: Sampling = GREEDY,
    **more: Any,
) -> tuple[list[list[int]], Any]:
    """Answer the prompts by transformers' `generate`, with `more` as further arguments. Returns the answers, each up to
    and including the first of `ends`, and the logits of each token (None unless `more` has `output_logits`)."""
    longest = max(map(len, prompts))
    rows = [[pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    output = model.generate(
        input_ids=torch.tensor(rows, device=device),
        attention_mask=torch.tensor(mask, device=device),
        # arguments override the model's own sampling and penalties, also by None; a GenerationConfig's None would not
        **{**left_out(model.generation_config), **more, **sampling.settings()},
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ends),
        pad_token_id=pad_token_id,
        use_cache=True,
        return_dict_in_generate=True,
        stopping_criteria=StoppingCriteriaList([_heartbeat_criterion]),
    )
    answers = []
    for ids in output.sequences[:, longest:].tolist():
        stop = next((at for at, token in enumerate(ids) if token in ends), len(ids) - 1)
        answers.append(ids[: stop + 1])
    return answers, output.logits


def nats_apart(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the mean absolute difference of log-probabilities, weighted by expected probability; infinity for NaN."""
    alone = expected.double().log_softmax(dim=-1)
    off = (actual.double().log_softmax(dim=-1) - alone).abs()
    return (alone.exp() * off).sum().nan_to_num(nan=math.inf).item()


def _heartbeat_criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    """A stopping criterion that never stops; it is called after every token."""
    heartbeat()
    return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
