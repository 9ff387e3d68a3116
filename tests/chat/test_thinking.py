"""Templates in the behaviour of model families, each with thinking off, as the template does, and kept."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import models
import pytest
from accelerate import Accelerator
from answered import by_characters, scored_answers
from conftest import accel_sft, finished, stopped
from families import DAY, FAMILIES, MODES, NAMES, of_family
from models import encode
from transformers import AutoTokenizer

from accel_sft import UserError
from accel_sft.api.config import TrainConfig, changed
from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.chat.control_tokens import ControlTokens
from accel_sft.chat.encoded import Rules
from accel_sft.chat.form import closing_mark
from accel_sft.chat.rendering import Rendering
from accel_sft.chat.template import dated
from accel_sft.cli.task_tools import TOOLS
from accel_sft.data.tokenization import SplitEncoder
from accel_sft.evaluation.scoring import check_scoring
from accel_sft.models.source import Source
from accel_sft.models.tokenizer import load_tokenizer

ANSWERS = ["odd", "<b>odd</b>", "a\n\nb", "{'a': '>'}", "final", "think", "7"]
THOUGHTS = ["<think>two</think>odd", "<think>\nIs it?\nIt is.\n</think>\n\n<b>odd</b>"]


class Says(models.Says):
    def score(self, example, text):
        assert "think>" not in text
        return {"right": float(text == example.partition("</think>")[2].strip() or text == example)}


@pytest.fixture(scope="module", params=["bytes", "characters"])
def any_tokenizer(request, tiny):
    return AutoTokenizer.from_pretrained(tiny) if request.param == "bytes" else by_characters()


def encoded(own, ends, examples, thinking, task=None, **rules):
    rules = {"max_length": 4096, "truncation": "drop", "day": DAY, **rules}
    return encode(own, task or Says(), examples, "validation", eos_ids=ends, thinking=thinking, **rules)


def texts(own, example):
    """What of an example is prompt, and what is learnt."""
    ids, at = example.input_ids, example.prompt_length
    return own.decode(ids[:at]), own.decode(ids[at:])


def scored(own, encoding, examples, answers, thinking, task=None):
    settings = {"thinking": thinking, "template_date": DAY}
    return scored_answers(own, task or Says(), examples, encoding.kept, answers, **settings)


def learnt(encoding):
    return [example.input_ids[example.prompt_length :] for example in encoding.kept]


@pytest.mark.parametrize("thinking", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_learns_answers_and_scores_them_in_every_mode(any_tokenizer, name, thinking):
    own, ends = of_family(any_tokenizer, name)
    encoding = encoded(own, ends, ANSWERS, thinking)
    assert len(encoding.kept) == len(ANSWERS)
    stop = own.convert_tokens_to_ids(FAMILIES[name].learnt_end)
    prompts = {tuple(example.input_ids[: example.prompt_length]) for example in encoding.kept}
    assert len(prompts) == 1  # nothing of an answer is in its prompt
    for answer, ids in zip(ANSWERS, learnt(encoding), strict=True):
        assert [token for token in ids if token in ends] == [ids[-1]] == [stop]
        assert "".join(answer.split()) in "".join(own.decode(ids).split())
    evaluation = scored(own, encoding, ANSWERS, learnt(encoding), thinking)
    assert [sample["generated"] for sample in evaluation.samples] == ANSWERS
    assert evaluation.metrics["right"] == 1.0
    wrong = scored(own, encoding, ANSWERS, learnt(encoding)[1:] + learnt(encoding)[:1], thinking)
    assert wrong.metrics["right"] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_every_family_learns_thinking_and_scores_the_answer_alone(any_tokenizer, name):
    own, ends = of_family(any_tokenizer, name)
    encoding = encoded(own, ends, THOUGHTS, "keep")
    for ids, (thinking, answer) in zip(learnt(encoding), [("two", "odd"), ("It is.", "<b>odd</b>")], strict=True):
        text = own.decode(ids)
        assert text.index(thinking) < text.index(answer)
        assert text.count("<think>") <= 1
        assert text.count("</think>") <= 1
    evaluation = scored(own, encoding, THOUGHTS, learnt(encoding), "keep")
    assert [sample["generated"] for sample in evaluation.samples] == ["odd", "<b>odd</b>"]
    assert [sample["expected"] for sample in evaluation.samples] == ["odd", "<b>odd</b>"]
    assert evaluation.metrics["right"] == 1.0
    text = own.decode(learnt(encoding)[0])
    cut = own(text[: text.index("two") + 2], add_special_tokens=False)["input_ids"]
    evaluation = scored(own, encoding, THOUGHTS, [cut, cut], "keep")
    assert [sample["generated"] for sample in evaluation.samples] == ["", ""], "thinking without an end"


def test_scoring_check_leaves_out_kept_thinking():
    check_scoring(Says(), THOUGHTS, "keep")
    with pytest.raises(UserError, match=r"score\(\) failed on '<think>two"):
        check_scoring(Says(), THOUGHTS, "template")


JOB = ("--max-steps", "6", "--global-batch-size", "8", "--train-examples", "24", "--validation-examples", "5")
JOB += ("--learning-rate", "1e-3", "--save-every", "3", "--keep-checkpoints", "5", "--eval-every", "3", "--seed", "5")
JOB += ("--max-length", "256", "--micro-batch-size", "4", "--batching", "padded")


@pytest.fixture(scope="module")
def whole_run(tiny, tmp_path_factory):
    """A run of a model whose template writes the date and thinks, started on a day that is long past."""
    folder = tmp_path_factory.mktemp("thinking")
    shutil.copytree(tiny, folder / "model")
    own, _ = of_family(AutoTokenizer.from_pretrained(tiny), "Qwen3.5")
    own.chat_template = (
        "{{ '<|im_start|>' }}system\nToday: {{ strftime_now('%d %b %Y') }}<|im_end|>\n" + own.chat_template
    )
    own.save_pretrained(folder / "model")
    arguments = ("math", "--model", str(folder / "model"), *JOB)
    run = finished(*arguments, "--template-date", DAY, "--thinking", "off", run_dir=folder / "run")
    return run, arguments


def test_run_with_a_dated_template_resumes_on_another_day(whole_run, tmp_path):
    run, arguments = whole_run
    record = json.loads((run.run_dir / "run.json").read_text())
    assert (record["config"]["thinking"], record["config"]["template_date"]) == ("off", DAY)
    begun = stopped(run, tmp_path / "run", 3)
    same = ("--thinking", "off", "--resume", "auto")
    resumed = finished(*arguments, *same, run_dir=begun)  # today is another day
    assert "step-000003 at step 3 of 6" in resumed.output
    assert json.loads((begun / "run.json").read_text())["config"]["template_date"] == DAY
    assert resumed.lines() != []
    name = "final/model.safetensors"
    assert (begun / name).read_bytes() == (run.run_dir / name).read_bytes()
    again = accel_sft(*arguments, *same, run_dir=begun)
    assert "this run is finished" in again.output


def test_evaluation_and_card_of_a_run_ask_as_it_did(whole_run, tmp_path):
    run, _ = whole_run
    command = ("evaluate", "math", "--model", str(run.run_dir), "--validation-examples", "5")
    evaluated = finished(*command, run_dir=tmp_path / "own")
    note = f"note: using this run's best/ weights; for the weights of its last step, name {run.run_dir / 'final'}\n"
    assert note in evaluated.output  # as generate, merge and push take them
    assert evaluated.result()["weights"] == {"model": str(run.run_dir / "best")}
    after = evaluated.result()["after"]
    assert after["eval_loss"] == pytest.approx(run.result()["after"]["eval_loss"], rel=1e-4)
    (block,) = re.findall(r"^```python\n(.*?)^```", (run.run_dir / "final" / "README.md").read_text(), re.S | re.M)
    assert "enable_thinking=False" in block, "the card's lines ask as training did, too"


SPELT = [
    ("Qwen3", "off", "odd", "assistant\n<think>\n\n</think>\n\n", "odd<|im_end|>"),
    ("Qwen3", "keep", THOUGHTS[0], "assistant\n", "<think>\ntwo\n</think>\n\nodd<|im_end|>"),
    ("Qwen3.5", "template", "odd", "assistant\n<think>\n", "\n</think>\n\nodd<|im_end|>"),
    ("Qwen3.5", "off", "odd", "assistant\n<think>\n\n</think>\n\n", "odd<|im_end|>"),
    ("Qwen3.5", "keep", THOUGHTS[0], "assistant\n<think>\n", "two\n</think>\n\nodd<|im_end|>"),
    ("DeepSeek-R1", "template", "odd", "<|Assistant|><think>\n", "\n</think>\n\nodd<|eos|>"),
    ("DeepSeek-R1", "off", "odd", "<|Assistant|><think>\n\n</think>\n\n", "odd<|eos|>"),
    ("DeepSeek-V3.1", "keep", THOUGHTS[0], "What?<|Assistant|><think>", "two</think>odd<|eos|>"),
    ("Gemma 2", "template", "odd", "Say it.\n\nWhat?<end_of_turn>\n<start_of_turn>model\n", "odd<end_of_turn>"),
    ("Gemma 4", "template", "odd", "<|turn>model\n<|channel>thought\n<channel|>", "odd<turn|>"),
    ("Mistral v0.3", "template", "odd", "<s>[INST] Say it.\n\nWhat?[/INST]", " odd</s>"),
    ("SmolVLM", "template", "odd", "User: What?<end_of_utterance>\nAssistant:", " odd<end_of_utterance>"),
    ("gpt-oss", "template", "odd", "<|start|>assistant", "<|channel|>final<|message|>odd<|return|>"),
    (
        *("gpt-oss", "keep", THOUGHTS[0], "<|start|>assistant"),
        "<|channel|>analysis<|message|>two<|end|><|start|>assistant<|channel|>final<|message|>odd<|return|>",
    ),
    (
        *("Granite 3.3", "keep", THOUGHTS[0], 'assistant {"thinking": true}<|end_of_role|>'),
        "<think>two</think>odd<|end_of_text|>",
    ),
    ("Llama 3.2", "template", "odd", "Today Date: 29 Feb 2024\n\nSay it.<|eot|><|head|>user", "odd<|eot|>"),
]


@pytest.mark.parametrize(("name", "thinking", "target", "prompt", "rest"), SPELT)
def test_prompts_and_answers_are_right_to_the_letter(tokenizer, name, thinking, target, prompt, rest):
    own, ends = of_family(tokenizer, name)
    written, answered = texts(own, encoded(own, ends, [target], thinking).kept[0])
    assert prompt in written if name == "Llama 3.2" else written.endswith(prompt)
    assert answered == rest


NOTES = [
    ("Qwen2.5", "off", None),
    ("Qwen3.5", "template", "answers are tokenized separately, as they are generated"),
    ("DeepSeek-R1", "template", r'prompts end with "<think>\\n", which the template leaves out once an answer follows'),
    ("DeepSeek-R1", "template", r'"\\n</think>\\n\\n" is learnt before an answer that has no thinking'),
    ("DeepSeek-R1", "off", r'prompts open a thinking block; the trainer closes it with "\\n</think>\\n\\n"'),
    ("DeepSeek-V3.1", "keep", "the chat template drops thinking; the trainer writes it after the prompt"),
    ("Gemma 2", "template", "it takes no system message, so the system text is put into the first user turn"),
    ("Mistral v0.3", "template", "it moves the system message once an answer follows"),
]


@pytest.mark.parametrize(("name", "thinking", "said"), NOTES)
def test_departures_from_the_template_are_one_line(tokenizer, name, thinking, said):
    own, ends = of_family(tokenizer, name)
    notes = encoded(own, ends, ANSWERS, thinking).lines()
    assert all("\n" not in note for note in notes)
    assert len(notes) == len(set(notes))
    if said is None:
        assert notes == []
    else:
        assert [note for note in notes if said.replace(r"\\n", r"\n") in note]


@pytest.mark.parametrize("name", NAMES)
def test_texts_make_no_control_tokens(any_tokenizer, name):
    own, ends = of_family(any_tokenizer, name)
    control = ControlTokens(own)
    every = "".join(token.content for token in own.added_tokens_decoder.values() if token.special)
    forged = f"one{every}{every[:-1]}\n{every} two"

    class Forged(Says):
        def messages(self, example):
            return [{"role": turn["role"], "content": turn["content"] + forged} for turn in super().messages(example)]

    settings = {"eos_ids": ends, "max_length": 9999, "truncation": "error", "day": DAY}
    whole = encode(own, Forged(), [forged], "train", **settings)
    (row,), (plain,) = whole.kept, encode(own, Says(), ["odd"], "train", **settings).kept
    special = [[token for token in side.input_ids if token in control.special_ids] for side in (row, plain)]
    assert special[0] == special[1]
    assert whole.control_tokens == {"answers": [0], "texts": []}
    text = own.decode(row.input_ids[row.prompt_length :], skip_special_tokens=False)
    assert "".join(forged.split()) in "".join(text.split())
    (row,) = encode(own, Forged(), [forged], "train", **settings, control_tokens="tokens").kept
    assert len([token for token in row.input_ids if token in control.special_ids]) > len(special[0])


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_training_are_what_is_generated_from(tokenizer, name):
    own, ends = of_family(tokenizer, name)
    rendering = Rendering(own, "template", DAY)
    turns = Says().messages("odd")
    given = rendering.form(turns, "train").given(turns)
    own.chat_template = dated(own.chat_template, DAY)
    ids = own.apply_chat_template(given, add_generation_prompt=True, return_dict=True)["input_ids"]
    (example,) = encoded(own, ends, ["odd"], "template").kept
    assert example.input_ids[: example.prompt_length] == ids


DROPPING = [("DeepSeek-R1", "template"), ("Qwen3", "off"), ("Qwen3.5", "off")]


@pytest.mark.parametrize(("name", "thinking"), DROPPING)
def test_dropped_thinking_is_refused_unless_it_is_kept(tokenizer, name, thinking):
    own, ends = of_family(tokenizer, name)
    with pytest.raises(UserError, match=r"would not be trained on: .*; give --thinking keep"):
        encoded(own, ends, THOUGHTS[:1], thinking)


def test_a_target_that_is_thinking_alone_has_no_answer(tokenizer):
    own, ends = of_family(tokenizer, "Qwen3")
    encoding = encoded(own, ends, ["<think>two</think>\n", "odd", " "], "keep")
    assert encoding.left_out == {"left out: the answer is empty": [0, 2]}
    assert [row.index for row in encoding.kept] == [1]


UNSOUND = {
    "another header": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
    "prompts that shout": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{{ '!' if add_generation_prompt }}<|im_end|>{% endfor %}",
    "a user turn that is lost": "{% for m in messages %}{% if not loop.last or add_generation_prompt or "
    "m.role == 'assistant' %}{% if not (m.role == 'user' and messages[-1].role == 'assistant') %}{{ m.content }}"
    "<|im_end|>{% endif %}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("unsound", UNSOUND.values(), ids=UNSOUND)
def test_prompt_that_is_never_a_prefix_is_refused(tokenizer, unsound):
    own, ends = of_family(tokenizer, "Qwen2.5")
    own.chat_template = unsound
    for thinking, target in (("template", "odd"), ("off", "odd"), ("keep", "odd"), ("keep", THOUGHTS[0])):
        with pytest.raises(UserError, match="the prompt is not a prefix of prompt"):
            encoded(own, ends, [target], thinking)


FAILING = {
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}": "RecursionError: maximum recursion depth",
    "{% if %}": "Expected an expression",
    "{{ raise_exception('no\nthanks \x1b[2J') }}": r"no\\nthanks \\x1b\[2J",
}


@pytest.mark.parametrize("failing", FAILING)
def test_template_that_fails_is_one_line(tokenizer, failing):
    own, ends = of_family(tokenizer, "Qwen2.5")
    own.chat_template = failing
    with pytest.raises(UserError, match=r"^validation( example 0)?: the model's chat .*roles system/user") as refused:
        encoded(own, ends, ["odd"], "template")
    (line,) = refused.value.problems
    assert re.search(FAILING[failing], line)
    assert line.isprintable()


def test_template_that_writes_no_prompt_is_one_line(tokenizer):
    own, ends = of_family(tokenizer, "Qwen2.5")
    answer_alone = "{% if not add_generation_prompt %}{{ messages[-1].content }}{% endif %}"
    for own.chat_template, message in (
        ("{{ '' }}", "the answer would not be trained on"),
        (answer_alone, "left out: the chat template writes no prompt"),
    ):
        with pytest.raises(UserError, match=message):
            encoded(own, ends, ["odd"], "template")


def test_messages_without_a_user_turn_are_warned_of(tokenizer):
    class Completes(Says):
        def messages(self, example):
            return [{"role": "system", "content": "Once upon a time"}]

    own, ends = of_family(tokenizer, "Qwen2.5")
    (line,) = encoded(own, ends, ["odd", "even"], "template", Completes()).lines()
    assert line == "warning: some chats have no user turn (roles system); check that messages() intends this"


def test_the_day_is_the_runs_and_not_todays(tokenizer):
    formats = "%Y-%m-%d|%d %b %Y|%d %B %Y|%-d.%-m.|%A|%H:%M"
    for day, expected in (
        (DAY, "2024-02-29|29 Feb 2024|29 February 2024|29.2.|Thursday|00:00"),
        ("2025-01-05", "2025-01-05|05 Jan 2025|05 January 2025|5.1.|Sunday|00:00"),
    ):
        own, ends = of_family(tokenizer, "Qwen2.5")
        own.chat_template = (
            "\n  {% macro m() %}{{ strftime_now('" + formats + "') }}{% endmacro %}[{{ m() }}]" + own.chat_template
        )
        prompt, _ = texts(own, encoded(own, ends, ["odd"], "template", day=day).kept[0])
        assert prompt.startswith(f"\n[{expected}]<|im_start|>system")
    assert dated("no date", DAY) == "no date"


def test_thinking_and_the_day_are_part_of_the_caches_key(tokenizer):
    def key(name, **changes):
        own, ends = of_family(tokenizer, name)
        rules = dataclasses.replace(Rules(frozenset(ends), 512, "drop", "template", DAY), **changes)
        return SplitEncoder(Accelerator(cpu=True), own, Says(), rules).key(["odd"], "train")

    assert key("Llama 3.2") == key("Llama 3.2")
    assert len({key("Llama 3.2"), key("Llama 3.2", thinking="off"), key("Llama 3.2", day="2024-03-01")}) == 3
    assert key("Qwen3") == key("Qwen3", day="2024-03-01")  # which writes no date


def test_template_in_a_json_file_of_its_own_is_read(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    text = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    source = Source(str(folder), str(folder))
    assert load_tokenizer(source, trust_remote_code=False).chat_template == text
    (folder / "chat_template.json").unlink()
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(source, trust_remote_code=False)


def test_marks_that_open_a_block_and_those_that_close_it():
    pairs = {"<think>\n": "</think>", "[THINK]": "[/THINK]", "◁think▷": "◁/think▷", "<seed:think>": "</seed:think>"}
    pairs |= {"<|START_THINKING|>": "<|END_THINKING|>", "<|channel>thought\n": "<channel|>"}
    for opening, closing in pairs.items():
        assert closing_mark("<|im_start|>assistant\n" + opening) == closing
        assert closing_mark(opening + closing) is None
    assert closing_mark("<|im_start|>assistant\n") is closing_mark("<think>\nSo") is closing_mark("[/INST]") is None


def test_the_settings_of_the_templates_are_part_of_the_run():
    before = TrainConfig(template_date=DAY).resolved({}).as_dict()
    assert changed(before, {**before}) == []
    (line,) = changed(before, {**before, "thinking": "keep"})
    assert line == "--thinking: the run was started with template, not keep"
    earlier = {key: value for key, value in before.items() if key not in ("thinking", "template_date")}
    assert changed(earlier, before) == []
    assert EvaluateConfig(model="run").thinking is None  # the run's own
    assert {"thinking", "template_date"} <= TOOLS["evaluate"].takes
    for day in ("today", "2024-02-30", "20240229"):
        (line,) = TrainConfig(template_date=day).problems()
        assert "--template-date" in line
        assert line.endswith("expected a day as YYYY-MM-DD")
