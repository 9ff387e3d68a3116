"""Names the likely cause of each difference. Each cause is tested by something that it alone predicts."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from accel_sft.api.errors import UserError
from accel_sft.batching.device_memory import out_of_memory
from accel_sft.evaluation.endpoint import Endpoint, EndpointError, Reply
from accel_sft.io.text import common_length, one_line
from accel_sft.tools.parity.comparison import Pair, Reference, difference, same

TEMPLATE, FIRST_TOKEN, TOKENIZER = "chat template", "doubled first token", "tokenizer"
WEIGHTS, STOP, CONTEXT, OTHER = "adapter not applied", "stop token", "context", "unknown"
EXAMINED = 8
"""Examples that are examined for a cause: each takes forwards here and requests there."""


class Cause(NamedTuple):
    """A cause, what shows it, and what to do."""

    cause: str
    evidence: str
    fix: str


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

    def named(self) -> list[Cause]:
        """Each cause that its test shows; one that is unknown if answers differ and no test shows why."""
        causes = [cause for cause in (self.context() or self.prompts(), self.weights() or self.stop()) if cause]
        if not causes and (differing := self._differing()):
            answers = "1 answer differs" if len(differing) == 1 else f"{len(differing)} answers differ"
            evidence = f"{answers} where the run's weights are sure, to prompts of the same tokens"
            fix = "see that the server has these weights in their own precision, and no penalty or other sampling"
            causes.append(Cause(OTHER, evidence, fix))
        return causes

    def lead(self, metric: str, here: float, served: float) -> Cause | None:
        """Whether the same answers are scored otherwise by what users of the server read of them."""
        if not abs(here - served) > 1e-9 or any(pair.at is not None or not pair.reply for pair in self.pairs):
            return None
        evidence = f"the same answers have {metric} {here:.4g} here and {served:.4g} as the server gives them: what "
        evidence += "the template writes in front of answers is learnt with them, and the server leaves it there"
        return Cause(TEMPLATE, evidence, "train with a template that ends prompts with it, by add_generation_prompt")

    def _differing(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.differs]

    def _misread(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.misread]

    def _reply_to_ids(self, pair: Pair) -> Reply | None:
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

    def context(self) -> Cause | None:
        """Whether the server truncates: refuses long prompts, counts no more tokens in twice the prompt, or cuts its
        answers."""
        fix = "give the server a longer context (vLLM: --max-model-len, llama.cpp: -c)"
        if refused := [pair for pair in self.pairs if pair.reply is None]:
            evidence = f"{_examples(refused)} refused: {one_line(refused[0].refusal, 200)}"
            longest = max(len(pair.prompt) for pair in self.pairs if pair.reply)
            if any(len(pair.prompt) < longest for pair in refused):
                return Cause(OTHER, evidence, "see by its words what the server does not take")
            return Cause(CONTEXT, evidence, fix)
        for pair in self._misread():
            if pair.read is None or pair.read >= len(pair.theirs or pair.prompt):
                continue
            once, twice = (self._completed(self._text(pair.prompt) * times, 1) for times in (1, 2))
            if once and (twice is None or once.prompt_tokens == twice.prompt_tokens == pair.read):
                evidence = f"of a prompt of {len(pair.prompt)} tokens {pair.read} are read, of twice it no more"
                return Cause(CONTEXT, evidence, fix)
        most = self.reference.most
        lengths = [
            pair.reply.tokens
            for pair in self._differing()
            if pair.reply and pair.reply.finish == "length" and 0 < (pair.reply.tokens or 0) < min(most, len(pair.ids))
        ]
        if lengths:
            return Cause(CONTEXT, f"{len(lengths)} answers end after {lengths[0]} tokens of {most}", fix)
        return None

    def prompts(self) -> Cause | None:
        """Whether the server makes other tokens of the messages, and why: a first token twice, another tokenizer, or
        another template."""
        misread = self._misread()
        if misread and (cause := self._first_token(misread) or self._tokenizer(misread[0])):
            return cause
        if not misread and any(pair.theirs is not None for pair in self.pairs):
            return None
        examined = [(pair, self._reply_to_ids(pair)) for pair in self._differing()[:EXAMINED]]
        cured = [pair for pair, reply in examined if reply and same(self.reference, pair.ids, reply)]
        if misread:
            evidence = f"{_examples(misread)} have other prompts, the first one {self._other_prompt(misread[0])}"
        elif examined and len(cured) == len(examined):
            evidence = f"{_examples(cured)} have prompts of the same length, with other answers"
        else:
            return None
        if cured:
            evidence += f"; asked by the run's own prompt, {len(cured)} of {len(examined)} answers are the run's"
        fix = "give the server the run's template (vLLM: --chat-template, llama.cpp: --jinja --chat-template-file)"
        return Cause(TEMPLATE, evidence, fix)

    def _first_token(self, misread: Sequence[Pair]) -> Cause | None:
        if all(pair.theirs for pair in misread):
            doubled = all(pair.theirs == pair.prompt[:1] + pair.prompt for pair in misread)
        else:
            begins = self.reference.tokenizer.bos_token_id
            doubled = all(pair.prompt[0] == begins and pair.read == len(pair.prompt) + 1 for pair in misread)
        if not doubled:
            return None
        evidence = f"{_examples(misread)} begin with {self._text(misread[0].prompt[:1])!r} twice"
        fix = "the template writes it and the tokenizer adds it: take it out of one of the two on the server"
        return Cause(FIRST_TOKEN, evidence, fix)

    def _tokenizer(self, pair: Pair) -> Cause | None:
        """Whether the server makes other tokens of the prompt's text."""
        text, count = self._text(pair.prompt), len(pair.prompt)
        if self.reference.ids(text, ended=False) != pair.prompt:  # the text says nothing of the tokenizer
            return None
        theirs = self.endpoint.text_tokens(text)
        if theirs is not None:
            other, evidence = (
                theirs != pair.prompt,
                "of the same text it makes " + self._first_difference(pair.prompt, theirs),
            )
        else:
            completed = self._completed(text, 1)
            counted = completed and completed.prompt_tokens
            other = counted not in (None, count, count + 1)  # some servers add a first token to texts
            evidence = f"of a text of {count} tokens it makes {counted}"
        fix = "serve the run's own tokenizer files, which stand beside its weights"
        return Cause(TOKENIZER, evidence, fix) if other else None

    def _other_prompt(self, pair: Pair) -> str:
        if pair.theirs and pair.theirs != pair.prompt:
            return self._first_difference(pair.prompt, pair.theirs)
        return f"{pair.read} tokens long in place of {len(pair.prompt)}"

    def _first_difference(self, ours: list[int], theirs: list[int]) -> str:
        at = common_length([ours, theirs])
        mine, other = (one_line(repr(self._text(ids[max(at - 4, 0) : at + 8]))) for ids in (ours, theirs))
        return f"{other} from token {at}, where it was trained on {mine}"

    # --- what it answers ---

    def _judged(self) -> list[tuple[Pair, Reply]]:
        """Differing answers to the prompt as it was trained; where it was misread, the server is asked anew."""
        judged = []
        for pair in (self._differing() or self._misread())[:EXAMINED]:
            reply = self._reply_to_ids(pair) if pair.misread else pair.reply
            if reply and not same(self.reference, pair.ids, reply):
                at, gap, _ = difference(self.reference, pair, reply)
                if dataclasses.replace(pair, reply=reply, at=at, gap=gap).differs:
                    judged.append((pair, reply))
        return judged

    def weights(self) -> Cause | None:
        """Whether the answers are those of what the run began with."""
        if not (judged := self._judged()):
            return None
        try:
            with self.reference.base() as base:
                most = self.reference.most
                answers = [self.reference.continued(pair.prompt, most, base) for pair, _ in judged]
        except (UserError, RuntimeError) as error:
            if not isinstance(error, UserError) and not out_of_memory(error):
                raise
            reason = error.problems[0] if isinstance(error, UserError) else "no memory here for a second model"
            self.untested.append(f"{WEIGHTS}: {reason}")
            return None
        untrained = [ids for ids, (_, reply) in zip(answers, judged, strict=True) if same(self.reference, ids, reply)]
        if len(untrained) * 2 <= len(judged):
            return None
        evidence = f"{len(untrained)} of {len(judged)} differing answers are those of the model before training"
        adapter = " (vLLM: --enable-lora --lora-modules NAME=FOLDER, and ask for NAME; llama.cpp: --lora)"
        return Cause(WEIGHTS, evidence, "serve the trained weights" + adapter * bool(self.reference.source.adapter))

    def stop(self) -> Cause | None:
        """Whether answers are the run's and then go on as the run's weights do behind the token that ends an answer."""
        judged = [(pair, reply) for pair, reply in self._judged() if pair.ids and pair.ids[-1] in self.reference.ends]
        goes_on = [(pair, reply, _rest(self.reference.text(pair.ids), reply.text)) for pair, reply in judged]
        # of an answer that is not empty, by a server that says the same again, as none does that draws tokens
        goes_on = [(pair, reply, rest) for pair, reply, rest in goes_on if rest and self._repeated(pair, reply)]
        shown = 0
        for pair, reply, rest in goes_on:
            behind = self.reference.text(self.reference.continued([*pair.prompt, *pair.ids], 8)).strip()
            shown += reply.finish == "length" or bool(behind and rest.strip().startswith(behind[: len(rest.strip())]))
        if not shown:
            return None
        mark, rest = self._text([goes_on[0][0].ids[-1]]), goes_on[0][2]
        evidence = f"{shown} of {len(self.pairs)} answers are the run's and go on behind {mark!r}: {one_line(rest)}"
        fix = f"let {mark!r} end answers: eos_token_id of the served generation_config.json, or `stop`"
        return Cause(STOP, evidence, fix)

    def _repeated(self, pair: Pair, reply: Reply) -> bool:
        again = self._reply_to_ids(pair)
        return again is None or again.text.strip() == reply.text.strip()


def _rest(own: str, served: str) -> str:
    """What the server says behind the run's own answer; "" if it says something else, or no more."""
    own, served = own.strip(), served.strip()
    return served[len(own) :] if own and served.startswith(own) else ""


def _examples(pairs: Sequence[Pair]) -> str:
    return f"{len(pairs)} {'example' if len(pairs) == 1 else 'examples'}"
