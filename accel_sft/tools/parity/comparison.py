"""Sends the same prompts to the run's own weights and the server, finds differing answers, and names the cause."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from accel_sft.chat.answer_text import without_thinking
from accel_sft.chat.conversation import Conversation, conversation, wanted
from accel_sft.chat.encoded import Encoded, end_of_turn_ids
from accel_sft.evaluation.endpoint import Endpoint, EndpointError, Reply
from accel_sft.evaluation.evaluator import Evaluator, Generated, refuse_beyond_text
from accel_sft.evaluation.generate import generate
from accel_sft.io.text import common_length, one_line
from accel_sft.models.architecture import arguments

TIE = 0.25
"""Rounding may swap tokens that differ by at most this many nats: two bfloat16 steps for logits between 16 and 32."""
TEMPLATE, WEIGHTS, STOP, CONTEXT, OTHER = "chat template", "adapter not applied", "stop token", "context", "unknown"
EXAMINED = 8
"""Maximum number of examples in which a cause is looked for, with forwards here and requests to the server."""


class Reference:
    """The run's answers to the first validation examples. `answers` maps an example's index to a greedy answer of at
    most `most` tokens, end token included."""

    def __init__(self, evaluator: Evaluator, model: Any, most: int) -> None:
        self.evaluator, self.model, self.most = evaluator, model, most
        self.tokenizer, self.thinking = evaluator.tokenizer, evaluator.config.thinking
        self.ends = end_of_turn_ids(self.tokenizer, model.generation_config)
        with torch.no_grad():
            self.answers = {row.index: ids for row, ids in evaluator.backend(evaluator.answered, most).answers}

    def metric(self, answers: Mapping[int, Any]) -> float:
        """The task's main metric of `answers`, which maps an example's index to its answer."""

        def backend(examples: Sequence[Encoded], max_new_tokens: int) -> Generated:
            return Generated([(example, answers[example.index]) for example in examples], 1.0, {})

        evaluator = dataclasses.replace(self.evaluator, backend=backend)
        return evaluator.score_answers({}).metrics[evaluator.task.main_metric]

    def text(self, ids: Sequence[int]) -> str:
        """The text of an answer as servers return it: without special tokens, and without the end token."""
        content = [*ids[:-1]] if ids and ids[-1] in self.ends else [*ids]
        return self.tokenizer.decode(content, skip_special_tokens=True)

    def raw_text(self, ids: Sequence[int]) -> str:
        """The text of all tokens, special ones included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def log_probs(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """The log-probabilities of the whole vocabulary at each place of the answer, and at the place after it."""
        ids = torch.tensor([[*prompt, *answer]], device=self.model.device)
        places = len(answer) + 1
        last_places = {"logits_to_keep": places} if "logits_to_keep" in arguments(self.model) else {}
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False, **last_places).logits[0, -places:]
        return logits.float().log_softmax(-1).cpu()

    def continued(self, prompt: list[int], tokens: int) -> list[int]:
        """The greedy continuation of a prompt, up to the token that ends an answer."""
        pad = self.tokenizer.pad_token_id
        with torch.no_grad():
            (answer,), _ = generate(self.model, [prompt], tokens, self.ends, pad, self.model.device)
            return answer


@dataclasses.dataclass
class Pair:
    """An example with the answer of the run's weights and the server's answer."""

    chat: Conversation
    row: Encoded
    ids: list[int]  # the answer of the run's weights
    reply: Reply | None = None  # the server's answer; None if it refused
    refusal: str = ""
    theirs: list[int] | None = None  # the server's token ids of the prompt, if it reports them
    at: int | None = None  # the place of the first token that differs; None if the answers are the same
    gap: float = 0.0  # nats by which the run's weights prefer the run's token at `at` to the server's
    off: Sequence[float] = ()  # differences of the log-probabilities of the tokens before `at`

    @property
    def prompt(self) -> list[int]:
        return self.row.input_ids[: self.row.prompt_length]

    @property
    def differs(self) -> bool:
        """Whether the answers differ by more than rounding explains."""
        return self.reply is None or (self.at is not None and self.gap > TIE)

    @property
    def read(self) -> int | None:
        """How many tokens the server counted in the prompt; None if it does not report this."""
        return self.reply.prompt_tokens if self.reply else None

    @property
    def misread(self) -> bool:
        """Whether the server is known to read the prompt as different tokens, or as a different number of tokens."""
        return self.theirs not in (None, self.prompt) or self.read not in (None, len(self.prompt))


