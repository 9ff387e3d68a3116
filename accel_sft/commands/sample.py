"""The command `sample`: answers sampled to a task's training prompts, scored by the task, as rows to fine-tune on."""

import itertools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.api.task_file import recorded_name
from accel_sft.api.tool_configs import SampleConfig
from accel_sft.chat.answer_text import AnswerText, without_thinking
from accel_sft.chat.conversation import Conversation, conversation, read_split, wanted
from accel_sft.chat.encoded import Encoded
from accel_sft.commands.evaluate import load, opened, reached, release, tell
from accel_sft.commands.export_data import chat_row
from accel_sft.evaluation.evaluator import UNUSUAL, evaluated_rows, out_of_memory_explained
from accel_sft.evaluation.sampling import Sampler, uniform
from accel_sft.evaluation.scoring import UNANSWERED, aggregated, check_scoring, scored
from accel_sft.io import terminal
from accel_sft.io.files import expanded, write_json_lines
from accel_sft.io.heartbeat import heartbeat, heartbeats_only
from accel_sft.launch.collectives import by_each_rank, decided_by_main
from accel_sft.models.source import other_base
from accel_sft.rows.rows import example_name
from accel_sft.training.prepare import Assembly


class Answer(NamedTuple):
    """A sampled answer to a training example, with its log-probability in nats; `whole` if it ended by itself, `usable`
    if it may be learnt from. `value` is the main metric of this answer's score alone; larger is better."""

    example: int
    text: str
    whole: bool
    likelihood: float
    score: dict[str, Any]
    value: float

    @property
    def usable(self) -> bool:
        return self.whole and bool(self.text.strip()) and "\ufffd" not in self.text  # of tokens that are no UTF-8

    @property
    def turn(self) -> dict[str, Any]:
        return {"role": "assistant", "content": self.text}


def command(task_name: str, task: Task, config: SampleConfig) -> None:
    """Sample answers of `--model` on all ranks of a launch, or of the server at `--url`, into the new file OUT."""
    if task.main_metric in UNANSWERED:
        raise UserError(f"sample: the task's metric {task.main_metric} scores no answers; choose one that does")
    out = expanded(click.get_current_context().params["out"], "OUT")
    if config.url:
        return _served(task, config, out)
    with opened(recorded_name(task_name), task, config) as (accelerator, launch, _, config, sources):
        decided_by_main(accelerator, lambda: _check(out))
        if config.dry_run:
            return
        examples = read_split(task, "train")
        with terminal.quiet(None, config.debug):
            assembly = Assembly(accelerator, task, config, sources["model"])
            encoding = assembly.encode(examples, "train")
            last = {row.index: row for row in encoding.kept}  # of an example, only the last answer is sampled
            notes = [*(f"warning: {line}" for line in other_base(sources["model"])), *encoding.lines()]
            usable = decided_by_main(accelerator, lambda: _usable(task, examples, config, [*last.values()], *notes))
            loaded, model = load(accelerator, launch, assembly, encoding, config.offload)
            model.eval()
            size, shards = config.eval_batch_size, launch.shards_weights
            sampler = Sampler(accelerator, assembly.tokenizer, model, size, log=tell, sharded=shards)
            text_of, most = AnswerText(assembly.encode.rendering), config.max_new_tokens or encoding.kept.answers.max()

            def score(row: Encoded, number: int, ids: list[int], likelihood: float) -> Answer:
                text = text_of(conversation(task, examples, "train", row.index), ids)
                return _scored(task, examples, row.index, text, ids[-1] in sampler.ends(), likelihood)

            with heartbeats_only():
                with torch.no_grad(), out_of_memory_explained("--eval-batch-size or --max-new-tokens"):
                    samples = sampler.sample([last[index] for index in usable], int(most), config)
                samples.sort(key=lambda sample: (sample[0].index, sample[1]))
                every = itertools.chain.from_iterable(by_each_rank(lambda: [score(*sample) for sample in samples]))
            release(accelerator, loaded)
        if accelerator.is_main_process:
            _publish(task, examples, config, sorted(every, key=lambda answer: answer.example), out)


def _check(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"OUT {out}: its folder cannot be made ({error.strerror}); name another file") from None
    if out.exists() or not os.access(out.parent, os.W_OK):
        why = "exists" if out.exists() else f"{out.parent} cannot be written"
        raise UserError(f"OUT {out}: {why}; name a new file")


def _served(task: Task, config: SampleConfig, out: Path) -> None:
    endpoint, config = reached(config, "sample")
    _check(out)
    if config.dry_run:
        return
    examples = read_split(task, "train")
    rows = [Encoded(index, [], 0) for index in range(len(examples))]  # the server tokenizes
    chats = {index: conversation(task, examples, "train", index) for index in _usable(task, examples, config, rows)}

    def ask(sample: tuple[int, int]) -> Answer:
        chat, seed = chats[sample[0]], int(uniform(config.seed, *sample, 1)[0] * 2**31)
        sampling = {"temperature": config.temperature, "top_p": config.top_p, "seed": seed}
        reply = endpoint.chat(chat.turns, config.max_new_tokens or 1, chat.tools, config.thinking, **sampling)
        if config.prefer == "likeliest" and not reply.logprobs and reply.text:
            raise UserError("--prefer likeliest: the server gives no log-probabilities; leave the option out")
        text, known = without_thinking(reply.text, wanted(chat, config.thinking)), [one[1] for one in reply.logprobs]
        return _scored(task, examples, sample[0], text, reply.finish not in UNUSUAL, math.fsum(known))

    samples = [*itertools.product(chats, range(config.samples))]
    _publish(task, examples, config, endpoint.call_all(f"{endpoint.model} answers", ask, samples), out)


