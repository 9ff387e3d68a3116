"""Answers are those of plain, separate generation, and generating leaves no trace in the model (laws 3 and 4)."""

import contextlib
import json
import re

import architectures
import pytest
import torch
from accelerate import Accelerator
from conftest import finished
from models import Sums, encode
from peft import LoraConfig, get_peft_model
from reference_job import layout
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    GemmaForCausalLM,
    GenerationConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2ForCausalLM,
)

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.batching.layouts import Batching
from accel_sft.chat.encoded import Encoded, end_of_turn_ids
from accel_sft.evaluation import decoder
from accel_sft.evaluation.decoder import Decoder
from accel_sft.evaluation.evaluator import Evaluator
from accel_sft.evaluation.generate import CHECKED_ROWS, Generator, common_prefix, divide
from accel_sft.io.heartbeat import heartbeat_count
from accel_sft_math import Math

NEW_TOKENS = 12
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def examples(tokenizer):
    """Prompts of several lengths behind one instruction."""
    numbers = [7, 12, 123, 5, 48, 1234, 12, 99, 31, 8]
    eos = {tokenizer.eos_token_id}
    encoded = encode(tokenizer, Sums(), numbers, "validation", eos_ids=eos, max_length=99, truncation="drop").kept
    assert len({example.prompt_length for example in encoded}) == 4
    return encoded


class Asserting(Qwen2ForCausalLM):
    """Takes masks of two dimensions only, and says so without a message."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if attention_mask is not None and attention_mask.ndim > 2:
            raise AssertionError
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


class Lost(Qwen2ForCausalLM):
    """Takes positions, and does not look at them."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        return super().forward(input_ids, **kwargs)


def build(kind, tiny, vocabulary):
    """A small model; its weights are large enough for answers to depend on all of the prompt."""
    torch.manual_seed(1)
    common = {**SMALL, "vocab_size": vocabulary, "initializer_range": 0.2}
    classes = {"tiny": Qwen2ForCausalLM, "lora": Qwen2ForCausalLM, "lost": Lost, "asserting": Asserting}
    if kind in classes:
        model = classes[kind].from_pretrained(tiny)
    elif kind == "eager":
        model = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager")
    elif kind == "convolution":
        types = ["conv", "full_attention"]
        model = Lfm2ForCausalLM(Lfm2Config(**common, num_key_value_heads=2, layer_types=types, block_multiple_of=32))
    elif kind == "llama":  # queries share heads of keys
        model = LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=2))
    elif kind == "gemma":  # heads wider than the model
        model = GemmaForCausalLM(GemmaConfig(**common, num_key_value_heads=1, head_dim=32))
    else:
        window = int(kind.removeprefix("window of "))
        model = MistralForCausalLM(MistralConfig(**common, num_key_value_heads=2, sliding_window=window))
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))  # tied, it repeats what it reads
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def separately(model, tokenizer, examples, new_tokens=NEW_TOKENS):
    """Each question alone, by transformers' own `generate`, and end of turn as the model's file says."""
    ends = sorted(end_of_turn_ids(tokenizer, model.generation_config))
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    answers = {}
    for example in examples:
        ids = torch.tensor([example.input_ids[: example.prompt_length]])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        answers[example.index] = output[0, ids.shape[1] :].tolist()
    return answers


def end_early(model, tokenizer, examples):
    """Let some frequent tokens end a turn, so that answers have several lengths; the answers then."""
    whole = separately(model, tokenizer, examples)
    ends = {answer[min(2 + number, len(answer) - 1)] for number, answer in enumerate(list(whole.values())[:4])}
    model.generation_config.eos_token_id = sorted(ends)
    answers = separately(model, tokenizer, examples)
    assert len({len(answer) for answer in answers.values()}) >= 3
    return answers


def generated(model, tokenizer, examples, batch_size=64, new_tokens=NEW_TOKENS):
    generator = Generator(Accelerator(cpu=True), tokenizer, model, batch_size)
    with torch.no_grad():
        return {example.index: ids for example, ids in generator(examples, new_tokens).answers}, generator


@pytest.mark.parametrize("kind", ["tiny", "llama", "gemma", "lora", "window of 4096"])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_answers_behind_a_shared_prefix_are_those_of_separate_questions(kind, batch_size, tiny, tokenizer, examples):
    model = build(kind, tiny, len(tokenizer))
    expected = end_early(model, tokenizer, examples)
    answers, generator = generated(model, tokenizer, examples, batch_size)
    prefix = common_prefix(examples)
    assert generator.message == f"answers: the {prefix} tokens that all prompts begin with are computed once"
    assert answers == expected