def compare(reference: Reference, endpoint: Endpoint) -> list[Pair]:
    """Ask the server for all examples' answers and compare them; raise UserError if it refuses every example."""
    evaluator = reference.evaluator
    chat = functools.partial(conversation, evaluator.task, evaluator.examples, "validation")
    pairs = [Pair(chat(row.index), row, reference.answers[row.index]) for row in evaluator.answered]
    refuse_beyond_text([pair.chat for pair in pairs])

    def fill(pair: Pair) -> None:
        try:
            pair.reply = ask(reference, endpoint, pair)
        except EndpointError as error:
            if error.status not in (400, 413, 422):
                raise
            pair.refusal = str(error)
        pair.theirs = endpoint.chat_tokens(pair.chat.turns, pair.chat.tools, reference.thinking)

    endpoint.call_all(f"{endpoint.model} answers", fill, pairs)
    if not any(pair.reply for pair in pairs):
        raise EndpointError(pairs[0].refusal)
    for pair in pairs:
        if pair.reply:
            pair.at, pair.gap, pair.off = difference(reference, pair, pair.reply)
    return pairs


def served_answer(pair: Pair, thinking: str | None) -> Reply:
    """The server's answer as the task scores it; empty if the server refused to answer."""
    text = without_thinking(pair.reply.text, wanted(pair.chat, thinking)) if pair.reply else ""
    return Reply(text, "stop", tokens=1)


def ask(reference: Reference, endpoint: Endpoint, pair: Pair) -> Reply:
    """The server's answer. If the server leaves out the thinking, the run's thinking is put before the answer."""
    reply = endpoint.chat(pair.chat.turns, reference.most, pair.chat.tools, reference.thinking)
    return dataclasses.replace(reply, text=with_thinking(reply.text, reference.text(pair.ids)))


def with_thinking(served: str, own: str) -> str:
    """A server's answer. If the thinking is missing (llama.cpp's server and vLLM's reasoning parsers leave it out), the
    thinking of the run's own answer is put before the server's."""
    if "<think>" not in own or "<think>" in served:
        return served
    return own.removesuffix(without_thinking(own, "").lstrip()) + served.lstrip()


def difference(reference: Reference, pair: Pair, reply: Reply) -> tuple[int | None, float, list[float]]:
    """Return `at`, `gap` and `off` of a Pair, for a reply to the same prompt."""
    values = reference.log_probs(pair.prompt, pair.ids[:-1])
    own = [float(values[at, token]) for at, token in enumerate(pair.ids)]
    at = None if same(reference, pair.ids, reply) else _first(reference, pair.ids, reply)
    until = len(pair.ids) if at is None else at
    off = [abs(mine - theirs) for mine, (_, theirs) in zip(own[:until], reply.logprobs, strict=False)]
    if at is None or at >= len(pair.ids):
        return at, 0.0 if at is None else float("inf"), off
    token = _token_at(reference, pair.ids, at, reply)
    gap = float("inf") if token == pair.ids[at] else own[at] - float(values[at, token])  # inf: the server stops here
    return at, gap, off


def same(reference: Reference, ids: list[int], reply: Reply) -> bool:
    """Whether a reply is the answer `ids`; white space at the ends does not count, since some servers strip it."""
    ended = bool(ids) and ids[-1] in reference.ends  # some servers say `length` if the last allowed token is the end
    own, served = (text.strip().rstrip("\ufffd") for text in (reference.text(ids), reply.text))  # a cut character
    return own == served and (ended == (reply.finish != "length") or (ended and len(ids) == reference.most))


