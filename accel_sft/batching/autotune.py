"""Chooses the batching: on a CPU the least work, on a GPU the fastest, of those that are exact and fit into memory."""

import bisect
import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from accel_sft.api.errors import UserError
from accel_sft.batching.choice import measured_once
from accel_sft.batching.forward_layouts import WHAT
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.batching.verify import Subject, exact_batchings
from accel_sft.data.chat import Encoded
from accel_sft.launch.collectives import all_ranks, largest_of_ranks
from accel_sft.launch.describe import device_name, parallelism, versions

UNTIMED = {"cpu"}
"""Devices where nothing is tried."""
TRIED_ON_DEVICE = tuple(2**power for power in range(10, 18))
"""Tokens in one forward that are tried on any other device, up to its memory."""
TRIED_SECONDS, TRIED_TIMES = 10.0, 2
"""How long trying each once may take on such a device, and how often each is tried: the least time counts."""
CPU_FORWARD_TOKENS, FORWARD_TOKENS = 64, 1024
"""What a forward and its backward cost beside what they compute, in tokens, on a CPU and elsewhere."""
USUAL_WIDTH = 1024
"""Hidden size assumed of a model whose configuration does not name it."""
STATE_BYTES = 8
"""Bytes of AdamW's state for each trained parameter; the first update allocates them, except under DeepSpeed."""