def test_each_token_is_computed_once_until_its_row_ends(tiny, tokenizer, examples):
    model = build("llama", tiny, len(tokenizer))
    whole = separately(model, tokenizer, examples)
    model.generation_config.eos_token_id = [whole[examples[0].index][0], whole[examples[1].index][4]]
    expected = separately(model, tokenizer, examples)
    assert {1, NEW_TOKENS} <= {len(answer) for answer in expected.values()}  # ends at once, is cut
    generator = generated(model, tokenizer, examples, 4)[1]  # has compared the decoder with single rows
    computed = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].numel()))
    with torch.no_grad():
        answers = {example.index: ids for example, ids in generator(examples, NEW_TOKENS).answers}
    assert answers == expected
    prefix = common_prefix(examples)
    prompts = sum(example.prompt_length - prefix for example in examples)
    assert sum(computed) == prefix + prompts + sum(len(answer) - 1 for answer in expected.values())


def test_a_row_starts_while_others_go_on(tiny, tokenizer, examples, monkeypatch):
    """Lengths and places are such that groups are joined, shrink, grow and take rows in; answers stay those of each."""
    monkeypatch.setattr(decoder, "GROWTH", 3)
    monkeypatch.setattr(decoder, "MOST_GROUPS", 2)
    monkeypatch.setattr(decoder, "READ_TOKENS", 40)
    model = build("llama", tiny, len(tokenizer))
    expected = end_early(model, tokenizer, examples)
    joined = []
    join = decoder.Group.joined
    monkeypatch.setattr(decoder.Group, "joined", lambda *groups: joined.append(1) or join(*groups))
    assert generated(model, tokenizer, examples, 5)[0] == expected
    assert joined


def test_questions_without_a_common_prefix_are_answered_alike(tiny, tokenizer, examples):
    model = build("llama", tiny, len(tokenizer))
    bare = [Encoded(row.index, row.input_ids[row.index :], row.prompt_length - row.index) for row in examples]
    expected = end_early(model, tokenizer, bare)
    answers, generator = generated(model, tokenizer, bare)
    assert generator.message == "answers: each prompt is computed in full"
    assert answers == expected


def test_question_that_others_begin_with_keeps_a_token(tiny, tokenizer, examples):
    model = build("tiny", tiny, len(tokenizer))
    ids = examples[0].input_ids
    nested = [Encoded(index, ids, 20 + index) for index in range(5)]
    assert common_prefix(nested) == 19
    answers, _ = generated(model, tokenizer, nested)
    assert answers == separately(model, tokenizer, nested)


