"""Answers conversations outside of tasks. The model, its tokenizer and its chat template are used as in training."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from transformers import TextStreamer

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.chat.answer_text import AnswerText
from accel_sft.chat.conversation import Tools, Turns, no_text
from accel_sft.chat.encoded import Encoded, end_of_turn_ids
from accel_sft.chat.image_inputs import GivenImages, ImageInputs, RowImages
from accel_sft.chat.pictures import Picture
from accel_sft.chat.rendering import Rendering
from accel_sft.evaluation.generate import GREEDY, Generator, Sampling
from accel_sft.models.load import load_model
from accel_sft.models.pretrained import vocabulary_problem
from accel_sft.models.source import Source
from accel_sft.models.tokenizer import GivenTemplate, left_out, load_processor, load_tokenizer


class Prompt(NamedTuple):
    """A conversation to be answered; in the contents of its turns, a mark stands for each image."""

    turns: Turns
    images: tuple[Picture, ...] = ()
    tools: Tools = None


class Answer(NamedTuple):
    """A model's answer, without its thinking and without the text that the chat template writes around answers."""

    text: str
    tokens: int
    """Number of generated tokens, the end-of-turn token included."""
    ended: bool
    """Whether the model ended the answer; if not, the answer is truncated."""


class Answerer:
    """A loaded model that answers many conversations together, or one conversation token by token. It runs in one
    process. With `raw`, for a model trained on raw text, the last turn's text is continued without a template."""

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainConfig,
        source: Source,
        sampling: Sampling = GREEDY,
        *,
        images: bool = False,
        raw: bool = False,
        offload: str | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name, self.raw = source.adapter or source.weights, raw
        given = GivenTemplate(config.chat_template, config.trust_remote_code) if config.chat_template else None
        how: dict[str, Any] = {"trust_remote_code": config.trust_remote_code, "templated": not raw}
        self.tokenizer = load_tokenizer(source, given=given, **how)
        self.rendering = Rendering(self.tokenizer, config.thinking, config.template_date, config.control_tokens)
        self.answer_text = AnswerText(self.rendering)
        self.weights = source.weights
        load = functools.partial(load_processor, source, model=self.name, trust_remote_code=config.trust_remote_code)
        self.images = ImageInputs(load)
        if images:
            _ = self.images.processor  # raises at once if the model reads no images
        how = {"precision": accelerator.mixed_precision, "deepspeed": False, "images": images}
        how |= {"largest_id": self.tokenizer.pad_token_id, "tokenizer": self.tokenizer}
        model = load_model(source, config, offload=offload, log=log, **how)
        self.settings = model.config.get_text_config(decoder=True)
        self.model = (model if offload else model.to(accelerator.device)).eval()
        self.ends = end_of_turn_ids(self.tokenizer, self.model.generation_config)
        self.generator = Generator(accelerator, self.tokenizer, self.model, config.eval_batch_size, sampling=sampling)

    @property
    def notes(self) -> list[str]:
        """Lines about text that is added to what the chat template writes, and about penalties that are not applied."""
        penalties = left_out(self.model.generation_config)
        if self.generator.sampling.repetition_penalty != GREEDY.repetition_penalty:
            penalties.pop("repetition_penalty", None)
        names = ", ".join(penalties)
        line = f"the penalties of generation_config.json ({names}) are not applied, as in the run's evaluations"
        return [*self.rendering.notes, *([line] if penalties else [])]

    def encode(self, prompt: Prompt, max_new_tokens: int, index: int = 0) -> Encoded:
        """Tokenize a prompt as in training, and append one end-of-turn token."""
        images = prompt.images
        if self.raw:
            ids = [*self.rendering.begin, *self.rendering.text_ids(prompt.turns[-1]["content"])]
        else:
            text = self.rendering.prompt(prompt.turns, images, prompt.tools)
            (ids,) = self.rendering.control.ids([self.images.prompt(images, text, "prompt") if images else text])
        if not ids:
            raise UserError("prompt: it has no tokens; write a text, or check the chat template")
        if problem := vocabulary_problem(self.weights, self.settings, max(ids)):
            raise UserError(problem)
        longest = getattr(self.settings, "max_position_embeddings", None)
        if isinstance(longest, int) and len(ids) + max_new_tokens > longest:
            tokens = f"{len(ids):,} tokens plus --max-new-tokens {max_new_tokens:,}"
            raise UserError(
                f"prompt: {tokens} exceed the model's limit of {longest:,}; shorten the prompt or the answer"
            )
        given = RowImages(index, len(images), b"", GivenImages(self.images, images, "prompt")) if images else None
        return Encoded(index, [*ids, min(self.ends)], len(ids), images=given)

    def answers(self, prompts: Sequence[Prompt], max_new_tokens: int, names: Sequence[str] = ()) -> list[Answer]:
        """Return the answers, in the prompts' order. UserError has a line for each bad prompt, with its name."""
        encoded, problems = [], []
        for index, prompt in enumerate(prompts):
            try:
                encoded.append(self.encode(prompt, max_new_tokens, index))
            except UserError as error:
                problems += [f"{names[index]}: {line}" if names else line for line in error.problems]
        if problems:
            raise UserError(*problems)
        with torch.no_grad():
            generated = self.generator(encoded, max_new_tokens)
        ids = {example.index: ids for example, ids in generated.answers}
        return [self._answer(prompt.turns, ids[index], prompt.tools) for index, prompt in enumerate(prompts)]

    def stream(self, turns: Turns, max_new_tokens: int, write: Callable[[str], None]) -> Answer:
        """Answer one conversation; the text, thinking included, goes to `write` as it is generated. KeyboardInterrupt
        ends the answer."""
        prompt = self.encode(Prompt(turns), max_new_tokens).input_ids[:-1]
        streamer = _Streamer(self.tokenizer, write)
        try:
            self.generator.stream(prompt, max_new_tokens, streamer)
        except KeyboardInterrupt:
            streamer.end()
        return self._answer(turns, streamer.ids)

    def _answer(self, turns: Turns, ids: Sequence[int], tools: Tools = None) -> Answer:
        decode = self.tokenizer.decode
        text = decode(ids, skip_special_tokens=True) if self.raw else self.answer_text.of_reply(turns, ids, tools)
        return Answer(text, len(ids), bool(ids) and ids[-1] in self.ends)


class _Streamer(TextStreamer):
    """Passes text on as soon as a word is complete, and collects the token ids of the answer."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.ids += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)


def expected_of(turns: Any) -> str | None:
    """None if `turns` is a conversation that can be answered; otherwise a phrase that says what was expected."""
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        return 'a list of {"role": ..., "content": ...}'
    if any(no_text(json.dumps(turn, ensure_ascii=False)) for turn in turns):
        return "UTF-8 text without lone surrogates and without U+E008 to U+E00B"
    if turns[-1].get("role") == "assistant":
        return "a last turn whose role is not assistant"
    return None