def _first(reference: Reference, ids: list[int], reply: Reply) -> int:
    """The place of the first token of `ids` that the reply does not have."""
    served = reply.text.lstrip()
    for at in range(len(ids)):
        if not served.startswith(reference.text(ids[: at + 1]).lstrip().rstrip("\ufffd")):  # a cut character
            return at
    ended = bool(ids) and ids[-1] in reference.ends
    return len(ids) - 1 if ended else len(ids)


def _token_at(reference: Reference, ids: list[int], at: int, reply: Reply) -> int:
    """The reply's token in place of `ids[at]`: the one that the server names, or the first of the remaining text."""
    tokenize = functools.partial(reference.tokenizer, add_special_tokens=False)
    if len(reply.logprobs) > at and (word := reply.logprobs[at][0]):
        tokens = tokenize(word)["input_ids"]
        if len(tokens) == 1:
            return tokens[0]
    rest = reply.text.lstrip()[len(reference.text(ids[:at]).lstrip()) :]
    return (tokenize(rest)["input_ids"] or [reference.tokenizer.eos_token_id])[0]


class Cause(NamedTuple):
    """A cause of differences, the evidence for it, and the fix."""

    cause: str
    evidence: str
    fix: str


def cause_of(reference: Reference, endpoint: Endpoint, pairs: Sequence[Pair]) -> Cause | None:
    """Return the first cause that a test shows; `OTHER` if answers differ and no test shows why; None if the server
    answers as the run's weights do. Each test is for one cause, and looks for a sign that no other cause leaves."""
    cause = _context(reference, endpoint, pairs) or _template(reference, endpoint, pairs)
    differing = [(pair, pair.reply) for pair in pairs if pair.differs and pair.reply]
    if cause or not differing:
        return cause
    if cause := _weights(reference, differing[:EXAMINED]) or _stop(reference, endpoint, differing[:EXAMINED]):
        return cause
    evidence = f"{len(differing)} of {len(pairs)} answers differ where the run's weights are sure"
    return Cause(OTHER, evidence, "check that the server has these weights in the saved precision, and does not sample")


def _completed(endpoint: Endpoint, prompt: str | list[int], most: int) -> Reply | None:
    """The server's continuation of a prompt; None if it refuses such prompts."""
    try:
        return endpoint.complete(prompt, most)
    except EndpointError as error:
        if error.is_refusal:
            return None
        raise


def _context(reference: Reference, endpoint: Endpoint, pairs: Sequence[Pair]) -> Cause | None:
    """A short context as the cause, if the server refuses long prompts, counts no more tokens for a doubled prompt, or
    cuts answers; else None."""
    fix = "give the server a longer context (vLLM: --max-model-len, llama.cpp: -c)"
    if refused := [pair for pair in pairs if pair.reply is None]:
        evidence = f"the server refused {_examples(refused)}: {one_line(refused[0].refusal, 200)}"
        longest = max(len(pair.prompt) for pair in pairs if pair.reply)
        if any(len(pair.prompt) < longest for pair in refused):
            return Cause(OTHER, evidence, "see the server's message for what it does not accept")
        return Cause(CONTEXT, evidence, fix)
    for pair in pairs:
        if pair.misread and pair.read is not None and pair.read < len(pair.theirs or pair.prompt):
            replies = [_completed(endpoint, reference.raw_text(pair.prompt) * times, 1) for times in (1, 2)]
            if {reply.prompt_tokens for reply in replies if reply} == {pair.read}:
                length = len(pair.prompt)
                evidence = f"the server reads {pair.read} of {length} prompt tokens, and no more of a doubled prompt"
                return Cause(CONTEXT, evidence, fix)
    for pair in pairs:
        tokens = pair.reply.tokens if pair.differs and pair.reply and pair.reply.finish == "length" else None
        if tokens and tokens < min(reference.most, len(pair.ids)):
            return Cause(CONTEXT, f"an answer is cut after {tokens} of {reference.most} tokens", fix)
    return None


