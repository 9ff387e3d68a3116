"""The task `before`: a small example that learns.

Change it into your own: the rows in accel_sft_before_data/, what `parse` takes as a row, prompt, answer and score.
Its test holds whatever you make of it to what the trainer expects; change that only if an option has no default.
"""

from dataclasses import dataclass
from pathlib import Path

from accel_sft import RowProblem, Task, option, read_rows

_DATA = Path(__file__).parent / "accel_sft_before_data"


@dataclass(kw_only=True)
class BeforeTask(Task):
    """Say whether a number is even or odd."""

    main_metric = "accuracy"

    data_folder: str | None = option(None, help="Where train.jsonl and validation.jsonl are; default: the sample.")

    def dataset(self, split):
        """The examples of "train" or "validation"; none may be in both."""
        return read_rows(f"{self.data_folder or _DATA}/{split}.jsonl", parse)

    def messages(self, example):
        """The prompt, as chat messages."""
        return [{"role": "user", "content": example["question"]}]

    def target(self, example):
        """The only text that carries loss."""
        return example["answer"]

    def score(self, example, text):
        """The scores of one generated answer; the mean over all examples is reported."""
        return {"accuracy": float(text.strip() == example["answer"])}


def parse(row):
    """A row of a file as an example; what is wrong with it is told by file and line."""
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str):
            raise RowProblem(field, "text")
    return row
