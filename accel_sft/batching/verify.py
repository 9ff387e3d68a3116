"""Verifies, before step 1, which batchings a model computes exactly: shared prefixes, packed, or only padded."""

import bisect
import dataclasses
import fnmatch
import itertools
from collections.abc import Sequence

import torch
from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import first_line
from accel_sft.batching.collate import Batch
from accel_sft.batching.device_memory import out_of_memory
from accel_sft.batching.forward_layouts import LAYOUTS, Layout
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import available_heads, nll
from accel_sft.chat.encoding import Encoded
from accel_sft.launch.collectives import any_rank, first_reason
from accel_sft.models.architecture import REFUSALS, arguments, attentions, limited_layers
from accel_sft.models.prefix_attention import install

CHECKED_ROWS, CHECKED_AMONG = 3, 256
RANDOM_TOKENS = 512
"""In which what is random must show: experts that are drawn are drawn otherwise for a few tokens only."""
TOLERANCE, REDUCED_TOLERANCE = 1e-3, 0.25
"""Nats a token may differ by between layouts, in float32 and in reduced precision. Examples that see each other, or
stand at wrong positions, differ by more even in a random model; that they do not see each other is held to the bit."""
ROUNDING, REDUCED_ROUNDING, LOOKS = 1e-5, 1e-2, 3
"""By how much of its loss a token's may differ from one forward to the next where nothing is random: a machine may
round otherwise when it is busy. Forwards that must be alike are looked at so many times."""
NOISE = 4
"""How many times as large as what differs without any change a difference may be that is laid to rounding."""
FEWEST_LOGITS = 1
"""Held at once by a head in pieces while it is checked: pieces as small as can be."""
IMAGES = "rows hold images, whose placeholders are alike where the images are not, and whose positions have two axes"
"""Why they stand by themselves."""
UNLIMITED = 2**31
"""Tokens in one forward while no limit is chosen."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A prepared model and examples on which batchings are tried, the same on every rank.

    Attributes:
        train: whether a backward follows each forward, and dropout will be on.
        moments: whether AdamW's are allocated already, as in a resumed run.
    """

    accelerator: Accelerator
    model: torch.nn.Module
    config: TrainConfig
    examples: Sequence[Encoded]
    pad_token_id: int
    train: bool = True
    moments: bool = False

    @property
    def in_float32(self) -> bool:
        """Whether it computes in full precision."""
        return self.accelerator.mixed_precision == "no" and self.config.dtype in ("auto", "float32")

    def batch(self, batching: Batching, rows: Sequence[Encoded]) -> Batch:
        """One forward on this rank's device."""
        return batching.batch(rows, self.pad_token_id, self.accelerator.device)


