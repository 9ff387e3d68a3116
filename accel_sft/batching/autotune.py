"""Chooses the batching: on a CPU the least work, on a GPU the fastest, of those that are exact and fit into memory."""

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from accel_sft.batching.choice import measured_once
from accel_sft.batching.device_memory import forwards_alone
from accel_sft.batching.forward_layouts import WHAT
from accel_sft.batching.layouts import Batching
from accel_sft.batching.room import Room
from accel_sft.batching.sequence import in_parts
from accel_sft.batching.verify import exact_batchings
from accel_sft.chat.encoding import Encoded
from accel_sft.launch.collectives import largest_of_ranks
from accel_sft.launch.describe import device_name, parallelism
from accel_sft.launch.recordable import versions
from accel_sft.launch.ulysses import sequence_ranks

UNTIMED = {"cpu"}
"""Devices where nothing is tried."""
TRIED_ON_DEVICE = tuple(2**power for power in range(10, 18))
"""Tokens in one forward that are tried on any other device, up to its memory."""
LOOKS, LONG_SECONDS = 3, 2.0
"""How often a forward is timed on such a device; one that takes this long is timed once."""
ALIKE = 0.03
"""Times, or work, that differ by less than this share are the same."""
CPU_FORWARD_TOKENS, FORWARD_TOKENS = 64, 1024
"""What a forward and its backward cost beside what they compute, in tokens: of one thread of a CPU, whose other threads
wait meanwhile, and elsewhere."""
USUAL_WIDTH = 1024
"""Hidden size assumed of a model whose configuration does not name it."""


class Trial(Room):
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
            UserError: not even the smallest forward fits into the device's memory; or the model cannot be trained
                under sequence parallelism, which the launch asks for.
        """
        if sequence_ranks(self.accelerator) > 1:
            padded = dataclasses.replace(self, config=dataclasses.replace(self.config, batching="padded"))
            return in_parts(self, exact_batchings(padded, also)[0][0])
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
        if not forwards_alone(self.accelerator):
            # a forward that fails on one rank leaves the others waiting; and what DeepSpeed hooks to blocks that it
            # gathers whole (experts) would reduce gradients in a backward that has none
            sizes = self.expected_to_fit(exact, TRIED_ON_DEVICE)
            return self.least_work(
                sizes
            ), f", the least work of {len(sizes)} sizes (not tried: ranks share the weights)"
        sizes = self.within_memory(exact, TRIED_ON_DEVICE)
        where, batching = f"masks of {dropout} depend on it", None
        if not dropout:
            batching, where = measured_once(self.accelerator, self._decides(exact), lambda: self.fastest(sizes))
        if batching in sizes:
            return batching, f", the best of {len(sizes)} sizes ({where})"
        return self.least_work(sizes), f", the least work of {len(sizes)} sizes ({where})"

    def fastest(self, candidates: Sequence[Batching]) -> Batching:
        """Of each layout's best size the one with the least work, unless a clock contradicts that beyond its spread.

        One forward of each is timed, and counts for all of a step by its work.
        """
        each_layout: dict[tuple[str, str], list[Batching]] = {}
        for batching in candidates:
            each_layout.setdefault((batching.layout, batching.attention), []).append(batching)
        bests = sorted(map(self.least_work, each_layout.values()), key=self._work)
        best, *others = bests
        if not others:
            return best
        took = self._step_seconds(best)
        for other in others:
            seconds = self._step_seconds(other)
            if seconds[1] < took[0] * (1 - ALIKE):
                best, took = other, seconds
        return best

    def least_work(self, candidates: Sequence[Batching]) -> Batching:
        """The candidate with the least work for a step, of equals the first, and the same at every start; and of its
        layout the smallest size with hardly more."""
        works = {batching: self._work(batching) for batching in candidates}
        least = min(candidates, key=works.__getitem__)
        alike = [b for b in candidates if dataclasses.replace(b, tokens=least.tokens) == least]
        return min((b for b in alike if works[b] <= (1 + ALIKE) * works[least]), key=lambda b: b.tokens)

    def _work(self, batching: Batching) -> float:
        some, ranks = self.spread(), self.accelerator.num_processes
        base = self.accelerator.unwrap_model(self.model).config.get_text_config(decoder=True)
        width = getattr(base, "hidden_size", None) or USUAL_WIDTH
        on_cpu = self.accelerator.device.type == "cpu"
        each = CPU_FORWARD_TOKENS * torch.get_num_threads() if on_cpu else FORWARD_TOKENS
        return batching.work(some, ranks, width, each)

    def _step_seconds(self, batching: Batching) -> tuple[float, float]:
        """The least and the most that a step of these forwards is expected to take, from the largest of them."""
        ranks, tokens_in = batching.divide(self.spread(), self.accelerator.num_processes), batching.way.tokens_in
        largest = max(itertools.chain(*ranks), key=tokens_in)
        in_all = max(sum(map(tokens_in, forwards)) for forwards in ranks) / tokens_in(largest)
        self._seconds(batching, largest)  # warms up
        took = [self._seconds(batching, largest)]
        while len(took) < LOOKS and took[0] < LONG_SECONDS:
            took.append(self._seconds(batching, largest))
        return in_all * min(took), in_all * max(took)

    def _seconds(self, batching: Batching, rows: list[Encoded]) -> float:
        self.accelerator.wait_for_everyone()
        started = time.perf_counter()
        self.run(batching, rows)
        return largest_of_ranks(time.perf_counter() - started)

    def _decides(self, exact: Sequence[Batching]) -> list[Any]:
        """All that what is measured depends on: the model's shape, the data, the launch, the machine, the software.

        Not the memory that happens to be free, which decides the sizes that are tried.
        """
        model, config = self.accelerator.unwrap_model(self.model), self.config
        tokens = hashlib.sha256()
        for example in self.examples:
            tokens.update(json.dumps([example.prompt_length, example.input_ids, *example.earlier]).encode())
        parameters = [
            [name, list(getattr(each, "ds_shape", each.shape)), str(each.dtype), each.requires_grad]
            for name, each in model.named_parameters()
        ]
        shape = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
        settings = [config.global_batch_size, config.gradient_checkpointing, config.compile, config.use_liger_kernel]
        return [
            [shape, parameters, settings, self.train],
            [tokens.hexdigest(), [dataclasses.asdict(batching) for batching in exact]],
            [parallelism(self.accelerator), device_name(self.accelerator), torch.get_num_threads(), versions()],
        ]
