"""Loads what turns rows into a model's input: tokenizer, chat template, image processor and end tokens."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError, first_line
from accel_sft.chat.control_tokens import special_tokens
from accel_sft.chat.encoded import Rules, end_of_turn_ids, named_ends
from accel_sft.chat.rendering import Rendering
from accel_sft.chat.template import MARK, no_template
from accel_sft.io.files import expanded, read_json
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.models.pretrained import OR_NONE, text_settings
from accel_sft.models.source import Source, errors_explained
from accel_sft.models.tiny import CHAT_TEMPLATE

CHATML = "chatml"
"""The value of `--chat-template` that stands for the built-in template."""
_CONTROL = re.compile(r"<\|[^<>|\s'\"{}]+\|>")
"""Matches marks that are certainly control tokens, for templates without a tokenizer. Other marks, such as `<think>`,
`[INST]` or `<tools>`, are plain text in some models."""
_TURNS = [{"role": "system", "content": "!"}, {"role": "user", "content": "?"}]
_IDLE = re.compile(r"^- `(\w+)`: ", re.M)
"""Finds the names of settings in transformers' error about settings without effect, raised on saving."""
_PENALTIES = {"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1}
_PENALTIES |= {"encoder_no_repeat_ngram_size": 0, "min_length": 0}
_FORCED = """
    min_new_tokens bad_words_ids suppress_tokens begin_suppress_tokens sequence_bias forced_bos_token_id
    forced_eos_token_id exponential_decay_length_penalty guidance_scale watermarking_config max_time stop_strings
"""
_WITHOUT: dict[str, Any] = {**_PENALTIES, **dict.fromkeys(_FORCED.split())}
"""Generation settings that make answers differ from the most likely tokens, with the values that disable them."""


@dataclasses.dataclass
class GivenTemplate:
    """The chat template that `--chat-template` names: `chatml`, a Jinja file, or the template of a folder or hub id.
    `give` sets `new_tokens` to the ids without trained embeddings, and reports in `lines` what it did."""

    name: str
    trust_remote_code: bool
    new_tokens: list[int] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)

    def give(self, tokenizer: Any) -> None:
        """Put the template into a tokenizer.

        Control tokens of the template become special tokens. In another tokenizer's template, these are the special
        tokens of that tokenizer; in a file, they are marks like `<|im_end|>` and the mark that ends an answer. The
        token that ends an answer becomes the tokenizer's eos. The former eos becomes the pad token if there is none.
        """
        tokenizer.chat_template, their_special = self._read()
        if not tokenizer.chat_template.strip():
            raise self._unusable("it is empty; name another")
        begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        if begins and self.name == CHATML:
            tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
        rendering = Rendering(tokenizer)
        try:
            form = rendering.form(_TURNS, "a conversation")
            written = rendering.template.text(form.with_answer(_TURNS, "!"), "a conversation", prompt=False)
            written += rendering.template.text(form.given(_TURNS), "a conversation", prompt=True)
        except UserError as error:
            raise self._unusable(_failure(error)) from error
        if form.drops_answer:
            raise self._unusable("it does not write the assistant's answers; is it a chat template in Jinja?")
        if begins and not written.startswith(tokenizer.bos_token):
            problem = f"the base model's texts begin with {tokenizer.bos_token}, but the template's do not"
            self.lines.append(f"warning: --chat-template {self.name}: {problem}; begin it with {{{{ bos_token }}}}")
        # a template may assemble a mark from parts, such as '<|' + role + '|>', so its output is searched, too
        searched = f"{tokenizer.chat_template}\n{written}"
        marks = (their_special or _CONTROL).findall(searched)
        if not their_special:
            marks += MARK.findall(form.tail)[:1]
        special = special_tokens(tokenizer)
        new = [mark for mark in dict.fromkeys(marks) if not special.fullmatch(mark)]
        before = tokenizer.get_vocab()
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in new], special_tokens=True)
        self.new_tokens = [tokenizer.convert_tokens_to_ids(mark) for mark in new if mark not in before]
        answer_end = f"{tokenizer.eos_token} is added after answers, as the template has no end token"
        if end := special_tokens(tokenizer).search(form.tail):
            tokenizer.eos_token = end[0]
            answer_end = f"answers end with {end[0]}, at which generation stops"
        control = "the tokenizer has all control tokens of the template"
        if new:
            control = f"{', '.join(new)} become special tokens, and the template's other marks stay text"
        self.lines.append(f"--chat-template {self.name}: {control}; {answer_end}")

    def _read(self) -> tuple[str, re.Pattern[str] | None]:
        """Return the template's text and, if a tokenizer comes with it, a pattern of the tokenizer's special tokens."""
        if self.name == CHATML:
            return CHAT_TEMPLATE, None
        path = expanded(self.name, "--chat-template")
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8-sig"), None
            except (OSError, ValueError) as error:
                raise self._unusable(f"cannot be read ({first_line(error)})") from None
        from transformers import AutoTokenizer

        if (run := RunDir(path)).record.is_file():
            path = run.final
        name = str(path) if path.exists() else self.name
        try:
            with errors_explained(name):
                tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=self.trust_remote_code)
            template = template_of(tokenizer, name)
        except UserError as error:
            cause = first_line(error).removeprefix(f"--model {name}: ")
            raise self._unusable(f"this is neither {CHATML} nor a file, nor a model: {cause}") from error
        if isinstance(template, dict):  # several templates, by name
            template = template.get("default")
        if template is None:
            raise self._unusable("this model's tokenizer has no chat template; name another")
        return template, special_tokens(tokenizer)

    def _unusable(self, cause: str) -> UserError:
        return UserError(f"--chat-template {self.name}: {cause}")


