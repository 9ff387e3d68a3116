"""Loads a rehearsal's exported weights with plain transformers and peft, and compares them with the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from accel_sft.api.config import TrainConfig
from accel_sft.chat.encoded import Encoded, named_ends
from accel_sft.io.findings import Finding
from accel_sft.models.merge import merge
from accel_sft.models.pretrained import class_of, stored_dtype
from accel_sft.models.source import find_source
from accel_sft.models.tokenizer import answer_ends, load_tokenizer
from accel_sft.tools.rehearse.runs import fails, warns

_EXACT, _ROUNDED = 1e-3, 5e-2
"""Allowed relative difference of the validation loss: for a run in float32, and for a run in 16 bits or on a 4-bit
base. The reloaded model computes in float32, with the base's own weights."""
_BEHIND = 4
"""Tokens that may be generated after the end of an answer, to see whether generation stops there."""


class Reloaded:
    """The exported weights in `final`, loaded by plain transformers and peft; `rows` are the validation rows whose loss
    the run computed."""

    def __init__(self, final: Path, config: TrainConfig, rows: Sequence[Encoded]) -> None:
        self.final, self.config, self.rows = final, config, rows
        self.trusted, self.images = config.trust_remote_code, any(row.images for row in rows)
        self.source = find_source(str(final))
        self.tokenizer = load_tokenizer(self.source, trust_remote_code=self.trusted, templated=False)
        self.model = self._plain()

    def _plain(self) -> Any:
        from peft import PeftModel
        from transformers import AutoConfig

        weights = self.source.weights
        settings = AutoConfig.from_pretrained(weights, trust_remote_code=self.trusted)
        self.rounded = not self.source.adapter and stored_dtype(settings) != torch.float32
        kind = class_of(settings, images=self.images)
        model = kind.from_pretrained(weights, dtype=torch.float32, trust_remote_code=self.trusted)
        if self.source.adapter:
            if self.config.chat_template is not None and len(self.tokenizer) > settings.vocab_size:
                model.resize_token_embeddings(len(self.tokenizer), mean_resizing=False)
            model = PeftModel.from_pretrained(model, self.source.adapter)
        return model.eval()

    def _inputs(self, row: Encoded, length: int) -> dict[str, torch.Tensor]:
        """The first `length` tokens of a row, with its images."""
        ids = row.input_ids[:length]
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, length, dtype=torch.int64)}
        if row.images:
            made = row.images.origin.inputs.tensors([ids], [row.images], (1, length))
            inputs |= {name: torch.as_tensor(values) for name, values in made.items()}
        return inputs

    @torch.no_grad()
    def loss(self) -> float:
        """The mean loss of the rows' supervised tokens, each row alone."""
        total = count = 0.0
        for row in self.rows:
            inputs = self._inputs(row, len(row.input_ids))
            logits = self.model(**inputs, use_cache=False).logits[0, :-1].float()
            nll = torch.nn.functional.cross_entropy(logits, inputs["input_ids"][0, 1:], reduction="none")
            for span in row.learnt:
                total += nll[span.start - 1 : span.stop - 1].sum().item()
                count += len(span)
        return total / count

    def reload(self, evaluated: Sequence[float], precision: str) -> tuple[str, list[Finding]]:
        """Compare the loss with the run's last loss, and the run's last loss with its first."""
        if not self.rows:
            return "loaded; losses are not compared, because no evaluated row is left", []
        loss, findings = self.loss(), []
        seen = f"validation loss {loss:.6g} in plain {'peft' if self.source.adapter else 'transformers'}"
        if evaluated:
            seen += f", {evaluated[-1]:.6g} in the run"
            exact = precision == "no" and not self.config.load_in_4bit and not self.rounded
            allowed = _EXACT if exact else _ROUNDED
            if not abs(loss - evaluated[-1]) <= allowed * abs(evaluated[-1]):
                what = f"the exported weights do not predict as the trained weights did: loss {loss:.6g}"
                fix = "report this as a defect, with the model's config.json"
                findings.append(fails(f"{what}, but {evaluated[-1]:.6g} in the run", fix))
        if len(evaluated) > 1 and evaluated[0] == evaluated[-1]:
            what = "nothing was learnt: the validation loss is the same before and after training, to the bit"
            findings.append(fails(what, "check that --learning-rate is above 0, and which weights are trained"))
        elif len(evaluated) < 2:
            seen += "; without evaluations it is not checked whether anything was learnt"
        return seen, findings

    def merge(self) -> str:
        """Merge the adapter, if there is one, as `accel-sft merge` does."""
        if not self.source.adapter:
            return "no adapter to merge"
        _, dtype = merge(self.source, self.tokenizer, None, trust_remote_code=self.trusted)
        return f"{dtype} weights"

    @torch.no_grad()
    def generate(self) -> tuple[str, list[Finding]]:
        """Force plain `generate` to repeat a training row's answer, token by token; it must stop at its end."""
        from transformers import GenerationConfig

        base, exported = self.model.generation_config, GenerationConfig.from_pretrained(self.final)
        ends = answer_ends(self.tokenizer, base)
        row = next((row for row in self.rows if row.prompt_length and row.input_ids[-1] in ends), None)
        if row is None:
            return "no answer here has an end to stop at", []
        answer = row.input_ids[row.prompt_length :]
        every = [*range(self.model.config.get_text_config(decoder=True).vocab_size)]

        def dictated(_: int, ids: torch.Tensor) -> list[int]:
            return row.input_ids[len(ids) : len(ids) + 1] or every

        made = self.model.generate(
            **self._inputs(row, row.prompt_length),
            do_sample=False,
            max_new_tokens=len(answer) + _BEHIND,
            eos_token_id=exported.eos_token_id,
            prefix_allowed_tokens_fn=dictated,
        )[0].tolist()
        end = self.tokenizer.convert_ids_to_tokens(answer[-1])
        if len(made) > len(row.input_ids):
            what = f"answers end with {end}, but a plain `generate` of the exported weights does not stop there"
            return "", [fails(what, f"name {end} as a stop token wherever the model is served")]
        seen = f"a plain `generate` stops at {end}, which ends the answers"
        if not self.source.adapter or answer[-1] in named_ends(base):
            return seen, []
        what = f"answers end with {end}, but a server of the base does not stop there"
        return seen, [warns(what, "name it as a stop token to the server, or serve merged weights (accel-sft merge)")]
