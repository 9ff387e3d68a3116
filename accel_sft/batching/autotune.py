"""Chooses the batching: on a CPU the least work, on a GPU the fastest, of those that are exact and fit into memory."""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Sequence

import torch
from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.batching import choice
from accel_sft.batching.forward_layouts import Padded, RowByRow, Tree, Varlen
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.batching.verify import exact_batchings
from accel_sft.data.chat import Encoded
from accel_sft.launch.collectives import all_ranks, largest_of_ranks

CPU_FORWARDS = {Tree: (256, 512, 1024), Varlen: (256, 512, 1024), RowByRow: (1024, 2048, 4096), Padded: (1024, 4096)}
FORWARDS = {"cpu": CPU_FORWARDS}
"""Tokens in one forward to choose from, on devices where nothing is tried."""
TRIED_ON_DEVICE = tuple(2**power for power in range(10, 18))
"""Tokens in one forward that are tried on any other device, up to its memory."""
TRIED_SECONDS, MOST_ROUNDS, NEAR = 10.0, 3, 2.0
"""How long trying each once may take on such a device, and how often those are tried that need no more than NEAR times
the least."""
FORWARD_TOKENS = {"cpu": 64, "other": 1024}
"""What a forward and its backward cost beside what they compute, in tokens."""
USUAL_WIDTH = 1024
"""Hidden size assumed of a model whose configuration does not name it."""
STATE_BYTES = 8
"""Bytes of AdamW's state for each trained parameter; the first update allocates them, except under DeepSpeed."""


def choose_batching(
    accelerator: Accelerator,
    model: torch.nn.Module,
    config: TrainConfig,
    examples: Sequence[Encoded],
    pad_token_id: int,
    *,
    train: bool = True,
    before: Batching | None = None,
    also: Sequence[Encoded] = (),
) -> tuple[Batching, str]:
    """A layout that this model computes as it does single rows, and how much of it fits into one forward.

    On a CPU it is the one of the least work, which follows from the rows' lengths: two starts choose alike, whatever
    else the machine does. On other devices it is the fastest by trial, measured once and kept in the cache; with
    dropout, whose masks depend on the layout, and where nothing can be kept, it is that of the least work there too.

    Every rank calls it, with the same examples. No random state and no gradient is touched.

    Args:
        model: prepared.
        train: whether a backward follows, and dropout will be on.
        before: what this run had chosen; kept if it is still exact.
        also: rows that will be laid out so too, and do not count in the choice.
    Returns:
        the batching, and a line that says what was chosen, and why not what was asked for.
    Raises:
        UserError: not even the smallest forward fits into the device's memory.
    """
    exact, reasons, dropout = exact_batchings(accelerator, model, config, [*examples, *also], pad_token_id, train)
    if before in (dataclasses.replace(b, tokens=before.tokens, rows=before.rows) for b in exact if before):
        batching, why = before, ", as before"
    elif config.micro_batch_size != "auto":
        batching, why = dataclasses.replace(exact[0], rows=int(config.micro_batch_size)), ""
    else:
        trial = Trial(accelerator, model, config, examples, pad_token_id, train=train)
        batching, why = trial.chosen(exact, dropout)
    size = f"{batching.rows} examples" if batching.rows else f"{batching.tokens:,} tokens"
    line = f"batching {batching.layout} ({batching.way.what}), up to {size} a forward{why}"
    return batching, "; ".join([line, *(f"not {reason}" for reason in reasons)])


