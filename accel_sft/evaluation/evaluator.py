"""Evaluates a model: validation loss, generated answers and the task's metrics, each example counted once.

The model is in memory, or is served by an OpenAI-compatible endpoint, which applies its own chat template.
"""

import contextlib
import dataclasses
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError, first_line
from accel_sft.api.task import Task
from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.batching.device_memory import forwards_alone, in_halves, out_of_memory
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.chat.answer_text import AnswerText, without_thinking
from accel_sft.chat.conversation import Conversation, conversation, read_split, wanted
from accel_sft.chat.encoded import Encoded
from accel_sft.chat.rendering import Rendering
from accel_sft.evaluation.endpoint import Endpoint, Reply
from accel_sft.evaluation.scoring import EVAL_LOSS, PERPLEXITY, UNANSWERED, aggregated, check_scoring, scored
from accel_sft.io.heartbeat import heartbeat
from accel_sft.launch.collectives import by_each_rank, decided_by_main, gather_numbers, largest
from accel_sft.launch.groups import row_groups
from accel_sft.tracking.system import reset_peak_memory

UNUSUAL = {
    "length": "cut (raise --max-new-tokens)",
    "content_filter": "withheld by the server's filter",
    "tool_calls": "tool calls",
    "empty": "empty",
}
"""Maps the reason why an answer is not a whole text (a server's `finish_reason`, or `empty`) to a warning's words."""


class Generated(NamedTuple):
    """Answers of one rank."""

    answers: list[tuple[Encoded, Any]]
    """This rank's share of the examples, each with its answer: a list of token ids, the end-of-turn token included, or
    a server's Reply without thinking."""
    seconds: float
    """Seconds of generating, without loading and checks."""
    peaks: dict[str, float]
    """Peak memory of generating in GiB, by the names of `tracking.system.peak_memory_gib`."""


AnswerBackend = Callable[[Sequence[Encoded], int], Generated]
"""Generates greedy answers, given examples and the maximum number of tokens of an answer, with its end-of-turn token.
Every rank calls it with the same examples; together the ranks answer each example once."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation, the same on every rank."""

    metrics: dict[str, float]
    """The task's metrics, `eval_loss`, and the seconds, speed and peak memory of generating. If the main metric is
    `eval_loss` or `perplexity`, no answers are generated, and only `eval_loss` (and `perplexity`) is here."""
    samples: list[dict[str, Any]]
    """Index, prompt, expected, generated and scores of each example; empty if none was answered."""
    unusual: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Number of answers that are cut, empty or the like, by the keys of UNUSUAL."""

    @property
    def lines(self) -> list[str]:
        """A warning (in a list) that counts the answers that are cut, empty or the like; [] if there are none."""
        named = ", ".join(f"{self.unusual[key]:,} {what}" for key, what in UNUSUAL.items() if self.unusual.get(key))
        line = f"warning: some of the {len(self.samples):,} answers are unusual: {named}. All are scored as they are"
        return [line] if named else []


@dataclasses.dataclass
class Evaluator:
    """Evaluates a model, sharded or not, on any number of ranks. It draws no random numbers.

    Attributes:
        tokenizer: the model's tokenizer; None if the backend returns texts in place of token ids.
        encoded: tokenized rows of at most `--eval-limit` examples; `index` is the example's index in `examples`.
        answered: the last row of each example. Only that row's last answer is generated and scored.
        max_new_tokens: maximum number of tokens of an answer if `--max-new-tokens` is not given; None: the number of
            tokens of the longest expected answer, its end-of-turn token included.
        blank: passed to `Batching.batch` for the validation loss.
        further: computes further metrics of the model, such as those of pairs.
    """

    accelerator: Accelerator
    tokenizer: Any
    task: Task
    examples: Sequence[Any]
    encoded: Sequence[Encoded]
    config: TrainConfig
    backend: AnswerBackend
    max_new_tokens: int | None = None
    blank: Encoded | None = None
    answered: Sequence[Encoded] = dataclasses.field(init=False)
    further: Callable[[torch.nn.Module, Batching], dict[str, float]] = lambda model, batching: {}

    def __post_init__(self) -> None:
        config = self.config
        if self.tokenizer is not None:
            rendering = Rendering(self.tokenizer, config.thinking, config.template_date, config.control_tokens)
            self.answer_text = AnswerText(rendering)
        self.encoded = evaluated_rows(self.encoded, config.eval_limit)
        self.answered = list({row.index: row for row in self.encoded}.values())

    def __call__(self, model: torch.nn.Module, batching: Batching) -> Evaluation:
        """Run `loss`, then `score_answers`, in eval mode."""
        was_training = model.training
        model.eval()
        try:
            return self.score_answers(self.loss(model, batching) | self.further(model, batching))
        finally:
            model.train(was_training)

    def loss(self, model: torch.nn.Module, batching: Batching) -> dict[str, float]:
        """Return `eval_loss`, in nats per supervised token, over all ranks. The model must be in eval mode; `batching`
        divides the rows among the ranks and into forwards."""
        reset_peak_memory(self.accelerator.device)
        ranks, rank = row_groups(self.accelerator)  # ranks of one group compute the same rows, and all count them
        sums = [0.0, 0.0]  # of losses and of supervised tokens

        def nll(rows: list[Encoded]) -> list[float]:
            pad, device = self.tokenizer.pad_token_id, self.accelerator.device
            return [nll_sum(model, batching.batch(rows, pad, device, self.blank)).item()]

        with torch.no_grad(), out_of_memory_explained("--max-length, or in training --micro-batch-size"):
            for rows in batching.divide(self.encoded, ranks)[rank]:
                sums[0] += sum(in_halves(nll, rows, alone=forwards_alone(self.accelerator)))
                sums[1] += sum(row.supervised_tokens for row in rows)
            loss, tokens = map(sum, zip(*gather_numbers(sums), strict=True))
        return {EVAL_LOSS: loss / tokens}

    def score_answers(self, losses: dict[str, float]) -> Evaluation:
        """Generate a greedy answer to each example, score it on the rank that generated it, and give every rank all
        samples. Generate nothing if the main metric is the loss or its perplexity. `losses` is what `loss` returned."""
        if self.task.main_metric in UNANSWERED:
            perplexity = torch.tensor(losses[EVAL_LOSS], dtype=torch.float64).exp().item()  # may be infinite
            return Evaluation(losses | ({PERPLEXITY: perplexity} if self.task.main_metric == PERPLEXITY else {}), [])
        longest_answer = max(row.answer_tokens for row in self.answered)
        most = self.config.max_new_tokens or self.max_new_tokens or longest_answer
        with torch.no_grad(), out_of_memory_explained("--eval-batch-size or --max-new-tokens"):
            generated = self.backend(self.answered, most)
        costs = largest({"seconds": generated.seconds, **generated.peaks}, "generate_")
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # restores the grad mode if the task's code changes it
            every = by_each_rank(lambda: [self._sample(*answer, most) for answer in generated.answers])
            samples = sorted(itertools.chain.from_iterable(every), key=lambda sample: sample["index"])
            # rank 0 aggregates for all ranks, so that they have the same numbers
            metrics = decided_by_main(
                self.accelerator, lambda: aggregated(self.task, [sample["scores"] for sample in samples])
            )
        assert [s["index"] for s in samples] == sorted(e.index for e in self.answered), "an example was lost or doubled"
        tokens = sum(sample.pop("tokens") for sample in samples)
        speed = {
            "generate_tokens_per_second": tokens / costs["generate_seconds"],
            "seconds_per_answer": costs["generate_seconds"] / len(samples),
        }
        unusual = Counter(filter(None, [sample.pop("unusual") for sample in samples]))
        return Evaluation({**metrics, **losses, **costs, **speed}, samples, unusual)

    def _sample(self, encoded: Encoded, answer: list[int] | Reply, most: int) -> dict[str, Any]:
        heartbeat()
        chat = conversation(self.task, self.examples, "validation", encoded.index)
        if isinstance(answer, Reply):
            text, expected, tokens = answer.text, wanted(chat, self.config.thinking), answer.tokens or 0
            unusual = answer.finish if answer.finish in UNUSUAL else "" if text.strip() else "empty"
        else:
            text, expected, tokens = self.answer_text(chat, answer), self.answer_text.expected(chat), len(answer)
            ended = tokens < most or answer[-1] in (encoded.input_ids[-1], self.tokenizer.eos_token_id)
            unusual = "" if ended else "length"
        return {
            "index": encoded.index,
            "prompt": chat.shown_prompt,
            "expected": expected,
            "generated": text,
            "scores": scored(self.task, self.examples, encoded.index, text),
            "tokens": tokens,
            "unusual": unusual,
        }


def evaluated_rows(rows: Sequence[Encoded], limit: int | None) -> list[Encoded]:
    """All rows of at most `limit` examples, drawn at random, as files are often sorted; each call draws the same."""
    every = list(rows[:])
    if limit is None:
        return every
    indices = sorted({row.index for row in every})
    drawn = {*random.Random(0).sample(indices, min(limit, len(indices)))}
    return [row for row in every if row.index in drawn]


@contextlib.contextmanager
def out_of_memory_explained(options: str) -> Iterator[None]:
    """Turn an out-of-memory error into a UserError that says to lower these options."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise UserError(f"evaluation: out of device memory ({first_line(error)[:100]}); lower {options}") from error