def _usable(task: Task, examples: Sequence[Any], config: SampleConfig, rows: list[Encoded], *notes: str) -> list[int]:
    """Draw `--rows` examples, and return those whose answers can be sampled; print how many are left out, and why."""
    tell(*notes, *check_scoring(task, examples, config.thinking, "train"))
    validation = read_split(task, "validation")
    chats = (conversation(task, validation, "validation", index) for index in range(len(validation)))
    held_out = {json.dumps(chat.turns, default=str) for chat in chats}
    left_out, usable = dict[str, list[int]](), list[int]()
    for index, *_ in evaluated_rows(rows, config.rows):
        chat = conversation(task, examples, "train", index)
        if chat.images or chat.calls or not chat.turns or (config.url and chat.variables):
            left_out.setdefault("have images, raw text or tool calls, which cannot be sampled", []).append(index)
        elif json.dumps(chat.turns, default=str) in held_out:
            left_out.setdefault("have a prompt of the validation split", []).append(index)
        else:
            usable.append(index)
    for why, left in left_out.items():
        tell(f"left out: {len(left):,} examples {why} (the first: {example_name(examples, 'train', left[0])})")
    if not usable:
        raise UserError("sample: no training example is left to sample; the lines above say why")
    target = wanted(conversation(task, examples, "train", usable[0]), config.thinking)
    _scored(task, examples, usable[0], target, True, 0.0)  # a task that cannot score one answer fails before sampling
    return usable


def _scored(task: Task, examples: Sequence[Any], index: int, text: str, whole: bool, likelihood: float) -> Answer:
    heartbeat()
    score = scored(task, examples, index, text, "train")
    value = aggregated(task, [score])[task.main_metric] * (1 if task.higher_is_better else -1)
    return Answer(index, text, whole, likelihood, score, -math.inf if math.isnan(value) else value)


def kept_rows(chat: Conversation, answers: list[Answer], config: SampleConfig, right: float) -> list[dict[str, Any]]:
    """Return the rows that `--keep` writes for a prompt's distinct answers; those of at least `right` are right."""
    usable = [answer for answer in answers if answer.usable]
    if config.keep == "pairs":
        best = min(usable, key=lambda answer: (-answer.value, len(answer.text)), default=None)
        others = [answer for answer in answers if answer.text.strip() and best and answer.value < best.value]
        worst = min(others, key=lambda answer: (answer.value, len(answer.text)), default=None)
        if not (best and worst):
            return []
        row = chat_row(chat._replace(answer=best.turn, rejected=worst.turn))
        return [row | {"score_chosen": best.score, "score_rejected": worst.score}]
    if config.keep == "best":
        usable.sort(key=lambda answer: -answer.likelihood if config.prefer == "likeliest" else len(answer.text))
        usable = [answer for answer in usable if answer.value >= right][:1]
    return [chat_row(chat._replace(answer=answer.turn, learnt=())) | {"score": answer.score} for answer in usable]


def _publish(task: Task, examples: Sequence[Any], config: SampleConfig, answers: list[Answer], out: Path) -> None:
    right = config.threshold if config.threshold is not None else float(task.higher_is_better)
    right *= 1 if task.higher_is_better else -1
    rows, times, distinct = list[dict[str, Any]](), list[int](), 0
    for index, group in itertools.groupby(answers, key=lambda answer: answer.example):
        of_prompt = sorted(group, key=lambda answer: answer.whole)  # of equal texts, a whole one stands for all
        times.append(sum(answer.usable and answer.value >= right for answer in of_prompt))
        by_text = {answer.text: answer for answer in of_prompt}
        distinct += len(by_text)
        chat = conversation(task, examples, "train", index)._replace(rejected=None)
        rows += kept_rows(chat, [*by_text.values()], config, right)
    never, always = times.count(0) / len(times), times.count(config.samples) / len(times)
    cut = sum(not answer.whole for answer in answers)
    shares = f"{never:.1%} never right, {1 - never - always:.1%} sometimes, {always:.1%} always"
    counts = f"{len(answers) - distinct:,} duplicates, {cut:,} cut" + " (raise --max-new-tokens)" * bool(cut)
    tell(f"sampled   {len(times):,} prompts, {config.samples} answers each: {shares}; {counts}", indent=10)
    if not rows:
        raise UserError(f"OUT {out}: no answer can be kept; train the model further, or see --samples and --threshold")
    write_json_lines(out, rows)
    tell(f"wrote     {len(rows):,} rows to {out}", indent=10)
