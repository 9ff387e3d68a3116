"""Training on preferences: of two answers to a prompt, the chosen one becomes likelier than the rejected one.

Both are compared with the model as it was before step 1, whose log-probabilities are computed once and cached. A step's
loss is the mean over its pairs: DPO's (Rafailov et al., 2023, arXiv 2305.18290), or IPO's (Azar et al., 2023, arXiv
2310.12036).
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.nn import functional

from accel_sft.api.config import TrainConfig
from accel_sft.batching.collate import Batch
from accel_sft.batching.device_memory import forwards_alone, in_halves
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll
from accel_sft.chat.encoded import Encoded
from accel_sft.data.token_store import TokenStore
from accel_sft.evaluation.evaluator import evaluated_rows
from accel_sft.io import cache
from accel_sft.launch.collectives import decided_by_main
from accel_sft.launch.describe import layout_of
from accel_sft.launch.groups import row_groups
from accel_sft.launch.recordable import versions
from accel_sft.models.source import hub_place, weights_identity
from accel_sft.results.run_report import PAIR_METRICS
from accel_sft.training.prepare import Prepared

_KIND, _FILE = "reference", "log-probabilities.npy"
_DECIDE: tuple[str, ...] = ("adapter", "dtype", "load_in_4bit", "attn_implementation", "use_liger_kernel", "compile")
_DECIDE += ("chat_template", "batching", "micro_batch_size", "global_batch_size")
"""Settings that change the bits of the initial model's log-probabilities."""
_AT_ONCE = 4096
"""Number of pairs that are divided into forwards together."""


@dataclasses.dataclass(frozen=True)
class Preference:
    """The loss of pairs. `reference` has the initial model's log-probabilities of the chosen and the rejected answer of
    each pair, by its example's index, float32 (examples, 2)."""

    config: TrainConfig
    reference: np.ndarray

    def __call__(self, model: torch.nn.Module, batch: Batch, rows: Sequence[Encoded]) -> torch.Tensor:
        """The sums over a forward's pairs of the loss and of PAIR_METRICS, float32, (6,)."""
        log_probabilities = answer_log_probabilities(model, batch, rows)
        if not rows:  # a zero that is still connected to the weights
            return functional.pad(log_probabilities, (0, len(PAIR_METRICS)))
        return self.sums(log_probabilities, rows)

    def sums(self, log_probabilities: torch.Tensor, rows: Sequence[Encoded]) -> torch.Tensor:
        """The same, from the log-probabilities of the pairs' answers, (pairs, 2)."""
        beta, device = self.config.dpo_beta, log_probabilities.device
        tokens = torch.tensor(_answer_tokens(rows), device=device).view(-1, 2)
        gains = log_probabilities - torch.from_numpy(self.reference[[row.index for row in rows]]).to(device)
        ipo = self.config.loss == "ipo"  # which compares means over an answer's tokens
        differences = torch.sub(*(gains / tokens if ipo else gains).unbind(1))
        losses = (differences - 1 / (2 * beta)) ** 2 if ipo else -functional.logsigmoid(beta * differences)
        own = self.config.dpo_sft_weight * log_probabilities[:, 0] / tokens[:, 0]
        ranked_right = (differences.sign() + 1) / 2
        metrics = torch.stack([losses, *log_probabilities.unbind(1), beta * differences, ranked_right])
        return torch.cat([(losses - own).sum()[None], metrics.detach().sum(1)])


def answer_log_probabilities(model: torch.nn.Module, batch: Batch, rows: Sequence[Encoded]) -> torch.Tensor:
    """The log-probability of each pair's chosen and rejected answer in nats, float32, (pairs, 2); without pairs, a zero
    (1,)."""
    losses = nll(model, batch)
    if not rows:
        return losses
    tokens = _answer_tokens(rows)
    answer_of = torch.from_numpy(np.repeat(np.arange(len(tokens)), tokens)).to(losses.device)
    return -losses.new_zeros(len(tokens)).index_add(0, answer_of, losses).view(-1, 2)


def _answer_tokens(rows: Sequence[Encoded]) -> list[int]:
    """The number of tokens of each answer, in the order of a forward's targets."""
    return [end - begin for row in rows for begin, end in row.spans]