class Trial(Subject):
    """Runs candidates on this model and these examples; all ranks together, and all come to the same answer."""

    def choose(self, before: Batching | None = None, also: Sequence[Encoded] = ()) -> tuple[Batching, str]:
        """A layout that the model computes as it does single rows, and how much of it fits into one forward.

        On a CPU it is that of the least work, which follows from the rows' lengths: two starts choose alike. On other
        devices it is the fastest, measured once and kept in the cache; with dropout, whose masks depend on the layout,
        and where nothing can be kept, that of the least work. No random state and no gradient is touched.

        Args:
            before: what this run had chosen; kept if it is still exact.
            also: rows that will be laid out so too, and do not count in the choice.
        Returns:
            the batching, and a line that says what was chosen, and why not what was asked for.
        Raises:
            UserError: not even the smallest forward fits into the device's memory.
        """
        exact, reasons, dropout = exact_batchings(self, also)
        if before in (dataclasses.replace(b, tokens=before.tokens, rows=before.rows) for b in exact if before):
            batching, why = before, ", as before"
        elif self.config.micro_batch_size != "auto":
            batching, why = dataclasses.replace(exact[0], rows=int(self.config.micro_batch_size)), ""
        else:
            batching, why = self.chosen(exact, dropout)
        size = f"{batching.rows} examples" if batching.rows else f"{batching.tokens:,} tokens"
        line = f"batching {batching.layout} ({WHAT[batching.layout]}), up to {size} a forward{why}"
        return batching, "; ".join([line, *(f"not {reason}" for reason in reasons)])

    def chosen(self, exact: Sequence[Batching], dropout: str | None) -> tuple[Batching, str]:
        """One of these with a limit of tokens, and a phrase that says how it was chosen."""
        if self.accelerator.device.type in UNTIMED:
            sizes = [dataclasses.replace(b, tokens=tokens) for b in exact for tokens in b.way.cpu_tokens]
            return self.least_work(sizes), f", the least work of {len(sizes)} sizes"
        sizes = self.within_memory(exact, TRIED_ON_DEVICE)
        where, batching = f"masks of {dropout} depend on it", None
        if not dropout:
            batching, where = measured_once(self.accelerator, self._decides(exact), lambda: self.fastest(sizes))
        if batching in sizes:
            return batching, f", the best of {len(sizes)} sizes ({where})"
        return self.least_work(sizes), f", the least work of {len(sizes)} sizes ({where})"

    def within_memory(self, exact: Sequence[Batching], sizes: Sequence[int]) -> list[Batching]:
        """Batchings whose longest examples fit through forward and backward beside the optimizer's state, on all ranks.

        Sizes are tried upwards, the longest examples together, until one does not fit, or takes in a whole step.
        """
        fitting = []
        by_length = sorted(self.examples, key=lambda example: -len(example.input_ids))
        longest_first = by_length[: self.config.global_batch_size]
        for batching in exact:
            for tokens in sizes:
                sized = dataclasses.replace(batching, tokens=tokens)
                rows = longest_first[: _most_rows(sized, longest_first)]
                if not all_ranks(self._fits(sized, rows)):
                    break
                fitting.append(sized)
                if len(rows) == len(longest_first):
                    break
        if not fitting:
            longest = longest_first[0]
            raise UserError(
                f"out of device memory: not even {sizes[0]:,} tokens fit through forward and backward "
                f"(the longest example, {longest.index}, has {len(longest.input_ids):,}); "
                "add --gradient-checkpointing, lower --max-length, or choose a higher ZeRO stage or --adapter lora"
            )
        return fitting

    def fastest(self, candidates: Sequence[Batching]) -> Batching:
        """The quickest to go through some of the examples; where trials would take too long, that of the least work."""
        some, ranks = self._spread(), self.accelerator.num_processes
        most = ranks * max(batching.tokens for batching in candidates)
        while len(some) > 1 and candidates[0].computed_tokens(some, ranks) > most:  # one forward a rank tells enough
            some = some[: len(some) // 2]
        first = [self._seconds(candidates[0], some) for _ in range(2)][1]  # the first time warms up
        if first * len(candidates) > TRIED_SECONDS:
            return self.least_work(candidates)
        took = {batching: min(self._seconds(batching, some) for _ in range(TRIED_TIMES)) for batching in candidates}
        return min(candidates, key=took.__getitem__)

    def least_work(self, candidates: Sequence[Batching]) -> Batching:
        """The candidate with the least work for a step: the first of equals, and the same at every start."""
        some, ranks = self._spread(), self.accelerator.num_processes
        base = self.accelerator.unwrap_model(self.model).config.get_text_config(decoder=True)
        width = getattr(base, "hidden_size", None) or USUAL_WIDTH
        each = CPU_FORWARD_TOKENS if self.accelerator.device.type == "cpu" else FORWARD_TOKENS
        return min(candidates, key=lambda batching: batching.work(some, ranks, width, each))

    def _seconds(self, batching: Batching, examples: Sequence[Encoded]) -> float:
        self.accelerator.wait_for_everyone()
        started = time.perf_counter()
        for rows in batching.divide(examples, self.accelerator.num_processes)[self.accelerator.process_index]:
            self._run(batching, rows)
        return largest_of_ranks(time.perf_counter() - started)

    def _spread(self) -> Sequence[Encoded]:
        """Examples from all over the data, as many as a step has."""
        count = self.config.global_batch_size or len(self.examples)
        return self.examples[:: max(len(self.examples) // count, 1)][:count]

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
                loss = nll_sum(model, self.batch(batching, rows))
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
            if self.accelerator.device.type == "cuda":
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
                hold.append(torch.empty(size, dtype=torch.uint8, device=self.accelerator.device))

    def _decides(self, exact: Sequence[Batching]) -> list[Any]:
        """All that what is measured depends on: the model's shape, the data, the launch, the machine, the software.

        Not the memory that happens to be free, which decides the sizes that are tried.
        """
        model, config = self.accelerator.unwrap_model(self.model), self.config
        tokens = hashlib.sha256()
        for example in self.examples:
            tokens.update(json.dumps([example.prompt_length, example.input_ids]).encode())
        parameters = [
            [name, list(getattr(each, "ds_shape", each.shape)), str(each.dtype), each.requires_grad]
            for name, each in model.named_parameters()
        ]
        shape = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
        settings = [config.global_batch_size, config.gradient_checkpointing, config.compile]
        return [
            [shape, parameters, settings, self.train],
            [tokens.hexdigest(), [dataclasses.asdict(batching) for batching in exact]],
            [parallelism(self.accelerator), device_name(self.accelerator), torch.get_num_threads(), versions()],
        ]


def _most_rows(batching: Batching, rows: list[Encoded]) -> int:
    """How many of these rows, in this order, one forward takes; at least one."""
    counts = range(2, len(rows) + 1)
    return 1 + bisect.bisect_left(counts, True, key=lambda count: len(batching.divide(rows[:count], 1)[0]) > 1)
