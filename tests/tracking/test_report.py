"""A report shows base beside tuned and lists the answers; no markup in an answer takes effect."""

import io
import json
import math
import re
import subprocess
import sys

import pytest
import yaml
from report_card import AFTER, BEFORE, RESULT, card
from rich.cells import cell_len
from rich.console import Console

from accel_sft import UserError
from accel_sft.io.files import write_atomically, write_json_lines
from accel_sft.io.run_dir import RunDir
from accel_sft.results.labels import label_scores, label_tables, weakest_label
from accel_sft.results.model_card import of_merged
from accel_sft.results.resampled import add_intervals
from accel_sft.results.run_report import comparison_rows, print_report, render_report, write_report
from accel_sft_chat import Chat


def sample(index, generated, **scores):
    return {"index": index, "prompt": f"{index}=", "expected": "1 + 2", "generated": generated, "scores": scores}


def printed(result, before, after, width=80):
    """What `print_report` prints on a console of this width, none of whose lines is longer."""
    console = Console(file=io.StringIO(), width=width)
    print_report(result, before, after, console=console)
    text = console.file.getvalue()
    assert max(map(cell_len, text.splitlines())) <= width
    return text


def test_the_result_is_json_whatever_the_numbers_and_survives_a_failed_write(tmp_path):
    path = RunDir(tmp_path).write_result({"before": {"eval_loss": math.nan}, "list": [math.inf, 1.5]})
    assert json.loads(text := path.read_text()) == {"before": {"eval_loss": None}, "list": [None, 1.5]}
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == text


def test_answers_are_read_as_they_were_written(tmp_path):
    run_dir = RunDir(tmp_path)
    rows = [sample(0, text) for text in ("a\u2028b\u2029c\x85d", "a\x0c\x1e\r\nb", "")]
    run_dir.samples.mkdir()
    write_json_lines(run_dir.answers(4), rows)
    assert run_dir.read_samples(4) == rows
    assert run_dir.read_samples(8) == []


@pytest.mark.parametrize("content", [b"{", b"\xff\n", b"[" * 100_000])
def test_answers_that_were_damaged_are_refused_in_a_line(tmp_path, content):
    RunDir(tmp_path).samples.mkdir()
    RunDir(tmp_path).answers(4).write_bytes(content)
    with pytest.raises(UserError, match=r"step-000004.jsonl: has 1 unreadable lines; remove it, and go on with --"):
        RunDir(tmp_path).read_samples(4)


def test_metrics_come_first_then_loss_then_costs():
    assert comparison_rows(BEFORE, AFTER) == [
        ("accuracy", "0", "1", "+1"),
        ("validation loss", "4.5", "0.01", "-4.49"),
        ("time for all answers (s)", "19.7", "29.55", ""),  # of a moment of the process, not of a model
        ("generated tokens/s", "20.3", "12.1", ""),
    ]
    one_side = comparison_rows({"generate_seconds": 0.0, "note": "text"}, {"accuracy": 0.5, "loss": None})
    assert one_side == [("accuracy", "", "0.5", ""), ("time for all answers (s)", "0", "", "")]


def test_the_page_has_training_comparison_memory_and_answers(tmp_path):
    before = [sample(index, "?", accuracy=0.0) for index in range(30)]
    after = [sample(index, "1 + 2", accuracy=1.0) for index in range(30)]
    page = write_report(
        RunDir(tmp_path), {**RESULT, "stop_reason": "at step 60 (--patience 2)"}, before, after
    ).read_text()
    for part in (
        "# math tiny\n",
        "| training time (s) | 61.5 |",
        "| stopped early | at step 60 (--patience 2) |",
        "| accuracy | 0 | 1 | +1 |",
        "## Answers (20 of 30, all in `samples/`)",
        "| 19 | 19= | 1 + 2 | ? | 1 + 2 | accuracy 0 | accuracy 1 |",
    ):
        assert part in page
    page = render_report({**RESULT, "stop_reason": None}, before, after)
    assert "peak device memory" not in page  # there was no device
    assert "stopped early" not in page


