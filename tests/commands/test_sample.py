"""`accel-sft sample`: answers to training prompts, drawn as the model says, scored by the task, and the rows of OUT."""

from __future__ import annotations

import json
import math

import pytest
import torch
from accelerate import Accelerator
from conftest import finished
from models import Sums, encode
from reference_job import layout, own_task
from scipy.stats import chisquare
from served_model import Served, serving
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from accel_sft.api.errors import UserError
from accel_sft.api.tool_configs import SampleConfig
from accel_sft.chat.conversation import Conversation, read_split
from accel_sft.chat.encoded import Encoded
from accel_sft.commands.sample import Answer, kept_rows
from accel_sft.evaluation.decoder import Decoder
from accel_sft.evaluation.generate import Sampling, generate
from accel_sft.evaluation.sampling import Sampler, drawn, uniform
from accel_sft_chat import Chat
from accel_sft_math import Math

DRAWS = 4000


@pytest.fixture(scope="module")
def run(launched):
    return layout(launched, "plain").run_dir


def words(run, *more):
    return ("sample", "math", "--model", str(run), "--same-data", "--samples", "3", "--rows", "300", *more)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sampler(model, tokenizer, batch_size=None):
    return Sampler(Accelerator(cpu=True), tokenizer, model, batch_size)


def answers(sampled):
    return {(example.index, number): (ids, value) for example, number, ids, value in sampled}


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8)])
def test_samples_have_the_distribution_of_the_model_and_of_transformers(temperature, top_p, tokenizer):
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, initializer_range=0.5, **sizes)).eval()
    model.generation_config.eos_token_id = None
    prompt = [1, 2, 3]
    config = SampleConfig(samples=DRAWS, temperature=temperature, top_p=top_p)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        logits = model(torch.tensor([prompt])).logits[0, -1].double() / temperature
        sampled = sampler(model, tokenizer).sample([Encoded(0, [*prompt, 4], 3)], 1, config)
        how = {"num_return_sequences": DRAWS, "sampling": Sampling(temperature, top_p)}
        theirs, _ = generate(model, [prompt], 1, set(), 0, torch.device("cpu"), **how)
    expected, order = logits.softmax(-1).sort(descending=True)
    expected[expected.cumsum(-1) - expected >= top_p] = 0
    kept = [token for token, share in zip(order.tolist(), expected.tolist(), strict=True) if share]
    shares = expected[expected > 0] / expected.sum()
    assert len(kept) == 8 if top_p == 1 else 2 <= len(kept) < 8
    assert len(sampled) == DRAWS
    for drawn_tokens in ([ids for _, _, (ids,), _ in sampled], [ids for (ids,) in theirs]):
        counts = torch.tensor(drawn_tokens).bincount(minlength=8)[kept]
        assert counts.sum() == DRAWS  # no other token
        assert chisquare(counts.numpy(), (shares * DRAWS).numpy()).pvalue > 0.001


def test_draws_are_each_rows_own_and_certain_at_the_edges():
    whole = uniform(7, 3, 1, 50)
    assert (uniform(7, 3, 1, 20) == whole[:20]).all()
    others = [uniform(*key, 50) for key in [(8, 3, 1), (7, 4, 1), (7, 3, 2)]]
    assert all((other != whole).all() for other in others)
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).repeat(2, 1)
    edges = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert drawn(logits, edges, 1.0).tolist() == [1, 2]


def test_prompts_are_read_once_and_samples_do_not_depend_on_neighbours(tiny, tokenizer, monkeypatch, capsys):
    eos = {tokenizer.eos_token_id}
    numbers = [7, 12, 123, 5, 48, 1234, 12, 99, 31, 8]
    examples = encode(tokenizer, Sums(), numbers, "train", eos_ids=eos, max_length=99, truncation="drop").kept
    model, read = AutoModelForCausalLM.from_pretrained(tiny).eval(), []
    config = SampleConfig(samples=5, seed=1, keep="best", prefer="likeliest")
    forward = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda self, new=(): read.append(len(new)) or forward(self, new))
    with torch.no_grad():
        ours = sampler(model, tokenizer)
        ours.choose(examples, 8)
        read.clear()
        whole = answers(ours.sample(examples, 8, config))
        assert sum(read) == 1 + len(examples)  # the prefix, and each prompt once
        few = answers(sampler(model, tokenizer, 2).sample(examples[3:6], 8, config))
        for key, (ids, value) in few.items():
            assert whole[key][0] == ids
            example = next(one for one in examples if one.index == key[0])
            prompt = example.input_ids[: example.prompt_length]
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            assert value == pytest.approx(logits[range(len(ids)), ids].sum().item(), abs=1e-3)
        assert len({tuple(ids) for ids, _ in whole.values()}) > 20

        def scarce(self, new=()):
            if len(self.live) + sum(1 + len(row.twins) for row in new) > 12:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(self, new)

        monkeypatch.setattr(Decoder, "forward", scarce)
        halved = answers(ours.sample(examples, 8, config))
        assert "computing them in halves" in capsys.readouterr().out
        assert {key: ids for key, (ids, _) in halved.items()} == {key: ids for key, (ids, _) in whole.items()}
        assert [value for _, value in halved.values()] == pytest.approx([whole[key][1] for key in halved], abs=1e-3)


