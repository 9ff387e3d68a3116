"""Asks the run's own weights and the server the same, and finds where the answers differ."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.chat.answer_text import without_thinking
from accel_sft.chat.conversation import Conversation, conversation
from accel_sft.chat.encoded import Encoded, end_of_turn_ids
from accel_sft.evaluation.endpoint import Endpoint, EndpointError, Reply
from accel_sft.evaluation.evaluator import Evaluation, Evaluator, Generated
from accel_sft.evaluation.left_padded import generate
from accel_sft.evaluation.served import refuse_beyond_text
from accel_sft.models.architecture import arguments
from accel_sft.models.load import load_model
from accel_sft.models.source import Source, as_it_began, began_with, find_source

TIE = 0.25
"""Nats between two tokens, up to which rounding may exchange them: two steps of a bfloat16 logit between 16 and 32."""


@dataclasses.dataclass(frozen=True)
class _Given:
    """A backend whose answers are there already, by the example's index."""

    answers: Mapping[int, list[int]]

    def __call__(self, examples: Sequence[Encoded], max_new_tokens: int) -> Generated:
        return Generated([(example, self.answers[example.index]) for example in examples], 1.0, {})


class Reference:
    """What the run's weights say to the first validation examples.

    Args:
        evaluator: the evaluator of these weights.
        most: the largest number of an answer's tokens.
        record: the run's.
    Attributes:
        answers: the greedy answers by the example's index, each with the token that ends it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        evaluator: Evaluator,
        model: Any,
        source: Source,
        record: Mapping[str, Any],
        config: EvaluateConfig,
        most: int,
    ) -> None:
        self.evaluator, self.model, self.source, self.record = evaluator, model, source, record
        self.accelerator, self.config, self.most = accelerator, config, most
        self.tokenizer = evaluator.tokenizer
        self.ends = end_of_turn_ids(self.tokenizer, model.generation_config)
        self.rows = evaluator.answered
        with torch.no_grad():
            self.answers = {row.index: ids for row, ids in evaluator.backend(self.rows, most).answers}

    def scored(self, answers: Mapping[int, list[int]]) -> Evaluation:
        """The task's metrics of these answers, by the example's index."""
        return dataclasses.replace(self.evaluator, backend=_Given(answers)).score_answers({})

    def text(self, ids: Sequence[int]) -> str:
        """The text of an answer as servers write it: without special tokens, and without its end."""
        content = [*ids[:-1]] if ids and ids[-1] in self.ends else [*ids]
        return self.tokenizer.decode(content, skip_special_tokens=True)

    def ids(self, text: str, *, ended: bool) -> list[int]:
        """The token ids of a server's answer; if it ended, with the token that ends answers."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id] if ended else ids

    def log_probs(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """The log-probabilities of every token at each place of the answer, and at the place behind it."""
        ids = torch.tensor([[*prompt, *answer]], device=self.model.device)
        places = len(answer) + 1
        last_places = {"logits_to_keep": places} if "logits_to_keep" in arguments(self.model) else {}
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False, **last_places).logits[0, -places:]
        return logits.float().log_softmax(-1).cpu()

    def continued(self, prompt: list[int], tokens: int, model: Any = None) -> list[int]:
        """The greedy continuation of a prompt, up to the token that ends an answer."""
        model, pad = self.model if model is None else model, self.tokenizer.pad_token_id
        with torch.no_grad():
            return generate(model, [prompt], tokens, self.ends, pad, model.device)[0]

    @contextlib.contextmanager
    def base(self) -> Iterator[Any]:
        """What the run began with: the same model without its adapter, or the weights that were trained."""
        if hasattr(self.model, "disable_adapter"):
            with self.model.disable_adapter():
                yield self.model
            return
        source = as_it_began(find_source(began_with(self.source, self.record)), self.source, self.record)
        precision = self.accelerator.mixed_precision
        base = load_model(source, self.config, tokenizer=self.tokenizer, precision=precision, deepspeed=False)
        yield base.to(self.accelerator.device).eval()


@dataclasses.dataclass
class Pair:
    """An example with the answer of the run's weights and the server's.

    Attributes:
        prompt: the ids of the prompt as it was trained.
        ids: the answer of the run's weights.
        reply: the server's; None if it refused to answer.
        refusal: why it refused.
        theirs: the ids that the server makes of the prompt, None if it does not tell.
        at: the place of the first token that differs; None if the answers are the same.
        gap: by how many nats the run's weights prefer their own token there.
        off: differences of the log-probabilities of the tokens before that place.
    """

    chat: Conversation
    row: Encoded
    ids: list[int]
    reply: Reply | None = None
    refusal: str = ""
    theirs: list[int] | None = None
    at: int | None = None
    gap: float = 0.0
    off: Sequence[float] = ()

    @property
    def prompt(self) -> list[int]:
        return self.row.input_ids[: self.row.prompt_length]

    @property
    def differs(self) -> bool:
        """Whether the answers differ by more than rounding explains."""
        return self.reply is None or (self.at is not None and self.gap > TIE)

    @property
    def tied(self) -> bool:
        return self.at is not None and not self.differs

    @property
    def read(self) -> int | None:
        """The number of the prompt's tokens that the server counted; None if it does not tell."""
        return self.reply.prompt_tokens if self.reply else None

    @property
    def misread(self) -> bool:
        """Whether the server's prompt is known to have other tokens, or another number of them."""
        return self.theirs not in (None, self.prompt) or self.read not in (None, len(self.prompt))


