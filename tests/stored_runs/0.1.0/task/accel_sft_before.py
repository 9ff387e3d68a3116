"""A small task that learns. Change it into your own: rows, what `parse` takes as a row, prompt, answer and score."""

from dataclasses import dataclass

from accel_sft import RowProblem, Task, UserError, option, read_rows


@dataclass(kw_only=True)
class BeforeTask(Task):
    """Say whether a number is even or odd."""

    main_metric = "accuracy"

    train_file: str | None = option(None, rows=True, help="Rows with question and answer; default: a sample.")
    validation_file: str | None = option(None, rows=True, help="The same, to evaluate; default: a tenth of the others.")

    def dataset(self, split):
        """The examples of "train" or "validation"; none may be in both."""
        if split == "validation" and self.validation_file:
            return read_rows(self.validation_file, parse, split=split)
        if self.train_file:
            rows = read_rows(self.train_file, parse)
            parts = (rows, None) if self.validation_file else rows.held_out(max(len(rows) // 10, 1), seed=0)
            return parts[split == "validation"]
        if self.validation_file:
            raise UserError("--train-file: name the rows to train on")
        numbers = range(900) if split == "train" else range(900, 1000)
        return [{"question": f"Is {n} even or odd?", "answer": ("even", "odd")[n % 2]} for n in numbers]

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