def test_models_without_the_decoder_sample_by_transformers(tiny, tokenizer):
    examples = [Encoded(index, [5, 6, 7 + index, 3], 3) for index in range(3)]
    model = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager").eval()
    config, lines = SampleConfig(samples=4, temperature=2.0), []
    ours = Sampler(Accelerator(cpu=True), tokenizer, model, None, log=lines.append)
    with torch.no_grad():
        first, again = (answers(ours.sample(examples, 6, config)) for _ in range(2))
        with pytest.raises(UserError, match=r"likeliest: only the trainer's own decoder keeps likelihoods; .* eager"):
            ours.sample(examples, 6, SampleConfig(keep="best", prefer="likeliest"))
    assert first == again
    assert first.keys() == {(index, number) for index in range(3) for number in range(4)}
    assert len({tuple(ids) for ids, _ in first.values()}) > 6
    assert "--eval-batch-size" in lines[-1]


def test_bytes_are_the_same_on_any_ranks_and_chat_reads_them(run, tmp_path):
    alone, best = tmp_path / "alone.jsonl", tmp_path / "best.jsonl"
    done = finished(*words(run, str(alone)))
    for yaml, ranks in (("ddp", "3"), ("z3", "2")):
        launcher = ("--mixed_precision", "no", "--num_processes", ranks)
        finished(*words(run, str(tmp_path / yaml)), yaml=yaml, launcher=launcher)
        assert (tmp_path / yaml).read_bytes() == alone.read_bytes()
    task, rows = Math(train_examples=500, validation_examples=7), rows_of(alone)
    train, validation = ([task.messages(row) for row in read_split(task, split)] for split in ("train", "validation"))
    prompts = [row["messages"][:-1] for row in rows]
    assert all(prompt in train and prompt not in validation for prompt in prompts)
    assert 0 < len({json.dumps(prompt) for prompt in prompts}) <= 300
    shares = r".*% never right, .*% sometimes, .*% always"
    said = done.says(rf"300 prompts, 3 answers each: {shares}; \d+ duplicates, \d+ cut").split()
    assert int(said[-2]) > 0
    assert 0 < len(rows) < 900 - int(said[-4])  # answers that were cut, or are blank, are not learnt
    finished(*words(run, "--keep", "best", "--threshold", "0", str(best)))
    assert 0 < len(rows_of(best)) <= 300
    trained = read_split(Chat(train_file=f"{alone},{best}", validation_file=str(best)), "train")
    assert len(trained) == len([*rows, *rows_of(best)])
    assert any(note.startswith("not read: score") for note in trained.notes), trained.notes


def test_rows_that_are_kept():
    question, answer = ({"role": role, "content": role} for role in ("user", "assistant"))
    chat = Conversation([question], answer, tools=[{"name": "f"}])
    told = [("right and long", True, -1.0, 1.0), ("right", True, -9.0, 1.0), ("cut", False, 0.0, 1.0)]
    told += [("wrong", True, -1.0, 0.0), ("bad", True, -2.0, 0.0), (" ", True, 0.0, -1.0)]
    all_answers = [Answer(0, text, whole, known, {"m": value}, value) for text, whole, known, value in told]

    def kept(answers=all_answers, **options):
        return kept_rows(chat, answers, SampleConfig(**options), 1.0)

    def texts(rows):
        return [row["messages"][-1]["content"] for row in rows]

    everything = kept()
    assert texts(everything) == ["right and long", "right", "wrong", "bad"]
    assert all(row["tools"] == chat.tools for row in everything)
    assert texts(kept(keep="best")) == ["right"]
    assert texts(kept(keep="best", prefer="likeliest")) == ["right and long"]
    assert kept(all_answers[2:], keep="best") == []  # the only right one is cut
    (pair,) = kept(keep="pairs")
    assert [pair[side][0]["content"] for side in ("chosen", "rejected")] == ["right", "bad"]
    assert (pair["prompt"], pair["score_chosen"], pair["score_rejected"]) == (chat.turns, {"m": 1.0}, {"m": 0.0})
    assert "messages" not in pair
    chat = Conversation(chat.turns, chat.answer, continued=True)  # a text stays a text
    assert all(row["completion"] == text for row, text in zip(kept(), texts(everything), strict=True))
    (pair,) = kept(keep="pairs")
    assert [pair[side] for side in ("prompt", "chosen", "rejected")] == [chat.turns[0]["content"], "right", "bad"]
    assert kept(all_answers[:3], keep="pairs") == kept(all_answers[2:3], keep="pairs") == []


