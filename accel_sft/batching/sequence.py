"""Cuts a row into the parts that the ranks of a group compute under sequence parallelism (launch/groups.py)."""

import dataclasses

import torch
from accelerate import Accelerator
from torch.nn import functional

from accel_sft.api.errors import UserError, what_and_where
from accel_sft.batching.collate import Batch
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.batching.trial import Trial
from accel_sft.batching.verify import REDUCED_TOLERANCE, TOLERANCE
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.launch.collectives import gather_numbers
from accel_sft.launch.groups import row_groups, sequence_ranks, shared_rows
from accel_sft.models.architecture import limited_layers


@dataclasses.dataclass(frozen=True)
class SequenceGroup:
    """A group of `ranks` ranks that share each row's tokens; this process is number `rank` of them. There are `groups`
    such groups, each with rows of its own; this one is number `group`."""

    ranks: int
    rank: int
    groups: int
    group: int

    @classmethod
    def of(cls, accelerator: Accelerator) -> "SequenceGroup":
        """This rank's group; as in DeepSpeed, the ranks of a group are consecutive."""
        ranks = sequence_ranks(accelerator)
        groups, place = row_groups(accelerator)
        group, rank = divmod(place, ranks)
        return cls(ranks, rank, groups // ranks, group)

    def part(self, batch: Batch, pad_token_id: int) -> Batch:
        """This rank's part of a padded forward of one row; all parts have the same length, and a part may have no
        target. A part's last token predicts the next part's first token."""
        if self.ranks == 1:
            return batch
        ids = batch.inputs["input_ids"]
        length = -(-ids.shape[1] // self.ranks)
        ids = functional.pad(ids, (0, length * self.ranks - ids.shape[1]), value=pad_token_id)
        begin, end = self.rank * length, (self.rank + 1) * length
        positions = torch.arange(begin, end, device=ids.device)[None]
        inputs = {"input_ids": ids[:, begin:end], "attention_mask": None, "position_ids": positions}
        predicting = batch.keep[0].nonzero()[:, 0] if batch.keep.ndim == 2 else batch.keep[: len(batch.targets)]
        mine = (predicting >= begin) & (predicting < end)
        keep = predicting[mine] - begin
        if not len(keep):  # the forward stays connected to the weights, as in `collate.empty`
            keep = torch.zeros(1, dtype=torch.int64, device=ids.device)
        return dataclasses.replace(batch, inputs=inputs, keep=keep, targets=batch.targets[mine])


def in_parts(trial: Trial, exact: Batching) -> tuple[Batching, str]:
    """The `exact` batching of padded rows, changed to one row per forward, and a line for the log; UserError if the
    model cannot compute parts of rows."""
    group, model = SequenceGroup.of(trial.accelerator), trial.accelerator.unwrap_model(trial.model)
    longest = max(trial.examples, key=lambda example: (len(example.input_ids), example.index))
    if limited := limited_layers(model, len(longest.input_ids)):
        raise UserError(_cannot(group, f"it has layers without full attention ({limited})"))
    batching = dataclasses.replace(exact, rows=1)
    line = f"batching padded, one row per forward, its tokens divided among {group.ranks} ranks"
    if getattr(model.config.get_text_config(decoder=True), "attention_dropout", 0):
        return batching, f"{line}; not compared with whole rows, because attention has dropout"
    batch, was_training = trial.batch(batching, [longest]), trial.model.training
    with torch.no_grad(), torch.random.fork_rng():
        trial.model.eval()
        expected = nll_sum(trial.model, batch).item()
        trial.model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.eval()
        with shared_rows():
            try:
                mine = nll_sum(trial.model, group.part(batch, trial.pad_token_id)).item()
            except (AssertionError, TypeError) as error:  # DeepSpeed's attention raises them on every rank
                cause = one_line(what_and_where(error), LONGEST_ERROR)
                raise UserError(_cannot(group, f"its forward of a part of a row fails ({cause})")) from error
        trial.model.train(was_training)
    parts = sum(share for (share,) in gather_numbers([mine])) / group.groups  # each group had the same row
    off = abs(expected - parts) / max(len(batch.targets), 1)
    if not off <= (TOLERANCE if trial.in_float32 else REDUCED_TOLERANCE):
        raise UserError(_cannot(group, f"with split rows its loss is off by {off:.2g} nats per token"))
    return batching, line


def _cannot(group: SequenceGroup, why: str) -> str:
    return f"This model does not work with sequence parallelism over {group.ranks} ranks: {why}. Launch with z3.yaml."