def compare(reference: Reference, endpoint: Endpoint) -> list[Pair]:
    """Ask for all examples' answers and compare them.

    Raises:
        UserError: an example is not text alone; or the server refuses them all, or stays silent.
    """
    evaluator, thinking = reference.evaluator, reference.config.thinking
    chat = functools.partial(conversation, evaluator.task, evaluator.examples, "validation")
    pairs = [Pair(chat(row.index), row, reference.answers[row.index]) for row in reference.rows]
    refuse_beyond_text([pair.chat for pair in pairs])

    def ask(pair: Pair) -> None:
        try:
            reply = endpoint.chat(pair.chat.turns, reference.most, pair.chat.tools, thinking)
            pair.reply = dataclasses.replace(reply, text=with_thinking(reply.text, reference.text(pair.ids)))
        except EndpointError as error:
            if error.status not in (400, 413, 422):
                raise
            pair.refusal = str(error)
        pair.theirs = endpoint.chat_tokens(pair.chat.turns, pair.chat.tools, thinking)

    endpoint.each(f"{endpoint.model} answers", ask, pairs)
    if not any(pair.reply for pair in pairs):
        raise EndpointError(pairs[0].refusal)
    for pair in pairs:
        if pair.reply:
            pair.at, pair.gap, pair.off = difference(reference, pair, pair.reply)
    return pairs


def with_thinking(served: str, own: str) -> str:
    """A server's answer, with the thinking that the run's own answer begins with if the server has left it out.

    llama.cpp's server and vLLM's reasoning parsers do; an empty block, as Qwen3's template writes it, is then nowhere.
    """
    if "<think>" not in own or "<think>" in served:
        return served
    return own.removesuffix(without_thinking(own, "").lstrip()) + served.lstrip()


def difference(reference: Reference, pair: Pair, reply: Reply) -> tuple[int | None, float, list[float]]:
    """`at`, `gap` and `off` of a Pair, for a reply to the same prompt."""
    values = reference.log_probs(pair.prompt, pair.ids[:-1])
    own = [float(values[at, token]) for at, token in enumerate(pair.ids)]
    at = None if same(reference, pair.ids, reply) else _first(reference, pair.ids, reply)
    until = len(pair.ids) if at is None else at
    off = [abs(mine - theirs) for mine, (_, theirs) in zip(own[:until], reply.logprobs, strict=False)]
    if at is None or at >= len(pair.ids):
        return at, 0.0 if at is None else float("inf"), off
    token = _token_at(reference, pair.ids, at, reply)
    gap = float("inf") if token == pair.ids[at] else own[at] - float(values[at, token])  # inf: it ended the answer here
    return at, gap, off


def same(reference: Reference, ids: list[int], reply: Reply) -> bool:
    """Whether a reply is this answer; blanks at its ends do not count, since some servers take them away.

    Where the token that ends an answer is the last that is asked for, some servers say that its length ended it.
    """
    ended = bool(ids) and ids[-1] in reference.ends
    own, served = (text.strip().rstrip("\ufffd") for text in (reference.text(ids), reply.text))  # a cut character
    return own == served and (ended == (reply.finish != "length") or (ended and len(ids) == reference.most))


def _first(reference: Reference, ids: list[int], reply: Reply) -> int:
    """The place of the first of the ids that is not in the reply."""
    served = reply.text.lstrip()
    for at in range(len(ids)):
        if not served.startswith(reference.text(ids[: at + 1]).lstrip().rstrip("\ufffd")):  # a part of a character
            return at
    ended = bool(ids) and ids[-1] in reference.ends
    return len(ids) - 1 if ended else len(ids)


def _token_at(reference: Reference, ids: list[int], at: int, reply: Reply) -> int:
    """The token that the reply has in place of `ids[at]`: what the server calls it, else what its text begins with."""
    eos = reference.tokenizer.eos_token_id
    if len(reply.logprobs) > at and (word := reply.logprobs[at][0]):
        tokens = reference.ids(word, ended=False)
        if len(tokens) == 1:
            return tokens[0]
    rest = reply.text.lstrip()[len(reference.text(ids[:at]).lstrip()) :]
    return (reference.ids(rest, ended=False) or [eos])[0]