class InitialModel:
    """The model before step 1, with which pairs are compared. Every rank makes and calls it, before the weights change.

    Its log-probabilities are computed by all ranks together, in the run's layout, and cached by all that decides their
    bits, the launch included.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        batching: Batching,
        prepared: Prepared,
        log: Callable[[str], None],
    ) -> None:
        self.accelerator, self.model, self.batching = accelerator, model, batching
        self.prepared, self.log = prepared, log
        self.config = prepared.assembly.config

    def train_loss(self) -> Preference:
        """The loss of the training pairs; the reference covers the pairs that the run sees."""
        plan, store = self.prepared.plan, self.prepared.train.kept
        steps = range(plan.total_steps) if plan.epoch(plan.total_steps) < 1 else ()
        places = np.unique([row for step in steps for row in plan.examples(step)]) if steps else np.arange(len(store))
        return Preference(self.config, self._reference(store, places))

    def validation_metrics(self, store: TokenStore) -> Callable[[torch.nn.Module, Batching], dict[str, float]]:
        """A function that computes PAIR_METRICS of the validation pairs."""
        every = store[:]
        wanted = {row.index for row in evaluated_rows(every, self.config.eval_limit)}
        places = np.array([place for place, row in enumerate(every) if row.index in wanted])
        loss = Preference(self.config, self._reference(store, places))

        def metrics(model: torch.nn.Module, batching: Batching) -> dict[str, float]:
            rows = store.take(places.tolist())
            sums = loss.sums(self._log_probabilities(model, batching, rows), rows)
            return dict(zip(PAIR_METRICS, (sums[1:].double() / len(rows)).tolist(), strict=True))

        return metrics

    def _reference(self, store: TokenStore, places: np.ndarray) -> np.ndarray:
        """`Preference.reference` of the pairs at these places of the store, in parts: a killed run loses one."""
        key, indices, values = decided_by_main(self.accelerator, lambda: self._key(store, places)), [], []
        for at in range(0, len(places), _AT_ONCE):
            rows = store.take(places[at : at + _AT_ONCE].tolist())
            indices += [row.index for row in rows]
            values.append(self._of_part(rows, key and f"{key}-{at}"))
        reference = np.full((max(indices) + 1, 2), np.nan, np.float32)
        reference[indices] = np.concatenate(values)
        return reference

    def _of_part(self, rows: Sequence[Encoded], key: str | None) -> np.ndarray:
        """The log-probabilities of these pairs' answers, (pairs, 2): from the cache, or computed now."""
        values = decided_by_main(self.accelerator, lambda: _kept(key) if key else None)
        if values is None:
            self.log(f"reference: computing the initial model's log-probabilities of {len(rows):,} pairs, once")
            values = self._log_probabilities(self.model, self.batching, rows).numpy()
            if key:
                decided_by_main(self.accelerator, lambda: _keep(key, values))
        return values

    def _log_probabilities(self, model: torch.nn.Module, batching: Batching, rows: Sequence[Encoded]) -> torch.Tensor:
        """The log-probabilities of all rows' answers on every rank, on the CPU, float32 (pairs, 2)."""
        ranks, rank = row_groups(self.accelerator)
        pad_token_id, own = self.prepared.assembly.tokenizer.pad_token_id, list[tuple[int, list[float]]]()

        def compute(some: list[Encoded]) -> list[tuple[int, list[float]]]:
            batch = batching.batch(some, pad_token_id, self.accelerator.device)
            values = answer_log_probabilities(model, batch, some).tolist()
            return [(row.index, both) for row, both in zip(some, values, strict=False)]  # without rows, one zero

        was_training = model.training
        model.eval()
        with torch.no_grad():
            for some in batching.divide(rows, ranks)[rank]:
                own += in_halves(compute, some, alone=forwards_alone(self.accelerator))
        model.train(was_training)
        every = dict(pair for of_rank in gather_object([own]) for pair in of_rank)
        return torch.tensor([every[row.index] for row in rows])

    def _key(self, store: TokenStore, places: np.ndarray) -> str | None:
        """A hash of all that decides the values; None if the model's weights cannot be identified."""
        source, config = self.prepared.assembly.source, self.config
        folders = [source.weights, *([source.adapter] if source.adapter else [])]
        weights = [weights_identity(name) or (hub_place(name) or (None, None))[1] for name in folders]
        settings = {name: getattr(config, name) for name in _DECIDE}
        seed = config.seed if config.chat_template else None  # decides the embeddings of new tokens
        rows = store.fingerprint, hashlib.sha256(places.tobytes()).hexdigest()
        parts: list[Any] = [*rows, weights, settings, seed, versions()]
        # without the size of forwards, which a lack of memory may lower in a resumed run
        parts += [self.batching.layout, self.batching.attention, self.batching.head]
        parts += [layout_of(self.accelerator), self.accelerator.device.type, torch.get_num_threads()]
        return hashlib.sha256(json.dumps(parts, default=repr).encode()).hexdigest()[:32] if all(weights) else None


def _kept(key: str) -> np.ndarray | None:
    entry = cache.find(_KIND, key)
    return np.load(entry[0] / _FILE) if entry else None


def _keep(key: str, values: np.ndarray) -> None:
    try:
        with cache.partial(_KIND) as folder:
            np.save(folder / _FILE, values)
            cache.publish(folder, _KIND, key, {"pairs": len(values)})
    except OSError as error:
        cache.log(
            f"reference: not kept in {cache.folder()} ({error.strerror or error}); a resumed run computes it again"
        )
