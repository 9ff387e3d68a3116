"""Names the likely cause of each difference, by a test of its own: what else would hold if this were the cause."""

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from accel_sft.api.errors import UserError
from accel_sft.batching.device_memory import out_of_memory
from accel_sft.evaluation.endpoint import Endpoint, EndpointError, Reply
from accel_sft.io.text import common_length, one_line
from accel_sft.tools.parity.comparison import Pair, difference, same
from accel_sft.tools.parity.reference import Reference

TEMPLATE, FIRST_TOKEN, TOKENIZER = "chat template", "doubled first token", "tokenizer"
WEIGHTS, STOP, CONTEXT, PRECISION, OTHER = "adapter not applied", "stop token", "context", "precision", "unknown"
EXAMINED = 8
"""Examples that are examined for a cause: each takes forwards here and requests there."""
NOISE_FLOAT32, NOISE_REDUCED = 2e-4, 5e-2
"""Nats between log-probabilities, on average, up to which two libraries differ in float32, and in 16 bits."""
_EXPLAINED = 0.8
"""A rounding explains differences if computing with it here leaves less than this share of them."""
_AS_FAR = 2.0
"""Factor within which differences are as large as those of a rounding: two libraries round the same type otherwise."""


class Finding(NamedTuple):
    """A cause, what shows it, what to do, and whether answers stay the same but for near ties."""

    cause: str
    evidence: str
    fix: str
    mild: bool = False