def test_answers_are_joined_by_index_and_take_no_effect_in_the_page():
    page = render_report({"status": "complete"}, [sample(1, "b1"), sample(0, "b0")], [sample(2, "t2"), sample(0, "t0")])
    for row in ("| 0 | 0= | 1 + 2 | b0 | t0 |", "| 1 | 1= | 1 + 2 | b1 |  |", "| 2 | 2= | 1 + 2 |  | t2 |"):
        assert row in page
    assert "## Training" not in page
    page = render_report({}, [], [sample(0, "<script>|**b**\n`c`\x1b[2J" + "x" * 400)])
    assert "## Answers (1 of 1, all in `samples-tuned.jsonl`)" in page
    row = page.splitlines()[-1]
    assert "<script>" not in row
    assert row.count("|") == 8
    assert "&#96;c&#96;&#92;x1b" in row
    assert "more characters)" in row
    assert "\x1b" not in row


def test_the_terminal_report_fits_eighty_columns():
    before = [sample(index, "王大丫丫的回答是--->" * 20, accuracy=0.0) for index in range(30)]
    after = [sample(index, "a" * 500 + "\x1b[2J\nb", accuracy=1.0) for index in range(30)]
    many = {"surface_micro_f1_on_entities_never_seen_in_training_at_all_of_any_type": 0.123456}
    text = printed({"before": {**BEFORE, **many}, "after": {**AFTER, **many}}, before, after)
    assert not re.search(r"\x1b|x1b", text)  # a control character has one cell
    assert text.index("answers (5 of 30)") < text.index("base and tuned")
    assert re.search(r"^ *accuracy +0 +1 +\+1 *$", text, re.M)
    assert "..." in text  # a long answer is cut


def labelled(*counted, key="exact_match"):
    """Answers to examples with labels, by (expected, generated, number of such examples)."""
    return [
        {"index": 0, "prompt": "?", "expected": label, "generated": answer, "scores": {key: float(label == answer)}}
        for label, answer, count in counted
        for _ in range(count)
    ]


def test_scores_by_label_are_scikit_learns():
    given = labelled(("a b", "a b", 5), ("a b", "c", 2), ("c", "c", 3), ("c", "nonsense", 1), ("other", "a b", 2))
    result = {"before": {}, "after": {"exact_match": 8 / 13}}
    add_intervals(result, Chat(train_file="-", metric="exact"), [], given, None)
    # classification_report(expected, generated, labels=["a b", "c", "other"], zero_division=0)
    expected = {"a b": (5 / 7, 5 / 7, 5 / 7), "c": (3 / 5, 3 / 4, 2 / 3), "other": (0, 0, 0)}
    for label, shares in expected.items():
        row = result["labels"][label]
        assert (row["precision"], row["recall"], row["f1"]) == pytest.approx(shares)
    assert result["macro_f1"] == pytest.approx((5 / 7 + 2 / 3) / 3)
    assert result["labels"]["c"]["answers"] == {"c": 3, "": 1}
    assert weakest_label(result).endswith("0.460 over 3 labels; 'other' has the lowest recall, 0 of 2; see report.md")
    page = render_report(result, [], given)
    for row in (
        "| c | 4 | 0.600 | 0.750 | 0.667 |",
        "| macro mean |  | 0.438 | 0.488 | 0.460 |",
        "| c |  | 3 |  | 1 |",
    ):
        assert row in page


def test_an_answer_that_is_another_label_counts_as_that():
    given = labelled(("yes", "yes", 5), ("Yes", "yes", 5), ("no", "No.", 5))
    for answer in given:
        answer["scores"]["exact_match"] = 1.0  # as a metric without case and punctuation has it
    scores = label_scores(given, "exact_match")
    assert {label: row["answers"] for label, row in scores["labels"].items()} == {
        "yes": {"yes": 5}, "Yes": {"yes": 5}, "no": {"no": 5}
    }  # fmt: skip
    assert scores["macro_f1"] == pytest.approx((2 / 3 + 0 + 1) / 3)


def test_confusion_table_has_few_labels_and_counts_all_answers():
    given = labelled(*((str(number), str((number + 1) % 20), 20 - number) for number in range(20)))
    (_, _, scores), (title, header, rows) = label_tables(label_scores(given, "exact_match")["labels"])
    assert len(scores) == 21
    assert (len(header), len(rows), title) == (14, 12, "Answers by expected label, the 12 most frequent")
    assert [sum(int(count or 0) for count in row[1:]) for row in rows] == list(range(20, 8, -1))
    assert rows[-1] == ["11", *[""] * 12, "9"]  # 12 is not among them