def _template(reference: Reference, endpoint: Endpoint, pairs: Sequence[Pair]) -> Cause | None:
    """The template as the cause, if the server turns messages into other tokens than the run does; else None. If the
    server does not return its tokens, its answers to the run's own prompts decide."""
    fix = "give the server the run's tokenizer files and template (vLLM: --chat-template, llama.cpp: --jinja)"
    if misread := [pair for pair in pairs if pair.misread]:
        pair = misread[0]
        mismatch = f"is {pair.read} tokens long instead of {len(pair.prompt)}"
        if pair.theirs and pair.theirs != pair.prompt:
            at = common_length([pair.prompt, pair.theirs])
            parts = (reference.raw_text(ids[max(at - 4, 0) : at + 8]) for ids in (pair.prompt, pair.theirs))
            trained, served = (one_line(repr(part)) for part in parts)
            mismatch = f"has {served} from token {at} on, where the run was trained on {trained}"
        return Cause(TEMPLATE, f"the prompts of {_examples(misread)} differ; the first prompt {mismatch}", fix)
    differing = [pair for pair in pairs if pair.differs][:EXAMINED]
    if not differing or any(pair.theirs is not None for pair in pairs):
        return None
    for pair in differing:
        prompts = pair.prompt, reference.raw_text(pair.prompt)
        replies = (_completed(endpoint, prompt, reference.most) for prompt in prompts)
        reply = next((reply for reply in replies if reply and reply.prompt_tokens in (None, len(pair.prompt))), None)
        if not reply or not same(reference, pair.ids, reply):
            return None
    return Cause(TEMPLATE, f"given the run's prompts, the server answers {_examples(differing)} as the run does", fix)


def _weights(reference: Reference, differing: Sequence[tuple[Pair, Reply]]) -> Cause | None:
    """A missing adapter as the cause, if most of these answers equal those of the base model alone; else None."""
    if not hasattr(reference.model, "disable_adapter"):
        return None
    with reference.model.disable_adapter():
        answers = [reference.continued(pair.prompt, reference.most) for pair, _ in differing]
    untrained = [ids for ids, (_, reply) in zip(answers, differing, strict=True) if same(reference, ids, reply)]
    if len(untrained) * 2 <= len(differing):
        return None
    evidence = f"{len(untrained)} of {len(differing)} differing answers are those of the model before training"
    fix = "serve the adapter (vLLM: --enable-lora --lora-modules NAME=FOLDER, and ask for NAME; llama.cpp: --lora)"
    return Cause(WEIGHTS, evidence, fix)


def _stop(reference: Reference, endpoint: Endpoint, differing: Sequence[tuple[Pair, Reply]]) -> Cause | None:
    """The stop token as the cause, if a server's answer begins with the run's whole answer and goes on; else None. The
    server must give the same answer twice: a server that samples would not."""
    for pair, reply in differing:
        own, served = reference.text(pair.ids).strip(), reply.text.strip()
        rest = served.removeprefix(own)
        goes_on = own and pair.ids[-1] in reference.ends and rest not in ("", served)
        if not goes_on or ask(reference, endpoint, pair).text.strip() != served:
            continue
        behind = reference.text(reference.continued([*pair.prompt, *pair.ids], 8)).strip()
        if reply.finish == "length" or (behind and rest.strip().startswith(behind[: len(rest.strip())])):
            mark = reference.raw_text(pair.ids[-1:])
            what = f"the server's answer continues after {mark!r}, as the run's weights do: {one_line(rest)}"
            evidence = f"example {pair.row.index}: {what}"
            fix = f"let {mark!r} end answers: set eos_token_id in the served generation_config.json, or send `stop`"
            return Cause(STOP, evidence, fix)
    return None


def lead(pairs: Sequence[Pair], metric: str, own: float, served: float) -> Cause | None:
    """A cause that names the template, if the server's answers are equal but the texts it returns score differently;
    else None."""
    if not abs(own - served) > 1e-9 or any(pair.at is not None or not pair.reply for pair in pairs):
        return None
    evidence = f"the same answers have {metric} {own:.4g} here and {served:.4g} as the server returns them: the header "
    evidence += "that the template writes before answers is learnt with them, and the server returns it"
    return Cause(TEMPLATE, evidence, "train with a template that ends prompts with the header if add_generation_prompt")


def _examples(pairs: Sequence[Pair]) -> str:
    return f"{len(pairs)} {'example' if len(pairs) == 1 else 'examples'}"
