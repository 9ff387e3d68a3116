"""What generation settings are to say: the tokens at which a model is trained to stop, and greedy answers' settings."""

import re
import tempfile
from collections.abc import Callable
from typing import Any

from accel_sft.chat.encoded import end_of_turn_ids, named_ends
from accel_sft.chat.rendering import Rendering

_IDLE = re.compile(r"^- `(\w+)`: ", re.M)
"""Names of settings in the error by which transformers refuses to save some that have no effect."""

_PENALTIES = {"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1}
_PENALTIES |= {"encoder_no_repeat_ngram_size": 0, "min_length": 0}
_FORCED = """
    min_new_tokens bad_words_ids suppress_tokens begin_suppress_tokens sequence_bias stop_strings forced_bos_token_id
    forced_eos_token_id exponential_decay_length_penalty guidance_scale watermarking_config max_time
"""
_WITHOUT: dict[str, Any] = {**_PENALTIES, **dict.fromkeys(_FORCED.split())}
"""Settings by which answers are not the most likely tokens, each with the value that leaves it out."""


def left_out(generation_config: Any) -> dict[str, Any]:
    """The settings of a model by which answers are not its most likely tokens, with the values that leave them out:
    with these arguments `generate` answers as evaluations do."""
    given = {name: getattr(generation_config, name, None) for name in _WITHOUT}
    return {name: _WITHOUT[name] for name, value in given.items() if value is not None and value != _WITHOUT[name]}


def answer_ends(tokenizer: Any, generation_config: Any) -> set[int]:
    """Ids that end an answer: `end_of_turn_ids` and, if the chat template writes none of them behind an answer, the
    special token that ends turns there. Qwen's base models are such: their eos ends texts, and ChatML turns. Calls may
    end with a token of their own, such as `<|call|>`.
    """
    ends, rendering = end_of_turn_ids(tokenizer, generation_config), Rendering(tokenizer)
    written, called = rendering.ends(), rendering.call_ends()
    ends = ends if ends.intersection(written) else ends | {*written[:1]}
    return ends if ends.intersection(called) else ends | {*called[-1:]}


def stop_at_ends(model: Any, tokenizer: Any, log: Callable[[str], None]) -> None:
    """Have generation stop where answers end, also that of plain transformers with the exported weights.

    Settings without effect, such as a temperature where nothing is drawn, are taken out if transformers would refuse
    to save them beside the first exported weights.
    """
    if not model.can_generate():
        return
    settings = model.generation_config
    ends, eos = answer_ends(tokenizer, settings), tokenizer.eos_token_id
    if ends - named_ends(settings):
        settings.eos_token_id = [eos, *sorted(ends - {eos})]
    if names := ", ".join(left_out(settings)):
        log(f"generation_config.json: {names}: answers are scored without; generate so too, as the model card does")
    with tempfile.TemporaryDirectory() as folder:  # what is refused depends on the version, and on what was changed
        try:
            settings.save_pretrained(folder)
        except ValueError as error:
            idle = _IDLE.findall(str(error))
            given = ", ".join(f"{name} {getattr(settings, name)}" for name in idle)
            log(f"generation_config.json: {given}: without effect, and left out of what is exported")
            for name in idle:
                setattr(settings, name, None)
            settings.save_pretrained(folder)