def test_server_samples_with_seeds_of_their_own(run, called, tmp_path):
    final, out = str(run / "final"), tmp_path / "out.jsonl"
    served = Served(AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final))
    data = ("--train-examples", "20", "--validation-examples", "4")
    with serving(served) as url:
        command = ("sample", "math", "--url", url, *data, "--rows", "2", "--samples", "2", "--max-new-tokens", "4")
        done = called(*command, "--temperature", "0.5", "--seed", "3", str(out))
        assert done.status == 1, done.output
        done.says("OUT .*: no answer can be kept; train the model further")
        assert "2 prompts, 2 answers each" in done.output
        assert called(*command, "--base", "x", str(out)).status != 0
        served.form = "plain"
        refused = called(*command, "--keep", "best", "--prefer", "likeliest", str(tmp_path / "other.jsonl"))
    bodies = [body for path, _, body in served.asked if path == "/v1/chat/completions"][:4]
    assert len({body["seed"] for body in bodies}) == 4
    assert {(body["temperature"], body["top_p"]) for body in bodies} == {(0.5, 1.0)}
    done.says(r"2 duplicates, 4 cut \(raise --max-new-tokens\)")  # the server is greedy, and no answer ends
    assert not out.exists()
    assert "the server gives no log-probabilities" in refused.output


def test_what_cannot_be_sampled_is_refused_or_left_out_by_name(run, called, tmp_path):
    (tmp_path / "there.jsonl").write_text("")
    new = str(tmp_path / "new.jsonl")
    for arguments, problem in (
        ((str(tmp_path / "there.jsonl"), "--dry-run"), "there.jsonl: exists; name a new file"),
        ((str(tmp_path / "there.jsonl/new.jsonl"), "--dry-run"), "its folder cannot be made"),
        ((new, "--thinking", "keep"), "add --thinking off"),
        ((new, "--prefer", "likeliest"), "--prefer cannot be used without --keep best"),
    ):
        done = called(*words(run), *arguments)
        assert (done.status, problem in " ".join(done.output.split())) == (1, True), done.output
    assert called(*words(run), new, "--dry-run").status == 0
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    rows = [{"messages": [turns[0], {"role": "assistant", "tool_calls": [call]}]}, {"text": "raw"}]
    rows.append({"prompt": "1", "completion": "one"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "validation.jsonl").write_text(json.dumps(rows[2]) + "\n")
    files = ("--train-file", f"{tmp_path}/train.jsonl", "--validation-file", f"{tmp_path}/validation.jsonl")
    done = called("sample", "chat", "--model", str(run), *files, new)
    said = " ".join(done.output.split())
    assert done.status == 1
    assert "left out: 2 examples have images, raw text or tool calls, which cannot be sampled (the first: train" in said
    assert "left out: 1 examples have a prompt of the validation split" in said
    assert "no training example is left" in said
    losses = called("sample", "chat", "--model", str(run), *files, "--metric", "perplexity", new)
    assert "perplexity scores no answers" in " ".join(losses.output.split())
    own = own_task(tmp_path, "def aggregate(self, scores):\n    return {'accuracy': 1 / (len(scores) - 1)}")
    few = ("--train-examples", "20", "--validation-examples", "4", "--rows", "3")
    together = called("sample", own, "--model", str(run), *few, new)
    assert (together.status, "aggregate() failed" in together.output) == (1, True)
    assert "answers: " not in together.output  # nothing was sampled
    assert not (tmp_path / "new.jsonl").exists()