REFUSED = {
    "window of 8": "the model has layers without full attention (SlidingWindowLayer)",
    "convolution": "the model has layers without full attention (LinearAttentionLayer)",
    "eager": "attention eager does not support a shared prefix; sdpa supports it",
    "lost": "its predictions after a shared prefix differ from those of single rows (by ",
    "asserting": "the model does not support a shared prefix (AssertionError)",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_model_that_cannot_share_generates_by_transformers_with_reason(kind, tiny, tokenizer, examples):
    model = build(kind, tiny, len(tokenizer))
    expected, before = end_early(model, tokenizer, examples), heartbeat_count()
    answers, generator = generated(model, tokenizer, examples, batch_size=4)
    assert generator.message.startswith(f"answers are generated by transformers, because {REFUSED[kind]}")
    assert answers == expected
    assert heartbeat_count() - before >= max(map(len, answers.values()))  # one a token, for the watch over hangs


def test_prompts_that_padding_changes_are_answered_by_length(tmp_path):
    folder = architectures.make(tmp_path / "model", "deepseek_v4")
    model, tokenizer = architectures.load(folder), AutoTokenizer.from_pretrained(folder)
    numbers = [7, 12, 123, 5, 48, 1234, 12, 10**6, 10**12, 10**20]
    eos = {tokenizer.eos_token_id}
    rows = encode(tokenizer, Sums(), numbers, "validation", eos_ids=eos, max_length=199, truncation="drop").kept
    answers, generator = generated(model, tokenizer, rows)
    assert "; only prompts of equal length are answered together, because padding changes its pred" in generator.message
    assert answers == separately(model, tokenizer, rows)


@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_batches_give_every_row_to_one_rank_evenly(ranks, batch_size, examples):
    few = [[Encoded(index, [1] * (5 + index % 4), 4) for index in range(count)] for count in range(1, 20)]
    for rows, alike in [(examples, True), *((rows, False) for rows in (examples, *few))]:
        batches = divide(rows, ranks, batch_size, equal_lengths=alike)
        run = [row.index for batch in batches for share in batch for row in share]
        assert sorted(run) == [row.index for row in rows]
        for batch in batches:
            counts = [*map(len, batch)]
            assert len(counts) == ranks
            assert 0 < max(counts) <= min(batch_size, min(counts) + 1), "one has a row for ranks that have run out"
            assert not alike or len({row.prompt_length for share in batch for row in share}) == 1
        work = [sum(len(row.input_ids) for batch in batches for row in batch[rank]) for rank in range(ranks)]
        assert alike or max(work) - min(work) <= 2 * max(len(row.input_ids) for row in rows)


def evaluated(model, tokenizer, examples, task):
    config = TrainConfig(max_new_tokens=3).resolved({})
    accelerator = Accelerator(cpu=True)
    backend = Generator(accelerator, tokenizer, model, None, log=print)
    evaluator = Evaluator(accelerator, tokenizer, task, range(len(examples)), examples, config, backend)
    return evaluator(model, Batching("padded", 256))


def test_evaluation_leaves_mode_gradients_and_random_state(tiny, tokenizer, examples, capsys):
    model = build("lora", tiny, len(tokenizer)).train()
    state = torch.get_rng_state()
    evaluated(model, tokenizer, examples, Sums())
    assert capsys.readouterr().out.startswith("answers: the ")
    failing = type("Failing", (Sums,), {"score": lambda *_: None})()
    with pytest.raises(UserError, match="expected a dict"):
        evaluated(model, tokenizer, examples, failing)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_evaluation_without_memory_ends_with_one_line(tiny, tokenizer, examples, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("no room")

    model = build("tiny", tiny, len(tokenizer))
    for full_up, method, flag in ((Generator, "__call__", "--eval-batch-size"), (model, "forward", "--max-length")):
        monkeypatch.setattr(full_up, method, full)  # the loss is computed before the answers
        with pytest.raises(UserError, match=rf"evaluation: out of device memory \(no room\); lower {flag}"):
            evaluated(model, tokenizer, examples, Sums())


def test_an_evaluation_that_finds_no_room_goes_on_in_halves(tiny, tokenizer, examples, capsys):
    model = build("tiny", tiny, len(tokenizer))
    whole = evaluated(model, tokenizer, examples, Sums())

    def cramped(module, inputs):
        if inputs[0].numel() > 60:
            raise torch.OutOfMemoryError("no room")

    model.get_input_embeddings().register_forward_pre_hook(cramped)
    halved = evaluated(model, tokenizer, examples, Sums())
    said = capsys.readouterr().out
    assert f"out of device memory with {len(examples)} rows at once: computing them in halves" in said  # answers
    assert len(re.findall("out of device memory with [2-9] rows at once", said)) >= 2  # and the loss
    assert [sample["generated"] for sample in halved.samples] == [sample["generated"] for sample in whole.samples]
    assert halved.metrics["eval_loss"] == pytest.approx(whole.metrics["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("most", [1, 0])
def test_decoder_check_takes_no_shortage_for_a_refusal(most, tiny, tokenizer, examples, monkeypatch):
    def forward(self, new=(), real=Decoder.forward):
        if len(new) > most:
            raise torch.OutOfMemoryError("no room")
        return real(self, new)

    monkeypatch.setattr(Decoder, "forward", forward)
    generator = Generator(Accelerator(cpu=True), tokenizer, build("tiny", tiny, len(tokenizer)), None)
    with torch.no_grad(), contextlib.nullcontext() if most else pytest.raises(torch.OutOfMemoryError):
        generator.choose(examples, NEW_TOKENS)
    assert generator.message.endswith("are computed once" if most else "")


def test_the_decoders_check_computes_few_logits(tiny, tokenizer, examples):
    counts = []
    model = build("tiny", tiny, len(tokenizer))
    model.lm_head.register_forward_pre_hook(lambda module, inputs: counts.append(inputs[0].shape[1]))
    with torch.no_grad():
        Generator(Accelerator(cpu=True), tokenizer, model, None).choose(examples, NEW_TOKENS)
    assert max(counts) <= CHECKED_ROWS


@pytest.mark.parametrize("yaml", ["z3", pytest.param("ddp", marks=pytest.mark.long)])
def test_three_ranks_answer_as_plain_transformers_do(launched, tmp_path, yaml):
    run = layout(launched, "plain")
    launcher = {"yaml": yaml, "launcher": ("--mixed_precision", "no", "--num_processes", "3")}
    command = ("evaluate", "math", "--model", str(run.run_dir), "--validation-examples", "13", "--eval-limit", "11")
    command += ("--max-new-tokens", "20")
    done = finished(*command, run_dir=tmp_path / "run", **launcher)
    assert "tokens that all prompts begin with are computed once" in done.output
    assert "full precision" not in done.output  # which is said of trainings without a launcher
    task, folder = Math(train_examples=500, validation_examples=13), run.run_dir / "best"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    answers, scores = [], []
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples-tuned.jsonl").read_text().splitlines()]
    drawn = [sample["index"] for sample in samples]
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 11
    for example in (task.dataset("validation")[index] for index in drawn):
        form = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        ids = tokenizer.apply_chat_template(task.messages(example), **form)["input_ids"]
        ids, length = model.generate(ids, do_sample=False, max_new_tokens=20), ids.shape[1]
        answers.append(tokenizer.decode(ids[0, length:], skip_special_tokens=True))
        scores.append(task.score(example, answers[-1]))
    assert [sample["generated"] for sample in samples] == answers
    after = done.result()["after"]
    assert {name: after[name] for name in task.aggregate(scores)} == pytest.approx(task.aggregate(scores), nan_ok=True)