def refuse_beyond_text(chats: Sequence[Conversation]) -> None:
    """Raise UserError if an example cannot be sent to a server, because it has images or tool calls, for example."""
    for index, chat in enumerate(chats):
        if chat.images or chat.calls or chat.variables or not chat.turns:
            extras = "images, tool calls, chat_template_kwargs or raw text"
            raise UserError(f"--url: validation example {index} has {extras}; a server can be sent only chats of text")


def problems_of_served(task: Task) -> list[str]:
    """A message (in a list) if the task's main metric does not score answers; otherwise []."""
    if task.main_metric not in UNANSWERED:
        return []
    return [f"--url: a server cannot return the task's metric {task.main_metric}; choose a metric that scores answers"]


def evaluate_served(accelerator: Accelerator, task: Task, config: EvaluateConfig, endpoint: Endpoint) -> Evaluation:
    """Score the server's answers to the validation examples, in the same way as answers of a model in memory."""
    dataset = read_split(task, "validation")
    check_scoring(task, dataset, config.thinking)

    def backend(examples: Sequence[Encoded], max_new_tokens: int) -> Generated:
        chats = [conversation(task, dataset, "validation", row.index) for row in examples]
        refuse_beyond_text(chats)
        began = time.perf_counter()

        def ask(chat: Conversation) -> Reply:
            return endpoint.chat(chat.turns, max_new_tokens, chat.tools, config.thinking)

        replies = endpoint.call_all(f"{endpoint.model} answers", ask, chats)
        seconds = time.perf_counter() - began
        texts = [
            dataclasses.replace(reply, text=without_thinking(reply.text, wanted(chat, config.thinking)))
            for chat, reply in zip(chats, replies, strict=True)
        ]
        return Generated(list(zip(examples, texts, strict=True)), seconds, {})

    rows = [Encoded(index, [], 0) for index in range(len(dataset))]  # the server tokenizes
    return Evaluator(accelerator, None, task, dataset, rows, config, backend).score_answers({})
