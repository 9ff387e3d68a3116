"""`accel-sft report` makes one page from runs: what it says of them, what it refuses, and that nothing in them acts."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from places import SUPPORT

from accel_sft.api.errors import UserError
from accel_sft.cli.group import cli
from accel_sft.io.files import write_json_lines
from accel_sft.results.labels import label_scores
from accel_sft.tools.report import answers, runs, tables
from accel_sft.tools.report.charts import thin
from accel_sft.tools.report.runs import named, read_comparison, read_run

HOSTILE = '</script><img src=x onerror="window.hurt = 1"><!--{{ 7 * 7 }}\u202e'
VEGA = Path(runs.__file__).parent / "vega"
NODE = shutil.which("node")


@pytest.fixture(scope="module")
def two(launched, tmp_path_factory):
    """Folders of a real run, and of one that differs from it in its learning rate."""
    options = ("--max-steps", "6", "--eval-every", "3", "--max-number", "200", "--validation-examples", "30")
    run = launched("report", "math", *options, "--learning-rate", "0.001").run_dir
    other = copy(run, tmp_path_factory.mktemp("runs") / "other")
    config = json.loads((run / "run.json").read_text())["config"]
    change(other / "run.json", config={**config, "learning_rate": 0.004})
    return [run, other]


def report(*arguments) -> str:
    """What the command prints; a UserError is raised as such."""
    result = CliRunner().invoke(cli, ["report", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def page_of(folder: Path, *folders) -> Path:
    target = folder / "page.html"
    report(*folders, "--output", target)
    return target


class Elements(HTMLParser):
    """Names and attributes of a page's elements, its scripts, and its text outside of them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.scripts, self.text = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.scripts += [""] * (tag == "script")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem != "style":
            self.text.append(data)

    def prose(self) -> str:
        return " ".join(" ".join(self.text).split())

    def data(self) -> dict:
        return json.loads(self.scripts[0])


def elements_of(folder: Path, *folders) -> Elements:
    return Elements(page_of(folder, *folders).read_text(encoding="utf-8"))


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def copy(run: Path, folder: Path) -> Path:
    return shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints", "base", "best", "final"))


