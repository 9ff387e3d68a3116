"""`accel-sft check` finds what is wrong with data, by file and line, before anything is trained."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import planted
import pytest
from conftest import accel_sft
from fake_plugins import install, only_plugins_of
from places import ROOT

from accel_sft.chat.encoded import Encoded, Encoding
from accel_sft.data.token_store import StoredEncoding, TokenStore, merge, write_part
from accel_sft.tools.check.findings import CODES, GRADES, Findings
from accel_sft.tools.check.splits import read_splits
from accel_sft.tools.check.texts import DAMAGED, Labels
from accel_sft.tools.check.tokens import audit_tokens, quick_findings, quick_lines, token_facts
from accel_sft_math import Math
from accel_sft_ner import Ner


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    install(folder, "accel-sft-planted", planted.ENTRY, planted.TASK)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return planted.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def check(called):
    """`check(site, ...)`: what `accel-sft check planted` prints where this folder has the task."""

    def call(site, *options, model=None, command=("check", "planted"), rank=None):
        named = ("--model", str(model), "--max-length", str(planted.MAX_LENGTH)) if model else ()
        with pytest.MonkeyPatch.context() as patch, only_plugins_of(site, patch):
            if rank is not None:
                patch.setenv("LOCAL_RANK", rank)
            return called(*command, *named, *map(str, options))

    return call


def report_of(launched):
    return json.JSONDecoder().raw_decode(launched.output, launched.output.index("{"))[0]


def places(report):
    """Where each code was found."""
    return {finding["code"]: {row["where"] for row in finding["rows"]} for finding in report["findings"]}


def test_planted_faults_are_found_by_code_and_line_alone(check, site, model, tmp_path):
    files, expected = planted.write(tmp_path, planted.FAULTS)
    run = check(site, *files, "--json", model=model)
    assert run.status == 1
    assert len(expected) >= 15
    assert places(report_of(run)) == expected


def test_a_clean_file_gives_no_finding(check, site, model, tmp_path):
    files, _ = planted.write(tmp_path, {})
    run = check(site, *files, "--json", "--strict", "--train-only", r"layers\.0\.mlp", model=model)
    assert run.status == 0
    report = report_of(run)
    assert report["findings"] == []
    assert [figures["used"] for figures in report["splits"].values()] == [8, 4]
    (trains,) = [note for note in report["notes"] if "--train-only trains " in note]
    assert "gpt_neox.layers.0.mlp.dense_h_to_4h.weight" in trains
    assert "attention" not in trains


def test_warnings_of_a_run_are_findings(check, site, model, tmp_path):
    files, _ = planted.write(tmp_path, {})
    run = check(site, *files, "--json", "--strict", "--max-new-tokens", "1", model=model)
    assert run.status == 1
    (finding,) = report_of(run)["findings"]
    assert (finding["code"], finding["split"]) == ("D219", "validation")
    assert "have more tokens than --max-new-tokens 1" in finding["rows"][0]["detail"]


def test_what_training_refuses_is_refused(check, site, model, tmp_path):
    files, _ = planted.write(tmp_path, {})
    unmatched = check(site, *files, "--train-only", "no_such", model=model)
    assert "--train-only no_such: no weight's name matches; names are like " in unmatched.output
    launched = check(site, *files, model=model, rank="0")
    assert "without accelerate launch" in launched.output
    assert (unmatched.status, launched.status) == (1, 1)


@pytest.mark.parametrize(("truncation", "code", "grade"), [("right", "D302", "warning"), ("error", "D301", "error")])
def test_rows_too_long_report_the_length_they_need(check, site, model, tmp_path, truncation, code, grade):
    long = [fault for fault in planted.FAULTS["train"] if fault[0] == "D301"]
    files, expected = planted.write(tmp_path, {"train": long})
    needed = 1 + len(json.loads(long[0][1])["ask"]) + len("\nA: 112") + 1
    options = ("--truncation", truncation, "--max-length", needed - 1)
    run = check(site, *files, "--json", "--model", model, *options)
    (finding,) = report_of(run)["findings"]
    assert (finding["code"], finding["grade"], run.status) == (code, grade, grade == "error")
    assert finding["also"] == f"the longest text has {needed} tokens"
    assert places({"findings": [finding]}) == {code: expected["D301"]}


def test_checked_file_with_bad_rows_is_refused_by_training(check, site, model, tmp_path):
    """What the audit leaves out is not taken from the cache by a run: neither rows nor tokens."""
    files, _ = planted.write(tmp_path, {"train": planted.FAULTS["train"][:1]})
    train = Path(files[1])
    train.write_text(train.read_text() + "".join(planted.row(f"{n} " * 150, "x") + "\n" for n in range(2500)))
    assert train.stat().st_size > 1 << 20, "a smaller file's rows are not kept in the cache"
    assert "D101" in places(report_of(check(site, *files, "--json", model=model)))
    run = check(site, *files, "--output-dir", tmp_path / "run", model=model, command=["planted"])
    assert run.status == 1
    assert f"Error: {train}:10: not JSON" in run.output


def test_file_of_both_splits_is_named_once(tmp_path):
    missing, broken = Findings(), Findings()
    assert read_splits(Math(train_file=str(tmp_path / "none.json")), missing) == {}
    assert (missing.count("D103", "train"), missing.count("D103", "validation")) == (1, 0)
    train = tmp_path / "train.jsonl"
    train.write_bytes(b'{"text": "a", "label": \n{"text": "\xff", "label": {}}\n')
    read_splits(Ner(train_file=str(train), validation_file=str(train), allow_overlap=True), broken)
    assert {(finding.code, finding.split) for finding in broken.placed({})} == {("D101", "train"), ("D103", "train")}


def test_task_that_fails_on_every_row_is_an_error(check, tmp_path):
    failing = planted.TASK.replace('ask = example["ask"]', 'raise KeyError("question")')
    assert failing != planted.TASK
    install(tmp_path, "accel-sft-planted", planted.ENTRY, failing)
    files, _ = planted.write(tmp_path, {})
    run = check(tmp_path, *files, "--json")
    assert run.status == 1
    findings = {(finding["code"], finding["split"]): finding for finding in report_of(run)["findings"]}
    counts = {key: finding["count"] for key, finding in findings.items()}
    assert counts == {("D201", "train"): 8, ("D201", "validation"): 4}
    assert "KeyError: 'question'" in findings["D201", "train"]["rows"][0]["detail"]


def test_templates_without_header_or_prompt_are_found(check, site, model, tmp_path):
    files, expected = planted.write(tmp_path, {"train": [("D309", planted.row("\u200b", "5"))]})
    bare = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    without = planted.TEMPLATE.replace("{% if add_generation_prompt %}A: {% endif %}", "")
    for template, codes in ((without, {"D215"}), (without.replace("A: ", " "), set()), (bare, {"D309"})):
        (tmp_path / "own.jinja").write_text(template)
        run = check(site, *files, "--json", "--chat-template", tmp_path / "own.jinja", model=model)
        assert places(report_of(run)).keys() == codes
    assert places(report_of(run)) == expected


def test_template_that_takes_no_row_leaves_nothing_to_use(check, site, model, tmp_path):
    files, _ = planted.write(tmp_path, {})
    Path(files[1]).write_text(planted.row([{"role": "tool", "content": "5?"}], "5") + "\n")
    report = report_of(check(site, *files, "--no-score", "--json", model=model))
    errors = {(finding["code"], finding["count"]) for finding in report["findings"] if finding["grade"] == "error"}
    assert errors == {("D202", 1), ("D307", 0)}
    assert report["steps"] is None


def test_the_model_must_know_every_token_and_position(check, site, tmp_path):
    files, _ = planted.write(tmp_path, {})
    small = planted.make_model(tmp_path / "small", positions=25, vocabulary=50)
    findings = places(report_of(check(site, *files, "--json", model=small)))
    assert findings.keys() == {"D601", "D602"}
    assert findings["D602"] == {f"{tmp_path}/validation.jsonl:{line}" for line in range(1, 5)}


def test_examples_are_marked_and_special_tokens_are_seen(check, site, model, tmp_path):
    files, _ = planted.write(tmp_path, {})
    run = check(site, *files, "--show", "1", model=model)
    assert "\x1b" not in run.output
    assert "    <s>What is 0 and 0?⏎\n    A: ⟦0</s>⟧\n" in run.output
    assert re.search(r"Training\n  \d+ steps? of \d+ rows on any number of GPUs, [\d.]+ epochs of \d+ ", run.output)
    assert run.output.splitlines()[-1] == "planted: nothing was found that needs fixing"


def test_metric_that_no_single_answer_has_is_reported_unjudged(check, model, tmp_path):
    needs_two = """
    def aggregate(self, scores):
        if len(scores) < 3:
            raise ValueError("three at least")
        return super().aggregate(scores)