class Trial:
    """Runs candidates on this model and these examples; all ranks together, and all come to the same answer.

    Args:
        train: whether a backward goes with each forward.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        config: TrainConfig,
        examples: Sequence[Encoded],
        pad_token_id: int,
        *,
        train: bool,
    ) -> None:
        self.accelerator, self.model, self.examples, self.train = accelerator, model, examples, train
        self.config = config
        self.pad_token_id, self.device = pad_token_id, accelerator.device
        self.step_size = config.global_batch_size or len(examples)

    def within_memory(self, exact: Sequence[Batching], sizes: Sequence[int]) -> list[Batching]:
        """Batchings whose longest examples fit through forward and backward beside the optimizer's state, on all ranks.

        Sizes are tried upwards, the longest examples together, until one does not fit, or takes in a whole step.
        """
        fitting = []
        for batching in exact:
            for tokens in sizes:
                sized = dataclasses.replace(batching, tokens=tokens)
                rows = self._heaviest(sized)
                fits = all_ranks(self._fits(sized, rows))
                if not fits:
                    break
                fitting.append(sized)
                if len(rows) == min(self.step_size, len(self.examples)):
                    break
        if not fitting:
            longest = max(self._heaviest(exact[0]), key=lambda example: len(example.input_ids))
            raise UserError(
                f"out of device memory: not even {sizes[0]:,} tokens fit through forward and backward "
                f"(the longest example, {longest.index}, has {len(longest.input_ids):,}); "
                "add --gradient-checkpointing, lower --max-length, or choose a higher ZeRO stage or --adapter lora"
            )
        return fitting

    def chosen(self, exact: Sequence[Batching], dropout: str | None) -> tuple[Batching, str]:
        """One of these with a limit of tokens, and a phrase that says how it was chosen."""
        if forwards := FORWARDS.get(self.device.type):
            sizes = [dataclasses.replace(b, tokens=tokens) for b in exact for tokens in forwards[type(b.way)]]
            return self.least_work(sizes), f", the least work of {len(sizes)} sizes"
        sizes = self.within_memory(exact, TRIED_ON_DEVICE)
        if dropout:
            return self.least_work(sizes), f", the least work of {len(sizes)} sizes (masks of {dropout} depend on it)"
        decided = choice.what_decides(self.accelerator, self.model, self.config, self.examples, exact, self.train)
        batching, where = choice.measured_once(self.accelerator, decided, lambda: self.fastest(sizes))
        if batching in sizes:
            return batching, f", the best of {len(sizes)} sizes ({where})"
        return self.least_work(sizes), f", the least work of {len(sizes)} sizes ({where})"

    def fastest(self, candidates: Sequence[Batching]) -> Batching:
        """The quickest to go through some of the examples; where trials would take too long, that of the least work."""
        some = self._like_a_step(candidates)
        first = [self._seconds(candidates[0], some) for _ in range(2)][1]  # the first time warms up
        if first * len(candidates) > TRIED_SECONDS:
            return self.least_work(candidates)
        took = {batching: self._seconds(batching, some) for batching in candidates}
        near = [batching for batching in candidates if took[batching] <= NEAR * min(took.values())]
        spent = sum(took.values())
        for _ in range(MOST_ROUNDS - 1 if len(near) > 1 else 0):
            if spent > TRIED_SECONDS / 2:
                break
            again = {batching: self._seconds(batching, some) for batching in near}
            spent += sum(again.values())
            took = {batching: min(took[batching], seconds) for batching, seconds in again.items()}
        return min(near, key=took.__getitem__)

    def least_work(self, candidates: Sequence[Batching]) -> Batching:
        """The candidate with the least work for a step: the first of equals, and the same at every start."""
        some, ranks = self._spread(), self.accelerator.num_processes
        base = self.accelerator.unwrap_model(self.model).config.get_text_config(decoder=True)
        width = getattr(base, "hidden_size", None) or USUAL_WIDTH
        each = FORWARD_TOKENS.get(self.device.type, FORWARD_TOKENS["other"])
        return min(candidates, key=lambda batching: batching.work(some, ranks, width, each))

    def _seconds(self, batching: Batching, examples: Sequence[Encoded]) -> float:
        self.accelerator.wait_for_everyone()
        started = time.perf_counter()
        for rows in batching.divide(examples, self.accelerator.num_processes)[self.accelerator.process_index]:
            self._run(batching, rows)
        return largest_of_ranks(time.perf_counter() - started)

    def _spread(self) -> list[Encoded]:
        """Examples from all over the data, as many as a step has."""
        return list(self.examples[:: max(len(self.examples) // self.step_size, 1)])[: self.step_size]

    def _like_a_step(self, candidates: Sequence[Batching]) -> list[Encoded]:
        """The same examples, but no more than fit into the largest forward of each rank."""
        ranks, spread = self.accelerator.num_processes, self._spread()
        most = max(batching.tokens for batching in candidates)
        while len(spread) > 1 and candidates[0].computed_tokens(spread, ranks) > most * ranks:
            spread = spread[: len(spread) // 2]
        return spread

    def _heaviest(self, batching: Batching) -> list[Encoded]:
        """The longest examples, as many as one forward takes of a step; at least one."""
        order = heapq.nlargest(self.step_size, range(len(self.examples)), key=self._length)
        rows = [self.examples[at] for at in order]
        low, high = 1, len(rows)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(batching.divide(rows[:middle], 1)[0]) == 1 else (low, middle - 1)
        return rows[:low]

    def _length(self, at: int) -> int:
        return len(self.examples[at].input_ids)

    def _run(self, batching: Batching, rows: list[Encoded]) -> None:
        """One forward and, in training, a backward through all but the weights, until the device is done.

        The model runs outside what wraps it, and gradients of weights are not computed: what exchanges or divides them
        between ranks must not see this backward. Random state and mode are put back.
        """
        model = self.accelerator.unwrap_model(self.model)
        embedded: list[torch.Tensor] = []
        handle = model.get_input_embeddings().register_forward_hook(
            lambda _, __, out: embedded.append(out.detach().requires_grad_()) or embedded[-1]
        )
        was_training = model.training
        model.train(self.train)  # activations are recomputed in training only
        try:
            with torch.random.fork_rng(), torch.set_grad_enabled(self.train):
                loss = nll_sum(model, batching.batch(rows, self.pad_token_id, self.device))
                if self.train:
                    torch.autograd.grad(loss, embedded)
            loss.item()
        finally:
            handle.remove()
            model.train(was_training)

    def _fits(self, batching: Batching, rows: list[Encoded]) -> bool:
        """Whether `_run` fits into this rank's memory beside what the first update will allocate."""
        hold: list[torch.Tensor] = []
        try:
            if self.train:
                self._reserve(hold)
            self._run(batching, rows)
        except torch.OutOfMemoryError:
            return False
        finally:
            hold.clear()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return True

    def _reserve(self, hold: list[torch.Tensor]) -> None:
        """Allocate what the first update will: gradients, and AdamW's state unless DeepSpeed has it already."""
        each = 0 if self.accelerator.state.deepspeed_plugin else STATE_BYTES
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                # of what this rank holds of it: FSDP's parameters know the whole shape
                held = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                size = held.numel() * (parameter.element_size() + each)
                hold.append(torch.empty(size, dtype=torch.uint8, device=self.device))
