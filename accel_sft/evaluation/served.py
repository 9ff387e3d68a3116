"""Evaluates the model behind an OpenAI-compatible endpoint by a task, as its users get answers: by its template."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.chat.answer_text import without_thinking
from accel_sft.chat.conversation import Conversation, conversation, read_split, wanted
from accel_sft.chat.encoded import Encoded
from accel_sft.evaluation.endpoint import Endpoint, Reply
from accel_sft.evaluation.evaluator import UNUSUAL, AnswerInText, Evaluation, Evaluator, Generated
from accel_sft.evaluation.scoring import UNANSWERED, check_scoring


@dataclasses.dataclass(frozen=True)
class ServedBackend:
    """Answers the examples of a task by a server, as its users get answers."""

    endpoint: Endpoint
    task: Task
    examples: Sequence[Any]
    thinking: str | None

    def __call__(self, examples: Sequence[Encoded], max_new_tokens: int) -> Generated:
        """Ask for an answer of at most `max_new_tokens` tokens to each example."""
        chats = [conversation(self.task, self.examples, "validation", example.index) for example in examples]
        refuse_beyond_text(chats)
        began = time.perf_counter()

        def ask(chat: Conversation) -> Reply:
            return self.endpoint.chat(chat.turns, max_new_tokens, chat.tools, self.thinking)

        replies = self.endpoint.call_all(f"{self.endpoint.model} answers", ask, chats)
        seconds = time.perf_counter() - began
        texts = []
        for chat, reply in zip(chats, replies, strict=True):
            text = without_thinking(reply.text, wanted(chat, self.thinking))
            unusual = reply.finish if reply.finish in UNUSUAL else "" if text.strip() else "empty"
            texts.append(AnswerInText(text, reply.tokens or 0, unusual))
        return Generated(list(zip(examples, texts, strict=True)), seconds, {})


def refuse_beyond_text(chats: Sequence[Conversation]) -> None:
    """Raise UserError for what a server is not asked: images, answers that call tools, and raw text."""
    for index, chat in enumerate(chats):
        beyond = {"has images": chat.images, "is answered by calling a tool": chat.calls, "is raw text": not chat.turns}
        beyond["sets chat_template_kwargs"] = chat.variables
        if what := next((what for what, holds in beyond.items() if holds), None):
            raise UserError(f"--url: validation example {index} {what}; a server is asked for texts only")


def problems(task: Task) -> list[str]:
    """A line if the task's metric is none of answers."""
    if task.main_metric not in UNANSWERED:
        return []
    return [f"--url: the task's metric is {task.main_metric}, which servers do not return; choose a metric of answers"]


def evaluate(accelerator: Accelerator, task: Task, config: EvaluateConfig, endpoint: Endpoint) -> Evaluation:
    """Score the server's answers to the validation examples, as a model's are scored."""
    examples = read_split(task, "validation")
    check_scoring(task, examples, config.thinking)
    rows = [Encoded(index, [], 0) for index in range(len(examples))]  # the server tokenizes
    backend = ServedBackend(endpoint, task, examples, config.thinking)
    return Evaluator(accelerator, None, task, examples, rows, config, backend).score_answers({})