def _failure(error: UserError) -> str:
    """Return why a template fails and, for a syntax error, in which line."""
    cause = error.__cause__
    if isinstance(cause, jinja2.TemplateSyntaxError):
        return f"line {cause.lineno}: {one_line(cause.message or '', LONGEST_ERROR)}; fix it, or name another"
    if cause is None:
        return first_line(error)
    text = str(cause) if isinstance(cause, jinja2.TemplateError) else f"{type(cause).__name__}: {cause}"
    return f"it fails on a conversation: {one_line(text, LONGEST_ERROR)}; fix it, or name another"


def template_of(tokenizer: Any, name: str) -> Any:
    """Return a tokenizer's chat template or, if it has none, that in chat_template.json (an older place); else None."""
    from transformers.utils import cached_file

    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    with errors_explained(name):
        path = cached_file(name, "chat_template.json", _raise_exceptions_for_missing_entries=False)
    content = read_json(Path(path)) if path else None
    template = content.get("chat_template") if isinstance(content, dict) else None
    return template if isinstance(template, str) else None


def load_tokenizer(
    source: Source, *, trust_remote_code: bool, given: GivenTemplate | None = None, templated: bool = True
) -> Any:
    """Load the tokenizer; ensure that it has a pad token and, if `templated`, a chat template (raw text needs none)."""
    from transformers import AutoTokenizer

    with errors_explained(source.tokenizer):
        tokenizer = AutoTokenizer.from_pretrained(source.tokenizer, trust_remote_code=trust_remote_code)
    if given:
        given.give(tokenizer)
    tokenizer.chat_template = template_of(tokenizer, source.tokenizer)
    if tokenizer.chat_template is None and templated:
        raise UserError(no_template(source.tokenizer))
    if tokenizer.chat_template is not None and not isinstance(tokenizer.chat_template, (str, dict)):
        kind = type(tokenizer.chat_template).__name__
        raise UserError(f"--model {source.tokenizer}: its chat template is {kind}, not text; fix the tokenizer")
    if tokenizer.eos_token_id is None:
        raise UserError(f"--model {source.tokenizer}: its tokenizer has no eos_token, which must end answers")
    if not tokenizer("The answer is 1.", add_special_tokens=False)["input_ids"]:
        raise UserError(f"--model {source.tokenizer}: its tokenizer has no vocabulary; is its tokenizer.json there?")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encoding_rules(tokenizer: Any, source: Source, config: TrainConfig) -> Rules:
    """Return what decides an example's tokens apart from the tokenizer: end-of-turn ids, maximum length and so on."""
    from transformers import GenerationConfig
    from transformers.utils import cached_file

    generation = None  # a model may have no such file; then only the tokenizer's eos ends answers
    with errors_explained(source.weights):
        if cached_file(source.weights, "generation_config.json", **OR_NONE):
            generation = GenerationConfig.from_pretrained(source.weights)
    served = generation or text_settings(source.weights, trust_remote_code=config.trust_remote_code)
    ends = frozenset(answer_ends(tokenizer, generation))
    if wrong := [token for token in ends if type(token) is not int]:
        raise UserError(f"--model {source.weights}: generation_config.json: eos_token_id {wrong[0]!r} is not a number")
    assert config.max_length is not None  # the settings are resolved
    assert config.thinking is not None
    assert config.control_tokens is not None
    return Rules(
        ends,
        config.max_length,
        config.truncation,
        thinking=config.thinking,
        day=config.template_date,
        control_tokens=config.control_tokens,
        served_ends=frozenset(named_ends(served)),
    )


