"""The ner task: its built-in sentences, the rows it accepts and refuses, and what its scorer counts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from chats import jsonl

from accel_sft import UserError
from accel_sft_ner import Ner, scorer
from accel_sft_ner.sentences import held_out

ROW = {"text": "浙商银行企业信贷部叶老桂博士则从另一个角度", "label": {"name": {"叶老桂": [[9, 11]]}}}
OTHER = {"text": "她说没有。", "label": {}}


@pytest.fixture(scope="module")
def ner():
    return Ner(train_sentences=3_000, validation_sentences=100)


def from_rows(tmp_path, *rows, validation=(OTHER,), **options):
    files = {"train_file": jsonl(tmp_path / "train.json", rows)}
    return Ner(**files, validation_file=jsonl(tmp_path / "dev.json", validation), **options)


def refusal(tmp_path, *rows, **options):
    with pytest.raises(UserError) as refused:
        from_rows(tmp_path, *rows, **options).dataset("train")
    return refused.value.problems


def surfaces(sentences):
    return {surface for sentence in sentences for kind in sentence.label.values() for surface in kind}


def test_spans_hold_their_surfaces_and_mentions_have_spans(ner):
    for sentence in [*ner.dataset("train"), *ner.dataset("validation")]:
        for kind in sentence.label.values():
            for surface, spans in kind.items():
                assert all(sentence.text[first : last + 1] == surface for first, last in spans)
                assert len(spans) == sentence.text.count(surface)


def test_validation_sentences_are_new_and_many_surfaces_too(ner):
    train, validation = ner.dataset("train"), ner.dataset("validation")
    texts = [sentence.text for sentence in validation]
    assert len(train) == 3_000
    assert len(set(texts)) == 100
    assert not {sentence.text for sentence in train} & set(texts)
    assert not any(map(held_out, surfaces(train)))
    unseen = surfaces(validation) - surfaces(train)
    assert 0.4 < len(unseen) / len(surfaces(validation)) < 0.8


def test_options_choose_language_size_and_seed(ner):
    assert all(s.text.isascii() for s in Ner(train_sentences=50, language="en").dataset("train"))
    assert not any(s.text.isascii() for s in Ner(train_sentences=50, language="zh").dataset("train"))
    assert Ner(train_sentences=50, data_seed=1).dataset("train") != ner.dataset("train")[:50]
    assert Ner(train_sentences=50, validation_sentences=100).dataset("validation") == ner.dataset("validation")


def test_a_second_process_makes_the_same_sentences_without_importing_torch():
    program = (
        "import sys, zlib; from accel_sft_ner import Ner; task = Ner(train_sentences=200, validation_sentences=20)\n"
        "print(zlib.crc32(repr([task.dataset('train'), task.dataset('validation')]).encode()), 'torch' in sys.modules)"
    )
    printed = {subprocess.check_output([sys.executable, "-c", program], text=True) for _ in range(2)}
    assert [line.split()[1] for line in printed] == ["False"]


def test_published_rows_are_read_whatever_the_file_is_called(tmp_path):
    task = from_rows(tmp_path, ROW)
    (example,) = task.dataset("train")
    assert task.messages(example)[-1] == {"role": "user", "content": ROW["text"]}
    assert "JSON" in task.messages(example)[0]["content"]
    assert task.target(example) == '{"name": {"叶老桂": [[9, 11]]}}'
    assert task.target(task.dataset("validation")[0]) == "{}"


@pytest.mark.parametrize(
    ("row", "field", "said"),
    [
        ({"text": 3, "label": {}}, "text", "got 3"),
        ({"text": "a b"}, "label", "the field is missing"),
        ({"text": "a b", "label": []}, "label", "an object {type: {surface: [[first, last], ...]}}, got []"),
        ({"text": "a b", "label": {"name": ["a"]}}, "label.name", "got ['a']"),
        ({"text": "a b", "label": {"name": {"a": []}}}, "label.name.a", "with at least one, got []"),
        ({"text": "a b", "label": {"": {"a": [[0, 0]]}}}, "label", "a name for each type"),
        ({"text": "a b", "label": {"name": {"a": [[False, 0]]}}}, "label.name.a", "two integers, got [False, 0]"),
        ({"text": "a b", "label": {"name": {"b": [[2, 3]]}}}, "label.name.b", "last < 3 (the text's length)"),
        ({"text": "a b", "label": {"name": {"a": [[0, 1]]}}}, "label.name.a", "'a', got 'a ' at [0, 1]"),
        ({"text": "a b", "label": {"name": {"a": [[0, 0], [0, 0]]}}}, "label.name.a", "each span once, got"),
    ],
)
def test_bad_row_is_refused_by_file_line_and_field(tmp_path, row, field, said):
    (line,) = refusal(tmp_path, ROW, row)
    assert line.startswith(f"{tmp_path / 'train.json'}:2: field {field!r}: expected ")
    assert said in line


def test_all_problems_of_a_row_stand_on_its_line(tmp_path):
    (line,) = refusal(tmp_path, {"text": "a b", "label": {"name": {"a": [[1, 1]], "b": 3}, "book": None}})
    assert line.count("expected") == 3
    (line,) = refusal(tmp_path, {"text": "a b", "label": dict.fromkeys("123456789")})
    assert line.endswith("; and 4 more in this row")


TWO_FILES = {"train_file": "train.json", "validation_file": "dev.json"}


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"train_file": "train.json"}, ["--validation-file"]),
        ({"validation_file": "dev.json"}, ["--train-file"]),
        ({**TWO_FILES, "language": "zh", "data_seed": 3}, ["--language", "--data-seed"]),
        ({"allow_overlap": True}, ["--allow-overlap"]),
    ],
)
def test_options_without_their_file_or_effect_are_refused(options, flags):
    task = Ner(**options)
    assert [line.split(":")[0] for line in task.problems()] == flags
    with pytest.raises(UserError, match=flags[0]):
        task.dataset("train")


def test_validation_sentences_that_are_trained_on_are_refused_unless_allowed(tmp_path):
    problems = refusal(tmp_path, OTHER, ROW, validation=[OTHER, ROW])
    assert problems[0].startswith("--validation-file: 2 of 2 sentences are also trained on")
    assert "--allow-overlap" in problems[0]
    assert problems[2].startswith(
        f"{tmp_path}/dev.json:2: {ROW['text']!r} is also trained on ({tmp_path}/train.json:2)"
    )
    assert len(from_rows(tmp_path, ROW, validation=[ROW], allow_overlap=True).dataset("validation")) == 1


GOLD = {"name": {"Ann": [[0, 2], [8, 10]], "Bo": [[4, 5]]}, "book": {"Ulysses": [[12, 18]]}}


def metrics(*pairs, training_surfaces=()):
    scores = [scorer.score(gold, text, training_surfaces) for gold, text in pairs]
    return scorer.aggregate(json.loads(json.dumps(scores)))


def test_counts_by_hand():
    answer = '{"name": {"Ann": [[0, 2], [9, 11]], "Ulysses": [[12, 18]]}, "book": {"Ulysses": [[12, 18]]}}'
    assert scorer.score(GOLD, answer, {"Ann"}) == {
        "valid_json": 1,
        "valid_shape": 1,
        "entity": {"name": [1, 1, 1], "book": [1, 0, 0]},
        "strict": {"name": [1, 2, 2], "book": [1, 0, 0]},
        "unseen": [1, 1, 1],
    }
    scores = metrics((GOLD, answer), ({}, "{}"), ({"game": {"Go": [[0, 1]]}}, "no JSON"), training_surfaces={"Ann"})
    precision_recall_f1 = {
        "": (2 / 3, 2 / 4, 4 / 7),
        "macro_": ((1 / 2 + 1 + 0) / 3, (1 / 2 + 1 + 0) / 3, (2 / 4 + 1 + 0) / 3),
        "strict_": (2 / 4, 2 / 5, 4 / 9),
        "strict_macro_": ((1 / 3 + 1 + 0) / 3, (1 / 3 + 1 + 0) / 3, (2 / 6 + 1 + 0) / 3),
        "unseen_": (1 / 2, 1 / 3, 2 / 5),
    }
    expected = {"valid_json": 2 / 3, "valid_shape": 2 / 3, "unseen_entities": 3}
    for kind, values in precision_recall_f1.items():
        expected |= {f"{kind}{name}": value for name, value in zip(("precision", "recall", "f1"), values, strict=True)}
    assert scores == pytest.approx(expected)


def test_an_invented_type_lowers_micro_precision_only():
    scores = metrics((GOLD, json.dumps(GOLD | {"film": {"Bo": [[4, 5]]}})))
    assert scores["precision"] == 3 / 4
    assert scores["macro_precision"] == scores["macro_f1"] == scores["recall"] == 1
    nothing = metrics(({}, "{}"))
    assert (nothing["f1"], nothing["unseen_entities"], scorer.aggregate([])) == (0, 0, {})


@pytest.mark.parametrize(
    "text",
    [
        "```json\n" + json.dumps(GOLD) + "\n```",
        '{"name": {"Ann": [[0, NaN]]}}',
        '{"name": {}, "name": {"Bo": [[4]]}}',
        '{"name": {"\\ud800": [[0, 0]]}}',
        "[" * 100_000,
        '{"name": {"Ann": [[0, ' + "9" * 10_000 + "]]}}",
    ],
)
def test_an_answer_that_is_not_valid_json_holds_no_entities(text):
    scores = scorer.score(GOLD, text, ())
    assert scores["valid_json"] == scores["valid_shape"] == 0
    assert scores["entity"] == {"name": [0, 0, 2], "book": [0, 0, 1]}
    assert scores["unseen"] == [0, 0, 3]


@pytest.mark.parametrize("text", ["[]", '{"name": "Ann"}'])
def test_valid_json_of_another_shape_predicts_nothing(text):
    scores = scorer.score(GOLD, text, ())
    assert (scores["valid_json"], scores["valid_shape"]) == (1, 0)
    assert scores["entity"] == {"name": [0, 0, 2], "book": [0, 0, 1]}


@pytest.mark.parametrize("spans", ["null", "[[4]]", "[[true, 5]]"])
def test_spans_of_another_shape_count_as_entity_not_strictly(spans):
    scores = scorer.score(GOLD, f' {{"name": {{"Bo": {spans}}}, "book": 7}}\n', ())
    assert (scores["valid_json"], scores["valid_shape"]) == (1, 0)
    assert scores["entity"] == {"name": [1, 0, 1], "book": [0, 0, 1]}
    assert scores["strict"] == {"name": [0, 1, 3], "book": [0, 0, 1]}


def test_a_repeated_span_counts_once_and_escapes_are_text():
    scores = scorer.score({"name": {"叶": [[0, 0]]}}, '{"name": {"\\u53f6": [[0, 0], [0, 0]]}}', ())
    assert scores["strict"] == {"name": [1, 0, 0]}
    assert scorer.score({"game": {"😀": [[0, 0]]}}, '{"game": {"\\ud83d\\ude00": [[0, 0]]}}', ())["unseen"] == [1, 0, 0]


def test_gold_scores_one_and_unseen_counts_untrained_surfaces(ner):
    validation = ner.dataset("validation")
    scores = ner.aggregate([ner.score(example, ner.target(example)) for example in validation])
    assert {value for name, value in scores.items() if name != "unseen_entities"} == {1.0}
    trained = surfaces(ner.dataset("train"))
    assert scores["unseen_entities"] == sum(
        surface not in trained for sentence in validation for kind in sentence.label.values() for surface in kind
    )
    assert ner.main_metric in scores
