"""Renders a run's report: base and tuned model side by side, memory, and answers. No torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from accel_sft.io.files import is_number, mapping, write_atomically
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import markdown_cell, markdown_table, one_line, shown
from accel_sft.results.labels import label_tables
from accel_sft.results.significance import span, verdict, words_for

SHOWN_SAMPLES, PRINTED_SAMPLES = 20, 5
"""Maximum number of answers listed in a report, and at the terminal."""

COSTS = {
    "generate_seconds": "time for all answers (s)",
    "seconds_per_answer": "time per question (s)",
    "generate_tokens_per_second": "generated tokens/s",
    "load_peak_device_memory_gib": "peak device memory to load (GiB)",
    "generate_peak_device_memory_gib": "peak device memory to generate (GiB)",
    "load_peak_host_memory_gib": "peak host memory to load (GiB)",
    "generate_peak_host_memory_gib": "peak host memory to generate (GiB)",
}
"""An evaluation's numbers for time and memory, with their labels in a report; they say nothing about the answers."""

PAIR_LOSS = "pair_loss"
PAIR_METRICS = (PAIR_LOSS, "chosen_logprob", "rejected_logprob", "pair_margin", "ranked_right")
"""Recorded of pairs, as means: their loss, without the chosen answers' own (--dpo-sft-weight); log-probabilities of
both answers in nats; --dpo-beta times the difference of their gains over the initial model; the share of pairs whose
chosen answer gained more (an equal gain counts half)."""
NOT_OF_ANSWERS = ("eval_loss", *PAIR_METRICS)
"""Metrics that are not computed from generated answers."""

_TRAINING = {
    "status": "status",
    "steps": "steps",
    "stop_reason": "stopped early",
    "train_seconds": "training time (s)",
    "tokens_per_second": "training tokens/s (mean of all steps)",
    "tokens_per_second_per_device": "training tokens/s of each device",
    "mfu": "model FLOPs utilisation (MFU, a share of 1)",
    "peak_device_memory_gib": "peak device memory (GiB)",
    "peak_host_memory_gib": "peak host memory (GiB)",
}

_CHANGE = 23
_LONGEST = 200
"""Maximum number of characters of a prompt or an answer at the terminal."""
_BRACKETS = re.compile(r" \(([^)]*)\)$")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""Control characters. An untrained model's answers are full of them: escaped, they would fill the table."""

Samples = Sequence[Mapping[str, Any]]
"""{"index", "prompt", "expected", "generated", "scores"} of each answer of an evaluation."""


def comparison_rows(
    before: Mapping[str, Any], after: Mapping[str, Any], result: Mapping[str, Any] | None = None
) -> list[tuple[str, str, str, str]]:
    """(what, base, tuned, change) for every number of two flat evaluations: the task's metrics, loss, then costs.

    The change is the verdict of a paired test or, without a test, the difference. Which number is better is known
    only for the main metric of `result`. Costs have no change, because both models were measured in one process, whose
    memory holds more than the measured model.
    """
    keys = [key for key in dict.fromkeys([*after, *before]) if is_number(after.get(key, before.get(key)))]
    keys.sort(key=lambda key: ([*COSTS].index(key) + 2) if key in COSTS else key == "eval_loss")
    intervals = mapping((result or {}).get("intervals"))
    rows = []
    for key in keys:
        old, new = before.get(key), after.get(key)
        change = f"{new - old:+.3g}" if is_number(old) and is_number(new) and key not in COSTS else ""
        main = key == (result or {}).get("main_metric")
        words = words_for(intervals.get("higher_is_better") is not False if main else None)
        change = verdict(mapping(mapping(intervals.get("change")).get(key)), words) or change
        label = "validation loss" if key == "eval_loss" else COSTS.get(key, key)
        base, tuned = shown(old) + _bracket(intervals, "before", key), shown(new) + _bracket(intervals, "after", key)
        rows.append((label, base, tuned, change))
    return rows


def _bracket(intervals: Mapping[str, Any], side: str, key: str) -> str:
    ends = mapping(intervals.get(side)).get(key)
    if not (isinstance(ends, list) and len(ends) == 2 and all(map(is_number, ends)) and ends[0] < ends[1]):
        return ""
    return f" ({span(ends[0], ends[1])})"