def change(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_page_has_the_runs_curves_answers_and_differing_settings(two, tmp_path):
    printed = report(*two, "--output", tmp_path / "page.html")
    assert re.fullmatch(r".*page\.html: 2 runs, [\d,]+ kB; open it in a browser\n", printed)
    elements = Elements((tmp_path / "page.html").read_text(encoding="utf-8"))
    data = elements.data()
    for place, run in enumerate(two):
        chart = next(chart for chart in data["charts"] if chart["title"] == "Training loss")
        curve = next(curve for curve in chart["curves"] if curve["run"] == place)
        losses = {line["step"]: line["loss"] for line in rows_of(run / "metrics.jsonl") if "loss" in line}
        assert curve["steps"] == list(losses)
        assert curve["values"] == pytest.approx(list(losses.values()), rel=1e-5)
        titles = {chart["title"] for chart in data["charts"]}
        assert {"Validation loss", "Validation: accuracy", "Learning rate", "Training speed"} <= titles
        answers = data["answers"]
        newest = [evaluation for evaluation in answers["evaluations"] if evaluation["run"] == place][-1]
        samples = rows_of(run / "samples" / "step-000006.jsonl")
        assert newest["label"] == "step 6 (newest)"
        assert [row[1] for row in newest["rows"]] == [sample["generated"] for sample in samples]
        prompts = [answers["examples"][row[0]][0] for row in newest["rows"]]
        assert prompts == [sample["prompt"] for sample in samples]
    differing = elements.prose().partition("Settings that differ")[2].partition("Settings that all have")[0]
    assert re.search(r"learning_rate\s*0\.001\s*0\.004", differing)
    assert "max_steps" not in differing
    order = [dict(attrs).get("id") for tag, attrs in elements.tags if tag == "section"]
    assert order.index("main") < order.index("answers") < order.index("settings")


def test_page_has_labels_mfu_and_disturbances_where_recorded(two, tmp_path):
    run = copy(two[0], tmp_path / "run")
    plain = elements_of(tmp_path, run).prose()
    assert not re.search("MFU|Disturbed steps|Scores by label", plain)
    given = [("billing", "billing")] * 3 + [("<b>returns", "billing")] + [("<b>returns", "<b>returns")] * 2
    labels = label_scores([{"expected": e, "generated": g, "scores": {"x": float(e == g)}} for e, g in given], "x")
    change(run / "result.json", **labels)
    more = {"mfu": 0.375, "machine": {"other processes took # of 2 cores": 1.4}}
    lines = [line | (more if "loss" in line else {}) for line in rows_of(run / "metrics.jsonl")]
    write_json_lines(run / "metrics.jsonl", lines)
    elements = elements_of(tmp_path, run)
    for words in (
        "Scores by label label examples precision recall F1 billing 3 0.750 1.000 0.857 <b>returns 3 1.000 0.667 0.800",
        "expected, and answered: billing <b>returns (other) billing 3 <b>returns 1 2 ",
        "tokens/s MFU",
        "0.375",
        "Disturbed steps run : steps 1 to 6: other processes took 1.4 of 2 cores",
    ):
        assert words in elements.prose()
    assert "Model FLOPs utilisation" in {chart["title"] for chart in elements.data()["charts"]}


def test_killed_and_training_runs_are_shown_so_far(two, tmp_path):
    killed = copy(two[0], tmp_path / "killed")
    (killed / "result.json").write_text('{"status": "running"}')
    with (killed / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7, "lo')
    run = read_run(killed, "killed")
    assert (run.status, run.last_step, len(run.steps)) == ("stopped", 6, 6)
    assert "it was killed" in run.reason
    assert run.notes == ["metrics.jsonl has lines that cannot be read: 1"]
    descriptor = os.open(killed, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # as a training process does
        assert read_run(killed, "killed").status == "running"
    finally:
        os.close(descriptor)
    assert "no process on this machine works in its folder: it was killed" in elements_of(tmp_path, killed).prose()
    (killed / "result.json").write_text('{"status": "failed", "error": "the disk is full; free space"}')
    assert "failed: the disk is full; free space" in elements_of(tmp_path, killed).prose()
    (killed / "result.json").write_text('{"status": "interrupted", "error": "SIGTERM"}')
    assert read_run(killed, "stopped").status == "stopped"


def test_half_written_files_are_named_and_the_rest_shown(two, tmp_path):
    broken = copy(two[0], tmp_path / "broken")
    for file in (broken / "run.json", broken / "result.json"):
        file.write_text(file.read_text()[: file.stat().st_size // 2])
    run = read_run(broken, "broken")
    assert len(run.steps) == 6
    assert [line.partition(" cannot be read")[0] for line in run.notes] == ["run.json", "result.json"]
    assert all("half-written" in line for line in run.notes)
    page_of(tmp_path, broken)


def test_endless_files_are_named_unread(two, tmp_path):
    endless = copy(two[0], tmp_path / "endless")
    for file in ("metrics.jsonl", "run.json", "result.json", "samples/step-000006.jsonl"):
        (endless / file).unlink()
        os.mkfifo(endless / file)
    (endless / "metrics.jsonl").unlink()
    (endless / "metrics.jsonl").symlink_to("/dev/zero")
    printed = report(endless, "--output", tmp_path / "page.html")
    assert printed.count("cannot be read: it is not a regular file") == 4


@pytest.mark.parametrize(("step", "cell"), [(0, ("0.5", "", "")), (4, ("", "0.5", ""))])
def test_run_with_one_evaluation_shows_no_change(tmp_path, step, cell):
    write_json_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}, {"step": step, "accuracy": 0.5}])
    assert tables.scores([read_run(tmp_path, "run")])["rows"] == [("accuracy", [cell])]


def test_what_is_no_run_is_refused_in_a_line(two, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.json").write_text('{"name": "another program"}')
    shutil.copytree(two[0], tmp_path / "many" / "one", ignore=shutil.ignore_patterns("*"))
    shutil.copy(two[0] / "run.json", tmp_path / "many" / "one")
    names = ["missing", "file", "empty", "foreign", "many"]
    with pytest.raises(UserError) as raised:
        report(*(tmp_path / name for name in names), "--output", tmp_path / "page.html")
    wanted = ["no such folder", "not a folder", "neither run.json nor comparison.json"]
    wanted += ["not the record of a run", "name the runs in it"]
    assert len(raised.value.problems) == len(names)
    for name, what, line in zip(names, wanted, raised.value.problems, strict=True):
        assert name in line
        assert what in line
    assert not (tmp_path / "page.html").exists()


def test_no_other_file_is_replaced(two, tmp_path):
    target = tmp_path / "notes.html"
    target.write_text("mine")
    with pytest.raises(UserError, match=r"notes\.html: this file is not a page of accel-sft"):
        report(two[0], "--output", target)
    with pytest.raises(UserError, match="in an existing folder"):
        report(two[0], "--output", tmp_path / "nowhere" / "page.html")
    assert target.read_text() == "mine"


def test_an_evaluation_by_itself_has_its_answers_on_the_page(two, tmp_path):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    shutil.copy(two[0] / "samples" / "step-000000.jsonl", folder / "samples-base.jsonl")
    shutil.copy(two[0] / "samples" / "step-000006.jsonl", folder / "samples-tuned.jsonl")
    result = {"status": "complete", "task": "math", "after": {"accuracy": 0.5}, "weights": {"base": "B", "tuned": "T"}}
    (folder / "result.json").write_text(json.dumps(result))
    line = "evaluation: complete; an evaluation has no settings and no steps"
    assert line in report(folder, "--output", tmp_path / "page.html")
    evaluations = elements_of(tmp_path, folder).data()["answers"]["evaluations"]
    assert [(evaluation["label"], evaluation["count"]) for evaluation in evaluations] == [("B", 30), ("T", 30)]


@pytest.fixture(scope="module")
def hostile(two, tmp_path_factory) -> Path:
    """A run in which every name and text is an attack."""
    run = copy(two[0], tmp_path_factory.mktemp("hostile") / HOSTILE.replace("/", "∕"))
    record = json.loads((run / "run.json").read_text())
    record["config"] |= {"model": HOSTILE, HOSTILE: HOSTILE}
    change(run / "run.json", task=HOSTILE, task_options={HOSTILE: HOSTILE}, config=record["config"])
    hurt = {"status": "failed", "error": HOSTILE, "main_metric": HOSTILE, "after": {HOSTILE: 1.0}}
    change(run / "result.json", **hurt)
    for path in (run / "samples").iterdir():
        texts = {"prompt": HOSTILE, "expected": HOSTILE, "generated": f"{HOSTILE}\ud800\x1b[31m"}
        rows = [{**row, **texts, "scores": {HOSTILE: 1.0}} for row in rows_of(path)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 7, "eval_loss": 1.0, HOSTILE: 0.5}) + "\n")
    return run


def test_only_the_page_s_own_scripts_are_in_it(hostile, tmp_path):
    elements = elements_of(tmp_path, hostile)
    assert len(elements.scripts) == 6
    assert not [tag for tag, values in elements.tags if tag == "img" or any(n.startswith("on") for n in values)]
    assert [HOSTILE, HOSTILE] in elements.data()["answers"]["examples"]
    assert "49" not in elements.prose().partition("<!--")[2].partition("}}")[0]
    digests = (hashlib.sha256(script.encode()).digest() for script in elements.scripts[1:])
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; form-action 'none'"
    assert [values["content"] for _, values in elements.tags if values.get("http-equiv")] == [policy]
    links = [values.get("href", "#") for tag, values in elements.tags if tag in ("a", "link")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not [values for _, values in elements.tags if "src" in values]


def test_page_has_the_first_best_and_newest_evaluation(two, tmp_path):
    run = copy(two[0], tmp_path / "many")
    change(run / "result.json", best={"step": 2})
    rows = [{"prompt": f"p{i}", "expected": "x", "generated": "y", "scores": {"accuracy": 0}} for i in range(2000)]
    for step in range(7):
        write_json_lines(run / "samples" / f"step-{step:06d}.jsonl", rows)
    with (run / "samples" / "step-000006.jsonl").open("a") as file:
        file.write("no JSON\n")
    runs_of = [read_run(run, f"run {number}") for number in range(4)]
    content = answers.collect(runs_of[:1])
    labels = ["step 0 (before training)", "step 2 (best)", "step 6 (newest)"]
    assert [evaluation["label"] for evaluation in content["evaluations"]] == labels
    assert {len(evaluation["rows"]) for evaluation in content["evaluations"]} == {answers.MOST_ROWS}
    assert runs_of[0].notes == ["step-000006.jsonl has lines that cannot be read: 1"]
    assert len(answers.collect(runs_of)["evaluations"][-1]["rows"]) == 2000 // 12


def test_texts_are_cut_and_said_to_be(two, tmp_path):
    run = copy(two[0], tmp_path / "long")
    row = {"index": 0, "prompt": "p" * 5000, "expected": "x", "generated": "y\u2028z\x85", "scores": {}}
    write_json_lines(run / "samples" / "step-000006.jsonl", [row])
    target = tmp_path / "page.html"
    printed = report(run, "--output", target)
    assert "cannot be read" not in printed  # the answer's own line breaks are none of the file's
    assert json.dumps("y\u2028z\x85", ensure_ascii=False) in target.read_text(encoding="utf-8")
    assert "p" * 2000 + "... (3,000 more characters)" in target.read_text(encoding="utf-8")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(6, 60))
def test_thinned_curves_keep_their_ends_and_every_extreme(values, most):
    points = list(enumerate(values))
    thinned = thin(points, most)
    assert len(thinned) <= max(most, 2)
    assert thinned == sorted(thinned)
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert min(value for _, value in thinned) == min(values)
    assert max(value for _, value in thinned) == max(values)


@pytest.fixture
def comparison(two, tmp_path) -> Path:
    """The record of a comparison of two settings, one of which ran out of memory."""
    folder = tmp_path / "stages"
    copy(two[0], folder / "runs" / "z0-1")
    numbers = {"tokens_per_second": 100.0, "median_step_seconds": 0.5, "peak_host_memory_gib": 2.0}
    done = {"round": 1, "status": "complete", "reason": "", "folder": "runs/z0-1", "step_seconds": [0.5, 0.6]}
    died = {"round": 1, "status": "out of memory", "reason": "killed by the kernel", "folder": "runs/z3-1", "steps": 0}
    spread = {"tokens_per_second": 0.02}
    settings = [
        {"name": "z0", "status": "complete", "runs": [done | numbers], "median": numbers, "spread": spread},
        {"name": "z3", "status": "out of memory", "runs": [died | {"step_seconds": []}], "median": {}, "spread": {}},
    ]
    record = {"schema": 1, "task": "math", "created": "2026", "command": "accel-sft compare math", "varied": ["launch"]}
    record |= {"status": "complete", "main_metric": "accuracy", "findings": ["z0 is the fastest that fits."]}
    record["settings"] = [{**setting, "reason": "", "disturbed": {}} for setting in settings]
    (folder / "comparison.json").write_text(json.dumps(record))
    return folder


def test_comparison_shows_findings_settings_and_curves(comparison, tmp_path):
    elements = elements_of(tmp_path, comparison)
    text, data = elements.prose(), elements.data()
    assert "z0 is the fastest that fits." in text
    assert "step time (s) tokens/s peak host memory, largest rank (GiB) reason" in text
    assert "z0 complete 1 0.5 100 (2.0%) 2" in text
    assert "z3, round 1 : out of memory: killed by the kernel; its folder is missing" in text
    assert [run["name"] for run in data["runs"]] == ["z0, round 1", "z3, round 1"]
    assert [curve["name"] for curve in data["series"]] == ["z0", "z3"]


@pytest.mark.parametrize(
    ("record", "why"),
    [({"schema": 2}, "its schema is 2"), ([], "its schema is None"), ({"schema": 1, "settings": [3]}, "damaged")],
)
def test_another_form_of_comparison_is_refused(comparison, record, why):
    (comparison / "comparison.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=why):
        read_comparison(comparison, "stages")


def test_runs_that_are_called_alike_keep_their_paths():
    assert list(named(["a/x", "b/x", "c/y", "c/y"])) == ["a/x", "b/x", "y"]


def test_the_files_of_vega_are_those_that_their_list_says():
    listed = re.findall(
        r"\| (\S+\.js) \| \S+@\S+ \| ([0-9a-f]{64}) \|", (VEGA / "README.md").read_text(encoding="utf-8")
    )
    assert dict(listed) == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VEGA.glob("*.js")}
    for name, _ in listed:
        assert not re.search(r"</script|<!--", (VEGA / name).read_text(encoding="utf-8"), re.I)


@pytest.mark.skipif(not NODE, reason="no node is installed")
def test_page_s_scripts_compare_answers_and_draw_curves(two, tmp_path):
    run = copy(two[0], tmp_path / "answers")
    for step, right in ((0, {1, 2}), (6, {2, 3, 4})):
        rows = []
        for i in range(1, 11):
            answer = f"answer {i}" if i in right else f"nothing {step if i < 9 else ''}"
            row = {"index": i, "prompt": f"question {i}", "expected": f"answer {i}", "generated": answer}
            rows.append(row | {"scores": {"accuracy": float(i in right)}})
        write_json_lines(run / "samples" / f"step-{step:06d}.jsonl", rows)
    counts = {"changed": 7, "worse": 1, "right": 3, "wrong": 7, "better": 2}
    steps = [{"id": "which", "event": "change", "value": which} for which in counts]
    steps.append({"id": "search", "event": "input", "value": "QUESTION 4"})
    steps.append({"id": "legend", "event": "change", "box": 1, "value": False})
    steps.append({"id": "low", "event": "change", "value": "2"})
    elements = elements_of(tmp_path, run, two[1])
    page = {"scripts": elements.scripts[1:], "data": elements.scripts[0], "steps": steps}
    command = [NODE, SUPPORT / "page_in_node.js"]
    done = subprocess.run(command, input=json.dumps(page), capture_output=True, text=True, check=True)
    first, *filtered, searched, unticked, zoomed = json.loads(done.stdout)
    assert first["count"] == "10 of 10 examples. 2 became right, 1 became wrong."
    assert {which: len(shown["rows"]) for which, shown in zip(counts, filtered, strict=True)} == counts
    right = ["question 3", "answer 3", "nothing 0✗ wrong", "answer 3✓ right", "▲ became right"]
    assert filtered[-1]["rows"][0] == right
    assert [row[0] for row in searched["rows"]] == ["question 4"]
    assert len(first["charts"]) == len(elements.data()["charts"])
    assert first["charts"][0] == {"lines": 2, "steps": [1, 6]}
    assert unticked["charts"][0] == {"lines": 1, "steps": [1, 6]}
    assert zoomed["charts"][0] == {"lines": 1, "steps": [2, 6]}