@pytest.mark.parametrize(
    "given",
    [
        labelled(*((f"text {number}", "text", 1) for number in range(30))),
        labelled(("a", "a", 30)),
        labelled(("a", "a", 10), ("b", "b", 10), key="other_metric"),
    ],
    ids=["texts", "one label", "another metric"],
)
def test_answers_that_are_no_labels_have_no_scores_by_label(given):
    assert label_scores(given, "exact_match") == {}


@pytest.mark.parametrize("damage", [5, {"a": 1}, {"a": {"examples": "x"}}, {"a": {"answers": {"a": "x"}}}])
def test_labels_of_another_form_are_left_out(damage):
    assert "Scores by label" not in render_report({"labels": damage}, [], [])


def test_an_evaluation_without_a_base_has_one_side():
    text = printed({"after": AFTER}, [], [sample(0, "[/red] [bold]x[/bold]", accuracy=1.0)], 120)
    assert "base" not in text
    assert "change" not in text
    assert re.search(r"^ *accuracy +1 *$", text, re.M)
    assert "[/red] [bold]x[/bold]" in text  # markup is shown and not obeyed


@pytest.mark.parametrize(
    ("scores", "marks"),
    [({"accuracy": 1.0}, ["yes", "no"]), ({"accuracy": 0.25}, ["0.25", "no"]), ({"true_positives": 3}, ["1", "1"])],
    ids=["right", "partly", "no example has the metric alone"],
)
def test_each_answer_is_marked_by_its_own_main_metric(scores, marks):
    after = [sample(0, "1", **scores), sample(1, "1", **dict.fromkeys(scores, 0.0))]
    text = printed({"before": BEFORE, "after": AFTER, "main_metric": "accuracy"}, after, after)
    assert [line.split()[-1] for line in text.split("answers (2 of 2)")[1].splitlines() if "=" in line] == marks


def test_base_and_tuned_say_which_weights_they_are():
    named = {**RESULT, "weights": {"base": "tiny before the first step", "tuned": "final/, of step 100"}}
    for text in (printed(named, [], []), render_report(named, [], []), card(result=named)):
        assert "base: tiny before the first step; tuned: final/, of step 100" in text


def test_card_names_base_task_scores_and_data():
    text = card()
    meta = yaml.safe_load(text.split("---\n")[1])
    assert meta["base_model"] == "org/model-0.5B"
    assert meta["library_name"] == "transformers"
    for part in ("| accuracy | 0 | 1 | +1 |", "| training examples | 1798 |", "| torch | 2.13 |", "0.0001"):
        assert part in text
    assert "| train-file | rows.json |" in text
    assert "\n## Command\n\n```bash\naccelerate launch -m accel_sft math --seed 7\n```\n" in text
    assert "/somewhere" not in text
    assert "max_steps" not in text
    assert text.count("````") == 2  # a fence that the prompt's own does not close
    assert '"role": "system"' in text
    assert "`model-0.5B`, fine-tuned for the task `math` with accel_sft." in text
    assert "max_new_tokens=17," in text


def test_cards_prompt_is_that_of_training():
    assert 'return_tensors="pt"\n' in card()
    assert 'return_tensors="pt", enable_thinking=False\n' in card(template_arguments={"enable_thinking": False})
    closed = card(template_arguments={"thinking": False}, prompt_end="\n</think>\n\n")
    assert "tokenize=False, thinking=False)" in closed
    assert r"tokenizer(prompt + '\n</think>\n\n', add_special_tokens=False" in closed
    assert closed.count("print(answer)\n") == 1
    assert r"print(answer.removesuffix('<|im_end|>\n'))" in card(answer_end="<|im_end|>\n")


def test_card_of_an_adapter_or_of_merged_weights_names_what_it_is(tmp_path):
    text = card(adapter="lora", base_model=str(tmp_path / "base"))
    meta = yaml.safe_load(text.split("---\n")[1])
    assert (meta["library_name"], "base_model" in meta, str(tmp_path) in text) == ("peft", False, False)
    assert "AutoPeftModelForCausalLM.from_pretrained" in text
    asked = {"task": "math", "config": {"load_in_4bit": True, "thinking": "off"}}
    merged = of_merged(card(adapter="lora", asked=asked, model_class="AutoModelForImageTextToText"))
    meta = yaml.safe_load(merged.split("---\n")[1])
    assert meta["accel_sft"] == {"task": "math", "config": {"thinking": "off"}}
    assert meta["pipeline_tag"] == "image-text-to-text"


def test_reports_are_written_without_torch():
    check = "import accel_sft.results.run_report, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