def exact_batchings(subject: Subject, also: Sequence[Encoded]) -> tuple[list[Batching], list[str], str | None]:
    """The batchings that the model computes exactly, of the layouts asked for; and why not the others.

    Args:
        also: rows that will be laid out besides the subject's examples: the longest of all is tried.
    Returns:
        batchings without a limit of tokens, at least one; `layout: reason` of each layout that is not exact; and where
        the model has dropout in training, None without any.
    """
    config, model, accelerator = subject.config, subject.model, subject.accelerator
    unwrapped = accelerator.unwrap_model(model)
    names = list(dict.fromkeys(layout.name for layout in LAYOUTS))
    asked = names if config.batching == "auto" else names[names.index(config.batching) :]
    heads = available_heads(unwrapped, accelerator.device)
    tolerance, rounding = (TOLERANCE, ROUNDING) if subject.in_float32 else (REDUCED_TOLERANCE, REDUCED_ROUNDING)
    trials = _trials([*subject.examples, *also])
    longest = max(len(row.input_ids) for row in trials[-1])
    # padded rows are what every model is trained with; numbers that differ are its own (a router's capacity, noise)
    whole = Batching("padded", UNLIMITED, head="everywhere")
    # the longest row's logits everywhere might not fit; what it is there for does not depend on the head
    lean = whole if heads == ["everywhere"] else dataclasses.replace(whole, head="labelled")
    found, reasons, dropout, was_training = [], [], None, model.training
    if any(row.images for row in (*subject.examples, *also)):
        *others, only = asked
        asked, reasons = [only], [f"{' or '.join(others)}: {IMAGES}"] if others else []
    with torch.no_grad(), torch.random.fork_rng():
        model.train()
        if subject.train:
            some = subject.batch(lean, enough(subject.examples))
            dropout = _dropout(unwrapped, _is_random(model, some, rounding))
        model.eval()
        alone = [
            sum(nll(model, subject.batch(way, [row])).sum().item() for row in rows)
            for way, rows in zip((whole, lean), trials, strict=True)
        ]
        for name in asked:
            if found and (name == "packed" or config.batching != "auto"):  # sharing includes packing
                continue
            (layouts, reason), exact = _layouts_for(unwrapped, name, longest, dropout), []
            for layout in layouts:
                if layout.attention == "rows":
                    install()
                for head in heads:
                    batching = Batching(name, UNLIMITED, attention=layout.attention, head=head)
                    # ranks that came to different answers would run different forwards
                    mine = [_differs(subject, batching, *trial, tolerance) for trial in zip(alone, trials, strict=True)]
                    reason = first_reason(next(filter(None, mine), None))
                    if not reason and layout.one_sequence:
                        # the head sees one row at a time, and adds up as it likes: a plain one repeats its bits
                        plain = dataclasses.replace(batching, head=lean.head)
                        leaks = [_see_each_other(subject, plain, rows, rounding) for rows in trials]
                        reason = "a change in one row changes another" if any(leaks) else None
                        if not reason and _ignores_positions(subject, plain, trials[-1]):
                            reason = "the model ignores the positions that it is given"
                    if not reason:
                        exact.append(batching)
                        break
            found += exact
            if not exact:
                reasons.append(f"{name}: {reason}")
    model.train(was_training)
    return found or [whole], reasons, dropout


def _layouts_for(
    model: torch.nn.Module, name: str, longest: int, dropout: str | None
) -> tuple[list[Layout], str | None]:
    """The layouts of this name to try on the model; or none, and why, as far as its configuration tells."""
    implementation = str(getattr(model.config, "_attn_implementation", None))
    named = [layout for layout in LAYOUTS if layout.name == name]
    layouts = [layout for layout in named if fnmatch.fnmatchcase(implementation, layout.implementation)]
    reason = None
    if not layouts:
        others = " and ".join(attentions(model, "sdpa", "flex_attention"))
        other = f"{others} can" if others else "the model has no other"
        reason = f"attention {implementation} cannot be told who sees whom; {other}"
    elif layouts[0].one_sequence and "position_ids" not in arguments(model):
        reason = "the model takes no positions"
    elif layouts[0].one_sequence and (limited := limited_layers(model, longest)):
        reason = f"the model has layers of another kind ({limited})"
    elif layouts[0].shares and dropout:
        reason = f"rows of a step would share their dropout ({dropout})"
    return [] if reason else layouts, reason


def _shortest(examples: Sequence[Encoded]) -> list[Encoded]:
    return sorted(examples[:CHECKED_AMONG], key=lambda example: (len(example.input_ids), example.index))


def enough(examples: Sequence[Encoded]) -> list[Encoded]:
    """The shortest rows, as many as have RANDOM_TOKENS together."""
    among = _shortest(examples)
    totals = list(itertools.accumulate(len(row.input_ids) for row in among))
    return among[: bisect.bisect_left(totals, RANDOM_TOKENS) + 1]


def _trials(examples: Sequence[Encoded]) -> list[list[Encoded]]:
    """Some short rows; and the shortest with the longest, which reaches what short rows do not, a window's end.

    Short rows are those with images, if there are any: the others are laid out beside them in the second trial.
    """
    among = _shortest([row for row in examples if row.images] or examples)
    longest = max(examples, key=lambda example: (len(example.input_ids), example.index))
    short: list[Encoded] = []
    for row in among:
        if len(short) < CHECKED_ROWS and not any(_goes_on(row, other) for other in short):
            short.append(row)
    plain = [row for row in _shortest(examples) if not row.images]
    beside = next((row for row in (*plain, *among) if not _goes_on(longest, row)), among[0])
    return [sorted(rows, key=lambda row: (row.input_ids, row.index)) for rows in (short, [beside, longest])]


