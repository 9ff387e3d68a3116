"""Runs LLaMA-Factory's supervised fine-tuning (`run_exp`) on prompt and completion: as it is, grouped, or packed."""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import peer

try:
    import torchaudio  # noqa: F401
except (ImportError, OSError):
    # LLaMA-Factory's multimodal part imports torchaudio, which has no wheel without CUDA; rows of text never use it
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

from llamafactory.data.formatter import StringFormatter
from llamafactory.data.template import register_template
from llamafactory.train.sft import workflow
from llamafactory.train.tuner import run_exp

register_template(
    "rows",
    format_user=StringFormatter(slots=["{{content}}"]),
    format_assistant=StringFormatter(slots=["{{content}}", {"eos_token"}]),
)


class Trainer(workflow.CustomSeq2SeqTrainer):
    """LLaMA-Factory's trainer, which also notes the tokens of a step, since packed data has fewer rows."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        pad, rows = self.processing_class.pad_token_id, self.train_dataset
        tokens = sum(token != pad for row in rows for token in row["input_ids"])
        peer.gate.note(tokens_per_step=tokens * peer.settings["batch"] / len(rows))


workflow.CustomSeq2SeqTrainer = Trainer
folder = Path(tempfile.mkdtemp())
rows = json.loads(Path(peer.settings["rows"]).read_text())
pairs = [{"instruction": row["instruction"] + row["question"], "input": "", "output": row["answer"]} for row in rows]
(folder / "rows.json").write_text(json.dumps(pairs))
(folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
settings = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "model_name_or_path": peer.settings["model"],
    "dataset": "rows",
    "dataset_dir": str(folder),
    "template": "rows",
    "cutoff_len": 4096,
    "disable_gradient_checkpointing": True,
    **peer.arguments(),
    **peer.settings.get("options", {}),
}
run_exp(settings, callbacks=[peer.Gated()])
