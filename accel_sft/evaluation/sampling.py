"""Samples several answers to each prompt. Each answer has random numbers of its own, and the prompts are decoded in
parts that do not depend on the number of ranks: nor do the answers."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from accel_sft.api.errors import UserError
from accel_sft.api.tool_configs import SampleConfig
from accel_sft.batching.device_memory import in_halves
from accel_sft.chat.encoded import Encoded
from accel_sft.evaluation.decoder import Row
from accel_sft.evaluation.generate import FEWEST_ROWS, Generator, Sampling, common_prefix, divide
from accel_sft.launch.groups import row_groups, tensor_ranks

SAMPLED_AT_ONCE = 512
"""Maximum number of samples of a part, which one rank decodes."""
Sample = tuple[Encoded, int, list[int], float]
"""An example, the sample's number, its token ids, and their log-probability (0.0 without `--prefer likeliest`)."""


def uniform(seed: int, index: int, number: int, count: int) -> np.ndarray:
    """Return `count` numbers in [0, 1), float64, for sample `number` of example `index`; fewer are their beginning."""
    bits = np.random.Philox(key=[seed, index], counter=[0, number, 0, 0])
    return (bits.random_raw(count) >> np.uint64(11)) * 2.0**-53


def drawn(logits: torch.Tensor, numbers: torch.Tensor, temperature: float, top_p: float = 1.0) -> torch.Tensor:
    """Draw a token for each row of `logits`, (B, vocabulary), by inverting its distribution function at `numbers`, (B,)
    in [0, 1). Tokens beyond the likeliest ones that together have probability `top_p` are never drawn."""
    probabilities, order = (logits.double() / temperature).softmax(-1), None
    if top_p < 1:
        probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
        probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities >= top_p, 0)
    sums = probabilities.cumsum(-1)
    places = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True).clamp(max=sums.shape[-1] - 1)
    return (places if order is None else order.gather(1, places))[:, 0]


class Sampler(Generator):
    """Samples by the decoder, which reads each prompt once for all of its samples, or else by transformers."""

    def sample(self, examples: Sequence[Encoded], max_new_tokens: int, config: SampleConfig) -> list[Sample]:
        """Sample `config.samples` answers to each example of this rank's share. Every rank must call this with the same
        examples, without images. UserError if likelihoods are needed, but the decoder is not exact for this model."""
        self.choose(examples, max_new_tokens)
        if self.plain and config.prefer == "likeliest":
            raise UserError(f"--prefer likeliest: only the trainer's own decoder keeps likelihoods; {self.message}")
        if self.plain and self.accelerator.is_main_process:
            self.log("note: the same samples come again only with the same --rows, --samples and --eval-batch-size")
        (groups, group), count = row_groups(self.accelerator), config.samples
        size = max((self.batch_size or FEWEST_ROWS if self.plain else SAMPLED_AT_ONCE) // count, 1)
        parts = [rows for (rows,) in divide(examples, 1, size, equal_lengths=bool(self.unpadded))]
        sampled, sampling = list[Sample](), Sampling(config.temperature, config.top_p)

        def answer(rows: list[Encoded]) -> list[list[int]]:
            prompts, more = [row.input_ids[: row.prompt_length] for row in rows], {"synced_gpus": self.synced or None}
            return self._generate(prompts, max_new_tokens, sampling=sampling, **more)[0]

        with self.casts_once():
            for part in range(group, math.ceil(len(parts) / groups) * groups, groups):
                rows = [row for row in (parts[part] if part < len(parts) else ()) for _ in range(count)]
                if not self.plain:
                    sampled += self._decoded(rows, examples, max_new_tokens, config)
                elif rows or self.sharded:  # with sharded weights, a rank without rows must still take part
                    torch.manual_seed(int(np.random.SeedSequence([config.seed, part]).generate_state(1)[0]))
                    answers = in_halves(answer, rows or parts[0][:1], alone=not self.sharded)
                    sampled += [(*one, 0.0) for one in zip(rows, itertools.cycle(range(count)), answers, strict=False)]
        return sampled if self.accelerator.process_index % tensor_ranks(self.accelerator) == 0 else []

    def _decoded(self, share: list[Encoded], every: Sequence[Encoded], most: int, config: SampleConfig) -> list[Sample]:
        prefix = common_prefix(every)
        rows = {Row(example.input_ids[prefix : example.prompt_length]): example for example in share}
        number = {row: at % config.samples for at, row in enumerate(rows)}
        draws = {row: uniform(config.seed, rows[row].index, number[row], most) for row in rows}
        likelihoods = dict.fromkeys(rows, 0.0)

        def choose(logits: torch.Tensor, live: Sequence[Row]) -> list[int]:
            at = torch.tensor([draws[row][len(row.answer)] for row in live], dtype=torch.float64)
            tokens = drawn(logits, at.to(logits.device), config.temperature, config.top_p)
            if config.prefer == "likeliest":
                known = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
                for row, value in zip(live, known, strict=True):  # after a lack of memory, an answer begins again
                    likelihoods[row] = value + (likelihoods[row] if row.answer else 0.0)
            return tokens.tolist()

        self.decode(rows, every, most, choose)
        return [(example, number[row], row.answer, likelihoods[row]) for row, example in rows.items()]