@dataclasses.dataclass
class Causes:
    """Examines differing pairs.

    Attributes:
        exact: the server's answers to the prompts' own tokens, by example.
        untested: a line for each cause whose test needs a model that cannot be loaded here.
    """

    reference: Reference
    endpoint: Endpoint
    pairs: Sequence[Pair]
    exact: dict[int, Reply] = dataclasses.field(default_factory=dict)
    untested: list[str] = dataclasses.field(default_factory=list)

    def findings(self) -> list[Finding]:
        """A finding for each cause that its test shows; one of unknown cause if answers differ and none does."""
        read, said = self.context() or self.prompts(), self.weights() or self.stop() or self.precision()
        found = [finding for finding in (read, said) if finding]
        if not found and (differing := self._differing()):
            answers = "1 answer differs" if len(differing) == 1 else f"{len(differing)} answers differ"
            told = f"{answers} where the run's weights are sure, to prompts of the same tokens"
            fix = "see that the server has these weights, and no penalty or other sampling"
            found.append(Finding(OTHER, told, fix))
        return found

    def lead(self, metric: str, here: float, served: float) -> Finding | None:
        """Whether the same answers are scored otherwise by what users of the server read of them."""
        if not abs(here - served) > 1e-9 or any(pair.at is not None or not pair.reply for pair in self.pairs):
            return None
        told = f"the same answers have {metric} {here:.4g} here and {served:.4g} as the server gives them: what the "
        told += "template writes in front of answers is learnt with them, and the server leaves it there"
        return Finding(TEMPLATE, told, "train with a template that ends prompts with it, by add_generation_prompt")

    def _differing(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.differs]

    def _otherwise(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.read_otherwise]

    def _asked_exactly(self, pair: Pair) -> Reply | None:
        """The server's answer to the prompt's own tokens, or to its text where it takes no tokens and reads as many."""
        if pair.row.index not in self.exact:
            for prompt in (pair.prompt, self._text(pair.prompt)):
                reply = self._completed(prompt, self.reference.most)
                if reply and reply.prompt_tokens in (None, len(pair.prompt)):
                    self.exact[pair.row.index] = reply
                    break
        return self.exact.get(pair.row.index)

    def _completed(self, prompt: str | list[int], most: int) -> Reply | None:
        """What the server says behind a prompt; None if it refuses such a prompt."""
        try:
            return self.endpoint.complete(prompt, most)
        except EndpointError as error:
            if error.is_refusal:
                return None
            raise

    def _text(self, ids: list[int]) -> str:
        return self.reference.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # --- what the server reads ---

    def context(self) -> Finding | None:
        """Whether the server reads or writes no more than so many tokens: twice the prompt is then no longer."""
        fix = "give the server a longer context (vLLM: --max-model-len, llama.cpp: -c)"
        refused = [pair for pair in self.pairs if pair.reply is None]
        if refused:
            told = f"{_examples(refused)} refused: {one_line(refused[0].refusal, 200)}"
            longest = max(len(pair.prompt) for pair in self.pairs if pair.reply)
            if any(len(pair.prompt) < longest for pair in refused):
                return Finding(OTHER, told, "see by its words what the server does not take")
            return Finding(CONTEXT, told, fix)
        for pair in self._otherwise():
            assert pair.reply
            read = pair.reply.prompt_tokens
            if read is None or read >= len(pair.theirs or pair.prompt):
                continue
            once, twice = (self._completed(self._text(pair.prompt) * times, 1) for times in (1, 2))
            if once and (twice is None or once.prompt_tokens == twice.prompt_tokens == read):
                told = f"of a prompt of {len(pair.prompt)} tokens {read} are read, of twice it no more"
                return Finding(CONTEXT, told, fix)
        most = self.reference.most
        cut = [p for p in self.pairs if p.differs and p.reply and p.reply.finish == "length" and p.reply.tokens]
        cut = [p for p in cut if p.reply and p.reply.tokens and p.reply.tokens < min(most, len(p.ids))]
        if cut and cut[0].reply:
            told = f"{_examples(cut)} end after {cut[0].reply.tokens} tokens of {most} that were asked for"
            return Finding(CONTEXT, told, fix)
        return None

    def prompts(self) -> Finding | None:
        """Whether the server makes other tokens of the messages, and in which of three ways."""
        otherwise = self._otherwise()
        if not otherwise:
            return self._template_of_equal_length()
        pair = otherwise[0]
        text, known = self._text(pair.prompt), len(pair.prompt)
        if self.reference.ids(text, ended=False) == pair.prompt:  # else the text says nothing of the tokenizer
            theirs = self.endpoint.text_tokens(text)
            if theirs is None:
                counted = self._completed(text, 1)
                count = counted and counted.prompt_tokens
                other = count not in (None, known, known + 1)  # some servers add a first token to texts
                told = f"of a text of {known} tokens it makes {count}"
            else:
                other, told = theirs != pair.prompt, "of the same text it makes " + self._apart(pair.prompt, theirs)
            if other:
                fix = "serve the run's own tokenizer files, which stand beside its weights"
                return Finding(TOKENIZER, told, fix)
        first = pair.prompt[:1]
        if self._is_doubled(otherwise):
            told = f"{_examples(otherwise)} begin with {self._text(first)!r} twice"
            fix = "the template writes it and the tokenizer adds it: take it out of one of the two on the server"
            return Finding(FIRST_TOKEN, told, fix)
        told = f"{_examples(otherwise)} have other prompts, the first one "
        if pair.theirs and pair.theirs != pair.prompt:
            told += self._apart(pair.prompt, pair.theirs)
        else:
            told += f"{self._read(pair)} tokens long in place of {known}"
        return self._template(told)

    def _template(self, told: str) -> Finding:
        fix = "give the server the run's template (vLLM: --chat-template, llama.cpp: --jinja --chat-template-file)"
        exact = [(pair, self._asked_exactly(pair)) for pair in self._differing()[:EXAMINED]]
        held = [reply for pair, reply in exact if reply and same(self.reference, pair.ids, reply)]
        if held:
            told += f"; asked by the run's own prompt, {len(held)} of {len(exact)} answers are the run's"
        return Finding(TEMPLATE, told, fix)

    def _template_of_equal_length(self) -> Finding | None:
        """Whether answers become the run's once the server is asked by the run's own prompt."""
        differing = self._differing()[:EXAMINED]
        if any(pair.theirs is not None for pair in self.pairs) or not differing:
            return None
        replies = [(pair, self._asked_exactly(pair)) for pair in differing]
        if all(reply and same(self.reference, pair.ids, reply) for pair, reply in replies):
            return self._template(f"{_examples(differing)} have prompts of the same length, with other answers")
        return None

    def _is_doubled(self, otherwise: Sequence[Pair]) -> bool:
        if all(pair.theirs for pair in otherwise):
            return all(pair.theirs == pair.prompt[:1] + pair.prompt for pair in otherwise)
        begins = self.reference.tokenizer.bos_token_id
        return all(pair.prompt[0] == begins and self._read(pair) == len(pair.prompt) + 1 for pair in otherwise)

    def _read(self, pair: Pair) -> int | None:
        return pair.reply.prompt_tokens if pair.reply else None

    def _apart(self, ours: list[int], theirs: list[int]) -> str:
        at = common_length([ours, theirs])
        mine, other = (one_line(repr(self._text(ids[max(at - 4, 0) : at + 8]))) for ids in (ours, theirs))
        return f"{other} from token {at}, where it was trained on {mine}"

    # --- what it answers ---

    @contextlib.contextmanager
    def _second_model(self, cause: str) -> Iterator[None]:
        """Within it, a model that cannot be loaded, or has no room beside the run's, leaves the cause untested."""
        try:
            yield
        except UserError as error:
            self.untested.append(f"{cause}: {error.problems[0]}")
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self.untested.append(f"{cause}: no memory here for a second model")

    def _judged(self) -> list[tuple[Pair, Reply]]:
        """Differing answers to the prompt as it was trained; where the server read it otherwise, it is asked anew."""
        found = []
        for pair in (self._differing() or self._otherwise())[:EXAMINED]:
            reply = self._asked_exactly(pair) if pair.read_otherwise else pair.reply
            if reply and not same(self.reference, pair.ids, reply):
                at, gap, _ = difference(self.reference, pair, reply)
                found += [(pair, reply)] if Pair(pair.chat, pair.row, pair.ids, reply, at=at, gap=gap).differs else []
        return found

    def weights(self) -> Finding | None:
        """Whether the answers are those of what the run began with."""
        if not (judged := self._judged()):
            return None
        own: list[list[int]] = []
        with self._second_model(WEIGHTS), self.reference.base() as base:
            own += [self.reference.continued(pair.prompt, self.reference.most, base) for pair, _ in judged]
        held = [ids for ids, (_, reply) in zip(own, judged, strict=False) if same(self.reference, ids, reply)]
        if len(held) * 2 <= len(judged):
            return None
        told = f"{len(held)} of {len(judged)} differing answers are those of the model before training"
        adapter = " (vLLM: --enable-lora --lora-modules NAME=FOLDER, and ask for NAME; llama.cpp: --lora)"
        return Finding(WEIGHTS, told, "serve the trained weights" + adapter * bool(self.reference.source.adapter))

    def stop(self) -> Finding | None:
        """Whether answers are the run's and then go on as the run's weights do behind the token that ends an answer."""
        judged = [(pair, reply) for pair, reply in self._judged() if pair.ids and pair.ids[-1] in self.reference.ends]
        goes_on = [(p, r, _rest(self.reference.text(p.ids), r.text)) for p, r in judged]
        # of an answer that is not empty, by a server that says the same again, as none does that draws tokens
        goes_on = [(pair, reply, rest) for pair, reply, rest in goes_on if rest and self._repeated(pair, reply)]
        shown = 0
        for pair, reply, rest in goes_on:
            behind = self.reference.text(self.reference.continued([*pair.prompt, *pair.ids], 8)).strip()
            shown += reply.finish == "length" or bool(behind and rest.strip().startswith(behind[: len(rest.strip())]))
        if not shown:
            return None
        mark, rest = self._text([goes_on[0][0].ids[-1]]), goes_on[0][2]
        told = f"{shown} of {len(self.pairs)} answers are the run's and go on behind {mark!r}: {one_line(rest)}"
        fix = f"let {mark!r} end answers: eos_token_id of the served generation_config.json, or `stop`"
        return Finding(STOP, told, fix)

    def _repeated(self, pair: Pair, reply: Reply) -> bool:
        again = self._asked_exactly(pair)
        return again is None or again.text.strip() == reply.text.strip()

    def precision(self) -> Finding | None:
        """Whether weights that are rounded in a way that servers have come closer to the server's log-probabilities."""
        if not any(pair.reply and pair.reply.logprobs for pair in self.pairs):
            self.untested.append(f"{PRECISION}: the server tells no log-probabilities")
        told = [(pair, pair.reply) for pair in self.pairs if pair.reply and pair.off and not pair.read_otherwise]
        noise = NOISE_FLOAT32 if self.reference.model.dtype == torch.float32 else NOISE_REDUCED
        some = told[:EXAMINED]
        before = _mean([value for pair, _ in some for value in pair.off])
        if before <= noise:
            return None
        left, apart = dict[str, float](), dict[str, float]()
        with self._second_model(PRECISION):
            for name, model in self.reference.roundings():
                both = [values for pair, reply in some for values in self._off(pair, reply, model)]
                left[name], apart[name] = (_mean([*side]) for side in zip(*both, strict=True))
        mild = not self._differing()
        if name := min((name for name in left if left[name] < before * _EXPLAINED), key=left.__getitem__, default=""):
            shown = f"but by {left[name]:.2g} from those of the run with {name}"
        elif mild and (name := min(apart, key=lambda name: abs(apart[name] - before), default="")):
            if not before / _AS_FAR <= apart[name] <= before * _AS_FAR:
                return None
            shown = f"those of the run with {name} by about as much ({apart[name]:.2g})"
        else:
            return None
        evidence = f"log-probabilities are off by {before:.2g} nats, {shown}"
        return Finding(PRECISION, evidence, "serve more bits, if the metric is worse", mild)

    def _off(self, pair: Pair, reply: Reply, model: object) -> Iterator[tuple[float, float]]:
        """How far this model's log-probability of each token is from the server's, and from the run's."""
        own, other = (self.reference.log_probs(pair.prompt, pair.ids[: len(pair.off)], m) for m in (None, model))
        for at in range(len(pair.off)):
            value = float(other[at, pair.ids[at]])
            yield abs(value - reply.logprobs[at][1]), abs(value - float(own[at, pair.ids[at]]))


def _rest(own: str, said: str) -> str:
    """What the server says behind the run's own answer; "" if it says something else, or no more."""
    own, said = own.strip(), said.strip()
    return said[len(own) :] if own and said.startswith(own) else ""


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _examples(pairs: Sequence[Pair]) -> str:
    return f"{len(pairs)} {'example' if len(pairs) == 1 else 'examples'}"
