"""How often `how-much` forecasts correctly, for ten jobs: from trainings on at most half of the rows, for all rows.

    python benchmarks/learning_curves.py [--from trained] [--folder FOLDER] [--jobs 10] [--smoke]

`accel-sft how-much` trains each job on a sixteenth, an eighth, a quarter, a half and all of its rows, each with two
seeds. The forecast is made without the trainings on all rows, and compared with them. Models begin with random weights,
which learn a job all at once, or with `--from trained` with weights that were trained on other rows of the task:
smaller sums, other sentences, other words. With `--folder`, the folder is kept, and the same command resumes there.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from accel_sft.tools.compare.learning_curve import forecast, read_curve
from smoke import parse, parser

EVERY = ("--epochs", "4", "--global-batch-size", "16", "--learning-rate", "0.001", "--batching", "shared")
JOBS = {
    "math to 999, a": ("math", "--max-number", "999", "--train-examples", "2000"),
    "math to 999, b": ("math", "--max-number", "999", "--train-examples", "2000", "--data-seed", "1"),
    "math to 9999, a": ("math", "--train-examples", "4000"),
    "math to 9999, b": ("math", "--train-examples", "4000", "--data-seed", "1"),
    "entities, Chinese": ("ner", "--language", "zh", "--train-sentences", "2000"),
    "entities, English": ("ner", "--language", "en", "--train-sentences", "2000"),
    "entities, both": ("ner", "--train-sentences", "2000", "--data-seed", "1"),
    "words for words, a": ("chat", "--train-file", "a.jsonl", "--held-out", "200"),
    "words for words, b": ("chat", "--train-file", "b.jsonl", "--held-out", "200"),
    "words for words, exact": ("chat", "--train-file", "a.jsonl", "--held-out", "200", "--metric", "exact"),
}
BEFORE = {
    "math": ("--max-number", "499", "--train-examples", "3000", "--data-seed", "2"),
    "ner": ("--train-sentences", "4000", "--data-seed", "2"),
    "chat": ("--train-file", "before.jsonl", "--held-out", "200"),
}
"""Options of the training that each task's models begin from with `--from trained`."""
WORDS = 150
"""Number of words of the language from which chats translate."""


def write_chats(path: Path, rows: int, seed: int) -> None:
    """Chats in which two to five words are translated word by word, the rare ones rarely."""
    drawn = random.Random(seed)
    spelt = ["".join(drawn.choice("bdfgklmnprst") + drawn.choice("aeiou") for _ in range(2)) for _ in range(2 * WORDS)]
    words, others = spelt[:WORDS], spelt[WORDS:]
    weights = [1 / (place + 5) for place in range(WORDS)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            chosen = drawn.choices(range(WORDS), weights, k=drawn.randint(2, 5))
            turns = [
                ("user", " ".join(words[at] for at in chosen)),
                ("assistant", " ".join(others[at] for at in chosen)),
            ]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


def run(folder: Path, log: Path, *words: str) -> None:
    with log.open("w") as output:
        done = subprocess.run([sys.executable, "-m", "accel_sft", *words], cwd=folder, stdout=output, stderr=output)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {log.read_text()[-500:]}")


def main(folder: Path, jobs: int, start: str, sizes: str | None, steps: int | None) -> None:
    for seed, name in enumerate(("a", "b", "before")):
        write_chats(folder / f"{name}.jsonl", 1800, seed)
    every = [*EVERY, *(["--max-steps", str(steps)] if steps else [])]
    print("| job | measured with half of the rows | forecast for all | 95% | came | held |\n|---|---|---|---|---|---|")
    held, widths = [], []
    for name, job in [*JOBS.items()][:jobs]:
        place = folder / name.replace(" ", "-").replace(",", "")
        words, task = [*job, "--output-dir", str(place)], job[0]
        if start == "trained":
            before = folder / f"before-{task}"
            if not (before / "result.json").exists():
                run(folder, folder / f"{before.name}.log", task, *BEFORE[task], *every, "--output-dir", str(before))
            words += ["--model", str(before / "final")]
        words += [*(["--sizes", sizes] if sizes else []), "--", *every]
        run(folder, folder / f"{place.name}.log", "how-much", *words)
        record = json.loads((place / "comparison.json").read_text())
        whole = read_curve(record)
        most = whole.sizes[-1]
        record["settings"] = [one for one in record["settings"] if one["values"]["train_limit"] != str(most)]
        half = read_curve(record)
        if half is None:  # with --smoke there are too few sizes
            print(f"| {name} | too few sizes |")
            continue
        (ahead,) = forecast(half, [most])
        low, expected, high = (ahead[name] for name in ("low", "value", "high"))
        came = statistics.mean(whole.metrics[-1])
        held.append(low <= came <= high)
        widths.append(high - low)
        halved = statistics.mean(half.metrics[-1])
        interval = f"{low:.3f} to {high:.3f}"
        print(
            f"| {name} | {halved:.3f} | {expected:.3f} | {interval} | {came:.3f} | {'yes' if held[-1] else 'no'} |",
            flush=True,
        )
    if held:
        width = statistics.median(widths)
        print(f"\n{sum(held)} of {len(held)} intervals contain what came; their median width is {width:.3f}.")


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path)
    arguments.add_argument("--jobs", type=int, default=len(JOBS))
    arguments.add_argument("--from", dest="start", choices=("random", "trained"), default="random")
    arguments.add_argument("--sizes", help="Numbers of rows to train on; few with --smoke.")
    arguments.add_argument("--steps", type=int, help="Optimizer steps of each training, instead of four epochs.")
    args = parse(arguments, jobs=1, start="trained", sizes="16,32,64", steps=2)
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
        main(args.folder.absolute(), args.jobs, args.start, args.sizes, args.steps)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary), args.jobs, args.start, args.sizes, args.steps)