def _goes_on(row: Encoded, other: Encoded) -> bool:
    """Whether a row is another one and more, as a chat is after some turns: its tokens may follow from the other's."""
    length = len(other.input_ids)
    return len(row.input_ids) > length and row.input_ids[:length] == other.input_ids


def _is_random(model: torch.nn.Module, batch: Batch, rounding: float) -> bool:
    """Whether forwards of the same rows differ in training, on any rank, each time and by more than rounding."""
    for _ in range(LOOKS):
        first, again = nll(model, batch), nll(model, batch)
        # ranks look equally often, for their forwards may wait for each other
        if not any_rank(not _farthest(first, again) <= rounding):
            return False
    return True


def _farthest(first: torch.Tensor, again: torch.Tensor) -> float:
    """The largest difference of two losses of a token, as a share of the largest loss; NaN is the largest."""
    if not len(first):
        return 0.0
    return ((first - again).abs().max() / first.abs().max().clamp(min=1)).item()


def _dropout(model: torch.nn.Module, is_random: bool) -> str | None:
    """Where dropout is, as far as modules and configuration tell (an adapter's changes nothing before the first step),
    or that it must be somewhere."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            return name
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(model.config, name, 0):
            return name
    return "its forward is random in training" if is_random else None


def _differs(
    subject: Subject, batching: Batching, alone: float, rows: Sequence[Encoded], tolerance: float
) -> str | None:
    """What is wrong with a few rows laid out so, compared with the sum of their losses alone; None if nothing is."""
    batch = subject.batch(batching, rows)
    try:
        together = nll(subject.model, batch, FEWEST_LOGITS)
    except REFUSALS as error:
        if out_of_memory(error):  # no matter of what the model can take
            raise
        return f"the model does not take it ({first_line(error)[:100]})"
    difference = abs(alone - (together * batch.weights).sum().item()) / batch.weights.sum().item()
    wrong = f"its loss is not that of single rows (off by {difference:.2g} nats a token)"
    return None if difference <= tolerance else wrong


def _ignores_positions(subject: Subject, batching: Batching, rows: Sequence[Encoded]) -> bool:
    """Whether no loss changes by so much as a bit, on any rank, when tokens stand half as far apart.

    Then a row in one sequence with others is taken to begin where it stands there. In reduced precision what that
    changes may be less than what rounding does.
    """
    batch = subject.batch(batching, rows)
    closer = {**batch.inputs, "position_ids": batch.inputs["position_ids"] // 2}
    here, there = (nll(subject.model, dataclasses.replace(batch, inputs=inputs)) for inputs in (batch.inputs, closer))
    return not any_rank(not torch.equal(here, there))


def _see_each_other(subject: Subject, batching: Batching, rows: Sequence[Encoded], rounding: float) -> bool:
    """Whether another last token of the first row changes, by so much as a bit, what is said of later rows, on a rank.

    Where it does so each time, and the unchanged rows themselves differ from one forward to the next, as on a busy
    machine, what is below rounding and no more than a few times as large as these differences is none of the change.
    """
    batch, first = subject.batch(batching, rows), rows[0]
    last = len(first.input_ids) - 1
    ids = batch.inputs["input_ids"].clone()
    ids[0, last] = next((token for token in first.input_ids if token != first.input_ids[-1]), 0)
    changed = dataclasses.replace(batch, inputs={**batch.inputs, "input_ids": ids})
    sources = slice(None) if batch.sources is None else batch.sources
    later = batch.keep[sources] > last
    unchanged: list[torch.Tensor] = []
    for _ in range(LOOKS):
        before, after = (nll(subject.model, each, FEWEST_LOGITS)[later] for each in (batch, changed))
        unchanged.append(before)
        if not any_rank(not torch.equal(before, after)):
            return False
    noise = max(_farthest(one, other) for one, other in itertools.pairwise(unchanged))
    return any_rank(not _farthest(before, after) <= min(rounding, NOISE * noise))