def about_intervals(result: Mapping[str, Any]) -> str:
    """Say what the brackets in `comparison_rows` mean, and why a metric has none; "" without intervals."""
    intervals = mapping(result.get("intervals"))
    count = intervals.get("examples")
    without = mapping(intervals.get("without"))
    sentences = []
    if is_number(count):
        few = "; with so few, they cover about 90% if scores are skewed" if count < 30 else ""
        sentences.append(f"Intervals are at 95%, over {count:,} examples{few}.")
    if intervals.get("change"):
        sentences.append("Changes are judged by a paired test on the same examples, at 5%.")
    if without:
        reasons = "; ".join(f"{key} ({reason})" for key, reason in without.items())
        sentences.append(f"Without an interval: {reasons}.")
    return " ".join(sentences)


def render_report(result: Mapping[str, Any], before_samples: Samples, after_samples: Samples) -> str:
    """The report as markdown: training, base and tuned model, memory, and the first answers side by side. The result
    may lack `before`, `after` and `task`."""
    title = " ".join(str(result[key]) for key in ("task", "model") if result.get(key))
    parts = [f"# {markdown_cell(title)}" if title else "# Report"]
    training = [(label, shown(result[key])) for key, label in _TRAINING.items() if result.get(key) is not None]
    training += [("answers", text.removeprefix("answers: ")) for text in result.get("answering") or ()]
    trained = "steps" in result  # `evaluate` writes a report too
    parts += ["## Training", markdown_table(["", ""], training)] if trained else []
    if spent := result.get("time_spent"):
        parts += [f"On rank 0 {time_sentence(spent)}."]
    if mixed := sources_text(result.get("sources")):
        parts += [markdown_cell(mixed)]
    if disturbed := result.get("disturbed"):
        parts += ["A part of the training was disturbed:", "\n".join(f"- {line}" for line in disturbed)]
    if result.get("before") or result.get("after"):  # neither with --eval-every off
        parts += ["## Base and tuned", comparison_table(result)]
    for title, header, lines in label_tables(result.get("labels")):
        parts += [f"## {title}", markdown_table(header, lines)]
    if result.get("memory"):
        parts += ["## Memory by phase, predicted and measured", memory_table(result["memory"])]
    rows = _side_by_side(before_samples, after_samples)
    if rows:
        count = max(len(before_samples), len(after_samples))
        where = "samples/" if trained else "samples-tuned.jsonl"
        parts += [f"## Answers ({len(rows)} of {count}, all in `{where}`)"]
        parts += [markdown_table(["index", "prompt", "expected", "base", "tuned", "base scores", "tuned scores"], rows)]
    return "\n\n".join(parts) + "\n"


def sources_text(sources: Any) -> str:
    """How much of each source was trained on, from the `sources` of a result.json; "" if nothing was mixed."""
    try:
        seen = [
            f"{source['rows_seen']:,} rows of {source['name']} ({source['rows_seen'] / source['rows']:.2f} passes, "
            f"{source['tokens_seen']:,} tokens)"
            for source in sources or ()
        ]
        return f"Mixed {' : '.join(str(source['share']) for source in sources)}: {', '.join(seen)}." if seen else ""
    except (TypeError, KeyError, ValueError, ZeroDivisionError):  # someone else's file
        return ""


def write_report(run_dir: RunDir, result: Mapping[str, Any], before_samples: Samples, after_samples: Samples) -> Path:
    """Write `render_report` to the run's report.md."""
    write_atomically(run_dir.report, render_report(result, before_samples, after_samples))
    return run_dir.report