def left_out(generation_config: Any) -> dict[str, Any]:
    """Return those generation settings of a model that make answers differ from its most likely tokens, with the values
    that disable them. With these values, `generate` answers as evaluations do."""
    given = {name: getattr(generation_config, name, None) for name in _WITHOUT}
    return {name: _WITHOUT[name] for name, value in given.items() if value is not None and value != _WITHOUT[name]}


def answer_ends(tokenizer: Any, generation_config: Any) -> set[int]:
    """Return the ids that end an answer: `end_of_turn_ids`. If the chat template writes none of these after an answer
    (or a call), add the special token that it writes there, such as `<|im_end|>` in Qwen's base models."""
    ends, rendering = end_of_turn_ids(tokenizer, generation_config), Rendering(tokenizer)
    written, called = rendering.ends(), rendering.call_ends()
    ends = ends if ends.intersection(written) else ends | {*written[:1]}
    return ends if ends.intersection(called) else ends | {*called[-1:]}


def stop_at_ends(model: Any, tokenizer: Any, log: Callable[[str], None]) -> None:
    """Make generation stop where answers end, also in the exported model. Settings without effect, such as a
    temperature without sampling, are removed, because transformers would refuse to save them."""
    if not model.can_generate():
        return
    settings = model.generation_config
    ends, eos = answer_ends(tokenizer, settings), tokenizer.eos_token_id
    if ends - named_ends(settings):
        settings.eos_token_id = [eos, *sorted(ends - {eos})]
    if names := ", ".join(left_out(settings)):
        log(f"generation_config.json sets {names}, which evaluations ignore; the model card shows how to disable them")
    try:
        settings.validate(strict=True)  # as `save_pretrained` does
    except ValueError as error:
        idle = _IDLE.findall(str(error))
        given = ", ".join(f"{name} {getattr(settings, name)}" for name in idle)
        log(f"generation_config.json: {given} has no effect, and is left out of exports")
        for name in idle:
            setattr(settings, name, None)


def sentencepiece_file(source: Source) -> list[Path]:
    """Return [the base's tokenizer.model] or []. llama.cpp's converter reads this file; transformers 5 writes none."""
    from transformers.utils import cached_file

    path = cached_file(source.tokenizer, "tokenizer.model", **OR_NONE)
    return [Path(path)] if path else []


def load_processor(source: Source, *, model: str, trust_remote_code: bool) -> Any:
    """Load the processor of a model that reads images; without torchvision, the part for videos is left out."""
    from transformers import AutoConfig, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils import is_torchvision_available, is_vision_available

    name = source.weights
    shown = model if model == "tiny" else name
    if not is_vision_available():
        raise UserError("the data has images, which need Pillow: pip install 'accel-sft[images]'")
    if has_torchvision := is_torchvision_available():
        try:
            import torchvision  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:  # PyPI's build is for CUDA, and fails without it
            cause = one_line(str(error), LONGEST_ERROR)
            raise UserError(
                f"torchvision is installed but cannot be loaded ({cause}); uninstall it: images can be read without it"
            ) from error
    with errors_explained(name):
        settings = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        kind: Any = PROCESSOR_MAPPING.get(type(settings), None)
        if kind is None or "image_processor" not in kind.get_attributes():
            raise UserError(f"--model {shown}: it reads no images, but the data has some; name a vision-language model")
        if "video_processor" in kind.get_attributes() and not has_torchvision:
            processor = _without_videos(kind, name, trust_remote_code)
        else:
            processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    if getattr(processor, "image_token", None) is None or not hasattr(processor, "image_token_ids"):
        raise UserError(f"--model {name}: {type(processor).__name__} has no image token")
    return processor


def _without_videos(kind: Any, name: str, trust: bool) -> Any:
    """A processor of this kind without its part for videos."""
    from transformers import AutoImageProcessor, AutoTokenizer

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else kind.check_argument_for_proper_class(self, name, part)

    images_only: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
    loaders: dict[str, Any] = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer}
    parts = {part: loader.from_pretrained(name, trust_remote_code=trust) for part, loader in loaders.items()}
    settings, _ = kind.get_processor_dict(name)
    return images_only.from_args_and_dict([parts.get(part) for part in kind.get_attributes()], settings)