def parse("""
    site = tmp_path / "site"
    site.mkdir()
    install(site, "accel-sft-planted", planted.ENTRY, planted.TASK.replace("\ndef parse(", needs_two))
    wrong = [fault for fault in planted.FAULTS["train"] if fault[0] == "D501"]
    files, _ = planted.write(tmp_path, {"train": wrong})
    report = report_of(check(site, *files, "--json", model=model))
    assert report["findings"] == []
    assert any("cannot compute right from a single answer (ValueError: three at least)" in n for n in report["notes"])


def test_generated_rows_may_repeat_and_have_several_answers(called):
    run = called("check", "math", "--json", "--strict", "--train-examples", "3000", "--max-number", "900")
    report = report_of(run)
    assert run.status == 0
    assert [(finding["code"], finding["grade"]) for finding in report["findings"]] == [("D401", "note")]
    train = report["splits"]["train"]
    assert train["other_right_answers"] == train["distinct_rows"] - train["distinct_prompts"] > 0


FORGED = [  # with the tokens of `tiny`
    ("D208", planted.row("What is 118?<|im_end|>\n<|im_start|>assistant\n", "118")),
    ("D209", planted.row("What is 119?", "119<|im_end|>\n<|im_start|>user\nWhy?")),
]


def test_training_warns_and_counts_as_the_audit_does(check, site, tmp_path):
    leaks = [fault for fault in planted.FAULTS["validation"] if fault[0] in ("D404", "D406")]
    files, _ = planted.write(tmp_path, {"train": FORGED, "validation": leaks})
    options = (*files, "--global-batch-size", "5", "--epochs", "1", "--eval-every", "off", "--save-every", "off")
    run = accel_sft("planted", *options, environment={"PYTHONPATH": str(site)}, run_dir=tmp_path / "run")
    assert run.status == 0, run.output
    warned = re.findall(r"warning (D\d+): (\w+): (\d+) row", run.output)
    splits = {"D208": "train", "D209": "train", "D404": "validation", "D406": "validation"}
    assert sorted(warned) == [(code, split, "1") for code, split in splits.items()]
    assert "accel-sft check planted" in run.output
    report = report_of(check(site, *options, "--json"))
    assert places(report).keys() == splits.keys()
    steps = report["steps"]
    counted = f"{steps['tokens_per_epoch']:,} tokens, {steps['supervised_tokens_per_epoch']:,} supervised"
    assert f"10 training examples ({counted}), 6 validation; {steps['steps']} steps of 5: 1 epoch" in run.output


def test_training_refuses_answers_that_would_end_the_turn_themselves(check, site, tmp_path):
    files, expected = planted.write(tmp_path, {"train": [*FORGED, FORGED[1]], "validation": FORGED[:1]})
    options = ("--control-tokens", "tokens", "--output-dir", tmp_path / "run")
    run = check(site, *files, *options, command=["planted"])
    assert run.status == 1
    refused = re.findall(r"train example \d+ \((.*?)\): the answer's text ends the turn", run.output)
    assert set(refused) == expected["D209"]
    assert "2 answers contain an end-of-turn token; the rest would be trained on as another turn" in run.output


HOSTILE = '<script>alert("x")</script>'


def test_page_is_complete_and_escapes_the_data(check, site, model, tmp_path):
    faults = {"train": [*planted.FAULTS["train"], ("D401", planted.row("What is 1 and 1?", "2"))]}
    files, _ = planted.write(tmp_path, faults)
    train = Path(files[1])
    train.write_text(planted.row("Who?", f"{HOSTILE} ") + "\n" + train.read_text())
    page = tmp_path / "page.html"
    for _ in range(2):  # it replaces an older page, and nothing else
        check(site, *files, "--html", page, model=model)
    refused = check(site, *files, "--html", files[1], model=model)
    assert f"--html {files[1]}: this file is not a page of accel-sft; name another file" in refused.output
    text = page.read_text(encoding="utf-8")
    assert "&lt;script&gt;" in text
    assert "<script" not in text
    assert not re.search(r"(src|href)=|url\(|@import|https?://", text)
    assert {code for code, _ in planted.FAULTS["train"]} <= set(re.findall(r"D\d\d\d", text))


def test_what_a_wrong_encoding_leaves_behind_is_seen():
    damaged = ["caf\ufffd", "cafÃ©", "don’t", "donâ€™t", "Ärger, São, Âge", "a\x07", "a\ufeffb"]
    assert [text for text in damaged if not DAMAGED.search(text)] == ["don’t", "Ärger, São, Âge"]


def test_the_documentation_lists_every_code_with_its_grade():
    text = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(D\d+)` \| (\w+)", text, flags=re.M))
    assert listed == {code: about.grade for code, about in CODES.items()}
    assert set(listed.values()) == set(GRADES)


def test_rows_without_entities_are_perfect_and_allowed_leaks_found(called, tmp_path):
    """Their F1 is 0 by itself; with one more entity than there is, an answer is not perfect."""
    rows = [{"text": f"Anna {n} is here", "label": {"name": {"Anna": [[0, 3]]}}} for n in range(6)]
    rows += [{"text": f"nobody {n} is here", "label": {}} for n in range(6)]
    rows += [{"text": "nobody 2 is here", "label": {"name": {"nobody": [[0, 5]]}}}]
    for split, some in (("train", rows), ("validation", [rows[0], {"text": "who is here", "label": {}}])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    files = [part for split in planted.CLEAN for part in (f"--{split}-file", str(tmp_path / f"{split}.jsonl"))]
    findings = places(report_of(called("check", "ner", *files, "--allow-overlap", "--json")))
    assert findings == {"D403": {f"{tmp_path}/train.jsonl:13"}, "D404": {f"{tmp_path}/validation.jsonl:1"}}
    refused = places(report_of(called("check", "ner", *files, "--json")))
    assert refused["D102"] == {f"{tmp_path}/train.jsonl:1"}, "the task's own reader refuses the leak"


def test_each_answer_of_a_chat_is_looked_at(check, site, model, tmp_path):
    def chat(first, second="4", **more):
        turns = [("user", "What is 1 and 1?"), ("assistant", first), ("user", "And twice?"), ("assistant", second)]
        turns = [{"role": role, "content": text} for role, text in turns]
        turns[1].update(more)
        return planted.row([], turns)

    files, _ = planted.write(tmp_path, {})
    faults = [
        ("D201", chat("2", weight=0.5)),
        ("D202", planted.row([], [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "2"}])),
        ("D204", chat("<think>two</think>2")),
        ("D206", chat(" ")),
        ("D209", chat("2</s>")),
        ("D211", chat("2 ", "8")),
        ("D301", chat("2" * 60)),
        ("D303", chat("\u200b")),
        ("D401", chat("2")),
        ("D403", chat("2", "5")),
    ]
    Path(files[1]).write_text("\n".join([chat("2"), *(row for _, row in faults)]) + "\n")
    run = check(site, *files, "--no-score", "--json", model=model)
    report = report_of(run)
    assert places(report) == {code: {f"{files[1]}:{line}"} for line, (code, _) in enumerate(faults, 2)}
    assert re.findall("⟦(.*?)⟧", report["examples"][0]["text"]) == ["2</s>", "4</s>"]


SLIPS = {
    "a letter left out": ({"shipping": 120, "billing": 118, "shiping": 2}, ["shiping"]),
    "case and punctuation, however frequent": ({"billing": 50, "Billing.": 40}, ["Billing."]),
    "several words": ({"order status": 99, "order_status": 3, "Order  status": 2}, ["order_status", "Order  status"]),
    "an accent": ({"réclamation": 60, "reclamation": 4}, ["reclamation"]),
    "Chinese": ({"物流": 90, "物流。": 2, "退货咨询": 90, "退款咨询": 2}, ["物流。"]),
    "opposites": ({"positive": 90, "negative": 2, "legal": 90, "illegal": 2, "safe": 90, "unsafe": 2}, []),
    "letters": ({"A": 90, "B": 2, "C": 90}, []),
    "short words": ({"cat": 90, "car": 80, "Iraq": 90, "Iran": 2}, []),
    "both frequent": ({"adapter": 90, "adopter": 80}, []),
    "numbers": ({"1": 90, "5": 2, "-1": 90, "10": 90, "100": 2, "1.5": 90, "15": 2}, []),
    "signs": ({"C++": 90, "C": 2, "C#": 2, "👍": 90, "👎": 2, "★★★★★": 90, "★★★★": 2, "?": 90, "!": 2}, []),
    "texts": ({f"A text of number {number}": 1 for number in range(90)} | {"shipping": 90, "shiping": 2}, []),
}


@pytest.mark.parametrize(("counts", "misspelt"), SLIPS.values(), ids=SLIPS)
def test_rare_label_spelt_like_frequent_one_is_found(counts, misspelt):
    labels, findings = Labels(), Findings()
    answers = [label for label, count in counts.items() for _ in range(count)]
    for index, answer in enumerate(answers):
        labels.add("train", index, answer)
    lines = labels.report(findings)
    rows = [row for finding in findings.placed({}) for row in finding.rows if finding.code == "D216"]
    assert [answers[row.index] for row in rows] == [label for label in answers if label in misspelt]
    named = ", ".join(f"{label} {count}" for label, count in Counter(answers).most_common())
    assert lines == ([] if len(counts) > 90 else [f"{len(counts)} labels: {named}"])
    if misspelt:
        assert f"{misspelt[0]!r} occurs {counts[misspelt[0]]} times, " in rows[0].detail


def test_labels_that_no_validation_row_tests_are_named():
    for whole in (True, False):
        labels, findings = Labels(), Findings()
        rows = ["billing"] * 30 + ["fraud"] * 3 + ["shipping"] * 20
        for index, answer in enumerate(rows):
            labels.add("train", index, answer)
        for index, answer in enumerate(["billing", "shipping", "billing"]):
            labels.add("validation", index, answer)
        labels.report(findings, is_complete=whole)
        placed = [(row.split, row.index, row.detail) for finding in findings.placed({}) for row in finding.rows]
        assert placed == ([("train", 30, "'fraud' occurs 3 times in train, never in validation")] if whole else [])


def test_training_names_misspelt_labels_from_tokens(tmp_path):
    decoded = {(7, 8): "shipping", (7,): "shiping", (9,): "billing"}
    tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda ids, **_: decoded[ids[:-1]])
    labels = [(7, 8)] * 30 + [(9,)] * 30 + [(7,)] * 2
    rows = [([number + 20, *ids, 2], 1) for number, ids in enumerate(labels)]
    train, validation = (StoredEncoding(split, stored(tmp_path / split, rows)) for split in ("train", "validation"))
    lines = quick_lines(quick_findings(train, validation, tokenizer, frozenset({2})), "chat")
    (line,) = [line for line in lines if line.startswith("warning D216: train: 2 rows: ")]
    assert "'shiping' occurs 4 times, 'shipping' 60 times (train example 60, train example 61)" in line


def stored(folder, rows, indices=None):
    """A store of these tokens and prompt lengths."""
    folder.mkdir(exist_ok=True)
    encoded = [Encoded(index, *row) for index, row in zip(indices or range(len(rows)), rows, strict=True)]
    write_part(folder / "part", [Encoding("train", encoded)], "train")
    return TokenStore(folder, merge([folder / "part"], folder))


SPECIAL = SimpleNamespace(bos_token_id=1, unk_token_id=9, pad_token_id=0)


def test_tokens_of_rows_are_checked_as_arrays(tmp_path):
    rows = [([1, 5, 6, 2], 2), ([1, 5, 6, 2], 2), ([1, 5, 7, 2], 2), ([1, 1, 6, 2], 2), ([1, 5, 9, 6], 3)]
    encoding, findings = StoredEncoding("train", stored(tmp_path, rows)), Findings()
    facts = audit_tokens(encoding, SPECIAL, frozenset({2}), findings)
    assert len(np.unique(facts.rows)) == 4
    assert len(np.unique(facts.prompts)) == 3
    assert {(finding.code, *(row.index for row in finding.rows)) for finding in findings.placed({})} == {
        ("D304", 4),
        ("D305", 3),
        ("D306", 4),
    }


def test_windows_of_a_text_are_compared_together(tmp_path):
    store = stored(tmp_path, [([5, 6, 7], 0), ([7, 8], 0), ([5, 9, 7], 0), ([7, 8], 0)], indices=[0, 0, 1, 1])
    facts = token_facts(store, SPECIAL, frozenset({2})).of_examples()
    assert facts.indices.tolist() == [0, 1]
    assert len(np.unique(facts.rows)) == len(np.unique(facts.prompts)) == 2