def print_report(result: Mapping[str, Any], samples: Samples, tuned: Samples, console: Console) -> None:
    """Print the first answers (`samples` are the base's), then both models' numbers, as wide as the console."""
    before = result.get("before") or {}
    sides = ["base", "tuned"] if before else ["model"]  # `evaluate` without a base has one side
    if rows := _side_by_side(samples, tuned)[:PRINTED_SAMPLES]:
        marks = {sample["index"]: _mark(sample["scores"].get(result.get("main_metric"))) for sample in tuned}
        title = f"answers ({len(rows)} of {max(len(samples), len(tuned))})"
        console.print(_answers(title, rows, marks, sides))
    table = Table(box=box.SIMPLE_HEAD, title=" and ".join(sides), title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for name in sides:
        table.add_column(name, justify="right", no_wrap=True)
    if before:
        table.add_column("change", min_width=_CHANGE, overflow="fold")
    for label, *numbers in comparison_rows(before, result.get("after") or {}, result):
        below = [_BRACKETS.sub(r"\n\1", number) for number in numbers]  # an interval stands below its number
        table.add_row(*map(Text, [label, *below] if before else [label, below[1]]))
    if table.row_count:  # nothing was evaluated with --eval-every off
        for text in filter(None, (table, compared_weights(result), about_intervals(result))):
            console.print(text, markup=False)


def _answers(title: str, rows: list[list[str]], marks: Mapping[int, str], sides: list[str]) -> Table:
    """Prompts, expected answers and each side's answers, in columns of one width, so that equal answers look equal."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", expand=True)
    for name in ["prompt", "expected", *sides]:
        table.add_column(name, overflow="fold", ratio=1)
    if any(marks.values()):
        table.add_column("right")
    for index, prompt, expected, base, tuned, *_ in rows:
        texts = [prompt, expected, base, tuned] if "base" in sides else [prompt, expected, tuned]
        shown_texts = [one_line(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text), _LONGEST) for text in texts]
        table.add_row(*map(Text, [*shown_texts, marks.get(int(index), "")][: len(table.columns)]))
    return table


def samples_table(samples: Samples) -> str:
    """A markdown table of one evaluation's first answers: prompt, expected, generated and one column per score."""
    first = samples[:SHOWN_SAMPLES]
    names = list(dict.fromkeys(name for sample in first for name in sample["scores"]))
    rows = [
        [s["index"], s["prompt"], s["expected"], s["generated"], *(shown(s["scores"].get(name)) for name in names)]
        for s in first
    ]
    return markdown_table(["index", "prompt", "expected", "generated", *names], rows)


def memory_table(compared: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """A markdown table of a run's memory by place and phase: predicted and measured GiB of the rank that uses most."""
    rows = []
    for place, phases in compared.items():
        for phase, pair in phases.items():
            predicted, measured = pair["predicted_gib"], pair["measured_gib"]
            error = f"{predicted / measured - 1:+.0%}" if measured else ""
            rows.append([place, phase, f"{predicted:.2f}", f"{measured:.2f}", error])
    return markdown_table(["memory of a rank", "phase", "predicted (GiB)", "measured (GiB)", "error"], rows)


def comparison_table(result: Mapping[str, Any]) -> str:
    """A markdown table of `comparison_rows`, and which weights they compare."""
    rows = comparison_rows(result.get("before") or {}, result.get("after") or {}, result)
    table = markdown_table(["", "base", "tuned", "change"], rows)
    below = [markdown_cell(text) for text in (compared_weights(result), about_intervals(result)) if text]
    return "\n\n".join([table, *below])


def compared_weights(result: Mapping[str, Any]) -> str:
    """Say which weights the columns `base` and `tuned` compare; "" if the result does not name them."""
    return "; ".join(f"{side}: {weights}" for side, weights in (result.get("weights") or {}).items())


def _mark(score: Any) -> str:
    """The main metric of one answer as text: yes for 1, no for 0, else the number; "" if single answers have no such
    score."""
    return {1.0: "yes", 0.0: "no"}.get(score, f"{score:.2f}") if is_number(score) else ""


def _side_by_side(before: Samples, after: Samples) -> list[list[str]]:
    """[index, prompt, expected, base, tuned, base scores, tuned scores] of the first answers, joined by index."""
    base, tuned = ({sample["index"]: sample for sample in samples} for samples in (before, after))
    rows = []
    for index in sorted(base.keys() | tuned.keys())[:SHOWN_SAMPLES]:
        either = tuned.get(index) or base[index]
        answers = [str(side[index]["generated"]) if index in side else "" for side in (base, tuned)]
        scores = [_scores(side[index]["scores"]) if index in side else "" for side in (base, tuned)]
        rows.append([str(index), str(either["prompt"]), str(either["expected"]), *answers, *scores])
    return rows


def _scores(scores: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {shown(value)}" for key, value in scores.items() if value is not None)


def time_sentence(spent: Mapping[str, Any]) -> str:
    """A sentence on where the run's time went, from the numbers of `tracking.time_spent.TimeSpent`."""
    parts, total = spent["parts"], sum(spent["parts"].values())
    largest = sorted(((part / total, name) for name, part in parts.items() if part > total / 200), reverse=True)
    shares = ", ".join(f"{share:.0%} {name}" for share, name in largest)
    return f"a step took {spent['seconds'] / spent['steps']:.3g} s on average over {spent['steps']:,} steps: {shares}"
