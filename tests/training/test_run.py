"""A run from its first step to its last, stopped and resumed, with everything it leaves behind; real processes."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import accel_sft, finished, stopped
from limits import limit
from reference_job import JOB, LAYOUTS, MICRO, ONCE, goes_on_to_the_same_bits, layout, own_task, same_curve
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft import UserError
from accel_sft.checkpoint.shards import Averages
from accel_sft.resilience.signals import Interruption
from accel_sft.training.trainer import Trainer


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_an_interpreter_that_has_trained_ends_without_a_word(tmp_path):
    command = [sys.executable, "-m", "accel_sft", *JOB[:-2], "--max-steps", "1", "--eval-every", "off"]
    done = subprocess.run([*command, "--output-dir", str(tmp_path / "run")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tuned" not in done.stdout + (tmp_path / "run" / "report.md").read_text()  # nothing was judged


def test_finished_run_ends_with_commands_to_copy(launched, called):
    run = layout(launched, "plain")
    *_, first, second, third, fourth = run.output.splitlines()
    name, *report = first.split()
    generate, evaluate, tensorboard = (line.split() for line in (second, third, fourth))
    assert name == "next:"
    assert tensorboard == ["tensorboard", "--logdir", str(run.run_dir)]
    assert generate == ["accel-sft", "generate", str(run.run_dir), "PROMPT"]
    for tool in (report, evaluate):
        assert called(*tool[1:], "--help").status == 0
        assert tool[-1] == str(run.run_dir)


def test_run_that_failed_before_beginning_can_start_again(called, tmp_path):
    rows = tmp_path / "rows.json"
    rows.write_text('[{"instruction": "5=", "input": "", "output": "wrong"}]')
    files = ("--train-file", str(rows), "--validation-file", str(rows))
    failed = called("math", "--max-steps", "1", *files, run_dir=tmp_path / "run")
    assert failed.status == 1
    assert f"{rows} row 1: field 'output'" in failed.output
    few = ("--train-examples", "60", "--max-steps", "1", "--eval-every", "off")
    finished("math", *few, run_dir=tmp_path / "run")


@pytest.mark.parametrize("name", ["plain", "z3"])
def test_final_and_best_load_in_plain_transformers(launched, name):
    run = layout(launched, name)
    for folder in ("final", "best"):
        model = AutoModelForCausalLM.from_pretrained(run.run_dir / folder)
        tokenizer = AutoTokenizer.from_pretrained(run.run_dir / folder)
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": "5="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] > ids["input_ids"].shape[1]
        card = (run.run_dir / folder / "README.md").read_text()
        assert re.search(r"base: tiny before the first step; tuned: these weights, of step [36]\n", card)
        assert "GiB" not in card
        sha256 = json.loads((run.run_dir / "run.json").read_text())["data_sha256"]
        assert f"| SHA-256 of the tokens | {sha256} |" in card
        (command,) = re.findall(r"^## Command\n\n```bash\n(.*)\n```", card, re.M)
        assert run.options["yaml"] is None or re.match("accelerate.* math --max-steps", command), command


def test_the_cards_own_lines_give_the_answer_the_run_gave(launched):
    run = layout(launched, "plain")
    (block,) = re.findall(r"^```python\n(.*?)^```", (run.run_dir / "final" / "README.md").read_text(), re.S | re.M)
    assert "max_new_tokens=6," in block  # the run's own
    done = subprocess.run([sys.executable, "-c", block], cwd=run.run_dir / "final", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sample = json.loads((run.run_dir / "samples" / "step-000006.jsonl").read_text().splitlines()[0])
    assert done.stdout.rstrip("\n") == sample["generated"]


@pytest.mark.parametrize("name", ["z2", "z3"])
def test_each_validation_example_is_counted_once_on_any_layout(launched, name):
    run, reference = layout(launched, name), layout(launched, "plain")
    for step in (0, 6):
        path = f"samples/step-{step:06d}.jsonl"
        ours, theirs = ([json.loads(x) for x in (r.run_dir / path).read_text().splitlines()] for r in (run, reference))
        assert [sample["index"] for sample in ours] == list(range(7))
        assert ours == theirs
    for mine, other in zip(run.lines("eval_loss"), reference.lines("eval_loss"), strict=True):
        assert mine["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-4)
        assert mine["accuracy"] == other["accuracy"]


COUNTED = """
main_metric = "f1"

def dataset(self, split):
    sizes = [1, 41, 1, 41, 1]
    return [{"question": str(at) * size, "answer": "1 + 2" * (at + 1)} for at, size in enumerate(sizes)]

def messages(self, example):
    return [{"role": "user", "content": example["question"]}]

def target(self, example):
    return example["answer"]

def score(self, example, text):
    shared = sum(map(str.__eq__, text, example["answer"]))
    return {"shared": shared, "written": len(text) + len(example["answer"])}

def aggregate(self, scores):
    shared, written = (sum(score[key] for score in scores) for key in ("shared", "written"))
    return {"f1": 2 * shared / written, "examples": len(scores)}
"""
"""Questions of very unequal length, scored by characters, with a metric that is no mean."""


def test_three_ranks_report_the_numbers_of_a_plain_count(launched, tmp_path):
    model_dir, count = layout(launched, "plain").run_dir / "final", 4
    command = ("evaluate", own_task(tmp_path, COUNTED), "--model", str(model_dir), "--eval-limit", str(count))
    command += ("--eval-batch-size", "1", "--max-new-tokens", "12")
    ranks = ("--mixed_precision", "no", "--num_processes", "3")
    run = finished(*command, yaml="ddp", launcher=ranks, run_dir=tmp_path / "out")
    samples = [json.loads(line) for line in (run.run_dir / "samples-tuned.jsonl").read_text().splitlines()]
    drawn = [sample["index"] for sample in samples]
    assert drawn == sorted({*drawn})
    assert len(drawn) == count
    questions = [str(index) * (1 + 40 * (index % 2)) for index in drawn]
    answers = ["1 + 2" * (index + 1) for index in drawn]
    rows = [(sample["index"], sample["prompt"], sample["expected"]) for sample in samples]
    assert rows == [*zip(drawn, questions, answers, strict=True)]
    said = [sample["generated"] for sample in samples]
    shared = sum(sum(map(str.__eq__, text, answer)) for text, answer in zip(said, answers, strict=True))
    assert run.result()["after"]["f1"] == 2 * shared / len("".join(said + answers)) > 0
    assert run.result()["after"]["examples"] == count
    model, tokenizer = (sample.from_pretrained(model_dir) for sample in (AutoModelForCausalLM, AutoTokenizer))
    losses = []
    for question, answer in zip(questions, answers, strict=True):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        prompt, whole = (
            tokenizer.apply_chat_template(part, add_generation_prompt=len(part) == 1, return_dict=True)["input_ids"]
            for part in (turns[:1], turns)
        )
        ends = len(whole) - whole[::-1].index(tokenizer.eos_token_id)
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : ends - 1]
        labels = torch.tensor(whole[len(prompt) : ends])
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
    assert run.result()["after"]["eval_loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)


def test_what_a_run_leaves_behind(launched):
    run = layout(launched, "z2")
    result = run.result()
    assert result["status"] == "complete"
    assert result["steps"] == 6
    for key in ("train_seconds", "tokens_per_second", "peak_host_memory_gib"):
        assert result[key] > 0
    assert {"accuracy", "eval_loss", "generate_tokens_per_second"} <= result["before"].keys() & result["after"].keys()
    assert {phase["phase"] for phase in result["phases"]} >= {"data", "model", "sharded", "ready"}
    assert {phase["rank"] for phase in result["phases"]} == {0, 1}
    assert len([*run.run_dir.glob("events*")]) == 1
    record = json.loads((run.run_dir / "run.json").read_text())
    assert record["config"]["global_batch_size"] == 10
    assert record["launch"]["zero_stage"] == 2
    assert record["launch"]["deepspeed_config"]["zero_optimization"]["stage"] == 2
    line = run.lines()[0]
    wanted = ("step", "epoch", "loss", "grad_norm", "learning_rate", "supervised_tokens", "tokens_per_second")
    assert all(key in line for key in wanted)
    report = (run.run_dir / "report.md").read_text()
    assert report.count("Answer: ") >= 7
    assert {"versions", "threads_per_process", "communication", "device"} <= record["launch"].keys()


def test_the_terminal_is_quiet_and_in_order(launched):
    output = layout(launched, "z2").output
    for chatter in ("[INFO]", "ninja", "FutureWarning", "UserWarning: None of the inputs"):
        assert chatter not in output
    assert output.index("ZeRO-2") < output.index("training examples") < output.index("base and tuned")
    assert output.count("base and tuned") == 1
    assert "base: tiny before the first step; tuned: final/, of step 6\n" in output
    lines = output[output.index("run       ") : output.index("step 6/6")].splitlines()
    opening = [line for line in lines if not line.endswith("from the cache")][:7]
    names = ["run", "settings", "validation:", "warning:", "data", "model", "step"]
    assert [line.split()[0] for line in opening] == names


def lora(launched, yaml):
    # under ZeRO-3 a matrix of up to 100,000 elements stays whole on every rank: it could not be saved empty
    arguments = (*JOB, "--adapter", "lora", "--lora-r", "272", "--lora-dropout", "0.1", "--save-every", "3")
    return launched(f"lora {yaml}", *arguments, yaml=yaml)


@pytest.mark.parametrize("yaml", [None, "z3"])
def test_an_adapter_is_saved_alone_and_loads_in_plain_peft(launched, yaml):
    from peft import PeftModel

    run = lora(launched, yaml)
    assert not (run.run_dir / "final" / "model.safetensors").exists()
    tensors = load_file(run.run_dir / "final" / "adapter_model.safetensors")
    assert all("lora_" in name for name in tensors)
    assert all(tensor.numel() for tensor in tensors.values())
    assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    base = AutoModelForCausalLM.from_pretrained(run.run_dir / "base")
    PeftModel.from_pretrained(base, run.run_dir / "final")
    assert len(run.lines()) == 6


@pytest.mark.long
def test_an_adapter_run_with_dropout_resumes_to_the_same_bits(launched, tmp_path):
    whole = lora(launched, "z3")
    resumed = goes_on_to_the_same_bits(whole, tmp_path / "run", 3)
    assert resumed.result()["before"] == whole.result()["before"]
    spent = resumed.result()["time_spent"]
    assert {"forward", "backward", "optimizer step", "make batch", "the rest"} <= {*spent["parts"]}
    assert sum(spent["parts"].values()) == pytest.approx(spent["seconds"])
    assert "on rank 0 a step took" in resumed.output


def test_adapter_does_not_resume_on_other_base_weights(launched, called, tmp_path):
    whole = lora(launched, None)
    run_dir = stopped(whole, tmp_path / "run", 3)
    base = run_dir / "base" / "model.safetensors"
    weights = load_file(base)
    largest = max(weights, key=lambda name: weights[name].numel())
    save_file({**weights, largest: weights[largest] * 1.01}, base, metadata={"format": "pt"})
    refused = called(*whole.arguments, "--resume", "auto", run_dir=run_dir)
    assert refused.status == 1
    assert "the base weights under the adapter have changed since the run was started" in refused.output


def test_a_new_run_starts_from_an_earlier_ones_weights(launched):
    first = layout(launched, "plain")
    second = launched("from plain", *JOB, "--init-from", str(first.run_dir))
    assert second.result()["before"]["eval_loss"] == pytest.approx(first.result()["after"]["eval_loss"], rel=1e-5)
    assert len(second.lines()) == 6
    printed = " ".join(second.output.split())
    assert f"using this run's final/ weights; for the weights of its best step, name {first.run_dir}" in printed
    assert "model tiny" not in printed


def test_full_training_goes_on_from_an_adapter_run(launched):
    first = lora(launched, None)
    second = launched("from lora", *JOB, "--init-from", str(first.run_dir), "--save-every", "off")
    assert "the adapter is merged into its base, and all weights are trained" in second.output
    assert second.result()["before"]["eval_loss"] == pytest.approx(first.result()["after"]["eval_loss"], rel=1e-4)
    assert (second.run_dir / "final" / "model.safetensors").exists()


def test_adapter_trained_further_keeps_its_shape_or_says_so(launched, called, tmp_path):
    moved = shutil.copytree(lora(launched, None).run_dir, tmp_path / "moved")
    wrong = called(*JOB, "--init-from", str(moved), "--adapter", "lora", "--lora-r", "4", run_dir=tmp_path / "wrong")
    assert wrong.status == 1
    assert "--lora-r 4: the adapter in" in wrong.output
    assert "--lora-dropout 0.0: the adapter in" in wrong.output


STRAYING = """
def dataset(self, split):
    rows = super().dataset(split)
    return rows[::-1] if os.environ.get("RANK") == "1" else rows
"""


def test_ranks_that_would_train_on_different_data_are_refused(tmp_path):
    run = accel_sft(own_task(tmp_path, STRAYING), *JOB[1:], yaml="ddp", run_dir=tmp_path / "run")
    assert run.status != 0
    assert "ranks got different examples from dataset()" in run.output


@pytest.mark.parametrize("yaml", ["z2", pytest.param("z3", marks=pytest.mark.long)])
def test_zero_on_cpus_compiles_nothing_and_frees_shared_memory(tmp_path, yaml):
    """DeepSpeed's operator for sums of an inference would need a compiler, and with LOCAL_SIZE 66 MiB a rank."""
    before = {*Path("/dev/shm").glob("deepspeed_*")}
    extensions = tmp_path / "extensions"
    without = {"CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(extensions), "LOCAL_SIZE": "2"}
    run = accel_sft(*JOB, *ONCE, yaml=yaml, environment=without, run_dir=tmp_path / "run")
    left = {*Path("/dev/shm").glob("deepspeed_*")} - before
    for file in left:
        file.unlink()
    assert run.status == 0, run.output
    assert (left, [*extensions.rglob("*")]) == (set(), [])
    assert "DeepSpeed compiles" not in run.output


def test_patience_stops_early(launched):
    arguments = (*JOB, "--patience", "1", "--eval-every", "1", "--learning-rate", "0")
    run = launched("patience", *arguments)
    assert run.result()["stopped_early"]
    assert run.result()["steps"] == 2  # the first evaluation is the best so far, the second no better
    why = "at step 2 of 6, after 1 evaluation without improvement on step 1 (--patience 1)"
    assert run.result()["stop_reason"] == why
    assert f"\nstopped early: {why}\n" in run.output
    assert "| stopped early | at step 2 of 6, after 1 evaluation" in (run.run_dir / "report.md").read_text()


def test_evaluate_alone_gives_the_runs_numbers(launched, tmp_path):
    run = layout(launched, "z3")
    arguments = ("evaluate", "math", "--max-new-tokens", "6")
    models = ("--model", str(run.run_dir / "final"), "--base", "auto")
    fp32 = ("--mixed_precision", "no")
    alone = finished(*arguments, *models, yaml="z3", launcher=fp32, run_dir=tmp_path / "out")
    assert "validation-examples 7 base" in " ".join(alone.output.split())  # as the run had it
    for side in ("before", "after"):
        assert alone.result()[side]["eval_loss"] == pytest.approx(run.result()[side]["eval_loss"], rel=1e-4)
        assert alone.result()[side]["accuracy"] == run.result()[side]["accuracy"]
    assert "load_peak_host_memory_gib" in alone.result()["after"]


def test_evaluate_needs_weights_that_exist(called):
    run = called("evaluate", "math", "--model", "r", "--base", "tiny")
    assert run.status == 1
    assert "Error: --model and --base: the model tiny is made for each run" in run.output


def test_dry_run_stops_before_anything_is_made(tmp_path):
    run = finished(*JOB, "--dry-run", yaml="z3", run_dir=tmp_path / "run")
    assert "ZeRO-3" in run.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["z2", pytest.param("z3", marks=pytest.mark.long)])
def test_train_only_is_the_same_on_every_launch(launched, name):
    job = (*JOB, *ONCE, "--train-only", "layers.1.|norm")
    alone = launched("train only", *job)
    run = launched(f"train only {name}", *job, "--micro-batch-size", MICRO[name], **LAYOUTS[name])
    same_curve(alone.lines(), run.lines())
    base, final = weights(run.run_dir / "base"), weights(run.run_dir / "final")
    changed = {key for key in final if not torch.equal(base[key], final[key])}
    assert changed == {key for key in final if re.search("layers.1.|norm", key)}
    assert "--train-only trains model.layers." in " ".join(run.output.split())


@pytest.mark.parametrize("name", ["z2", pytest.param("z3", marks=pytest.mark.long)])
@pytest.mark.parametrize("adapter", ["none", pytest.param("lora", marks=pytest.mark.long)])
def test_averages_are_evaluated_and_exported_alike_on_every_launch(launched, tmp_path, name, adapter):
    job = (*JOB, "--eval-every", "3", "--save-every", "3" if adapter == "lora" else "off", "--ema-decay", "0.9")
    job += ("--adapter", adapter)
    alone = launched(f"averages {adapter}", *job)
    run = launched(f"averages {adapter} {name}", *job, "--micro-batch-size", MICRO.get(name, "2"), **LAYOUTS[name])
    same_curve(alone.lines(), run.lines())
    for expected, actual in zip(alone.lines("eval_loss"), run.lines("eval_loss"), strict=True):
        assert actual["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-5)
    file = "model.safetensors" if adapter == "none" else "adapter_model.safetensors"
    of_run = {part: load_file(run.run_dir / part / file) for part in ("final", "final-plain")}
    for part, weights_of_part in of_run.items():
        for key, weight in load_file(alone.run_dir / part / file).items():
            assert (weight - weights_of_part[key]).norm() <= 1e-3 * weight.norm(), (part, key)
    assert not all(torch.equal(of_run["final"][key], of_run["final-plain"][key]) for key in of_run["final"])
    card = (run.run_dir / "final-plain" / "README.md").read_text()
    assert "tuned: the averages of these weights (in final/), of step 6" in card
    assert "(averages; final-plain/ has the last step's weights)" in " ".join(run.output.split())
    if adapter == "lora":
        folder = stopped(run, tmp_path / "run", 3)
        finished(*run.arguments, "--resume", "auto", run_dir=folder, **run.options)
        for part, weights_of_part in of_run.items():
            again = load_file(tmp_path / "run" / part / file)
            assert all(torch.equal(weights_of_part[key], again[key]) for key in weights_of_part)


def test_signal_amid_evaluation_of_averages_restores_the_weights():
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(3, 2)
    before = model.weight.clone()
    averages = Averages(accelerator, model, torch.optim.SGD(model.parameters()), 0.5)
    model.weight.data += 1
    trainer = SimpleNamespace(averages=averages)
    with contextlib.suppress(Interruption), Trainer.averaged(trainer):
        assert torch.equal(model.weight, before)
        raise Interruption(signal.SIGTERM, 3, "go on")
    assert torch.equal(model.weight, before + 1)
    assert torch.equal(averages.tensors[0].view_as(before), before)
    with pytest.raises(UserError), Trainer.averaged(trainer):
        raise UserError("of one rank alone: to restore its part, it would wait for the others")
    assert torch.equal(model.weight, before)


def test_train_limit_bounds_what_run_and_check_read(called, tmp_path):
    job = (*JOB, *ONCE, "--max-steps", "1", "--train-limit", "10%")
    run = finished(*job, run_dir=tmp_path / "run")
    assert "--train-limit 10%: 50 of 500 examples" in run.output
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["train_limit"] == "10%"
    assert record["data"]["train examples beyond --train-limit"] == 450
    again = called(*job[:-1], "11%", "--resume", "auto", run_dir=tmp_path / "run")
    assert again.status == 1
    assert "--train-limit: the run was started with 10%, not 11%" in " ".join(again.output.split())
    checked = accel_sft("check", "math", "--train-examples", "500", "--train-limit", "30", "--json")
    assert json.loads(checked.output)["splits"]["train"]["rows"] == 30


FAILING = """
def score(self, example, text):
    if os.environ.get("RANK") == "1":
        raise SystemExit(0)
    return super().score(example, text)
"""


def test_failing_rank_ends_the_run_with_its_message(tmp_path):
    task, started = own_task(tmp_path, FAILING), time.monotonic()
    run = accel_sft(task, *JOB[1:], yaml="ddp", run_dir=tmp_path / "run", real=True)
    assert run.status != 0
    assert time.monotonic() - started < limit(400), "the other rank waited for the one that failed"
    root_cause = run.output.split("Root Cause")[1]
    assert "rank      : 1" in root_cause
    assert "own.py:" in root_cause
    assert "sys.exit(0) during the run; raise an error instead" in root_cause
    assert run.result()["status"] == "failed"


ENDING = """
class Held:
    def __del__(self):
        if sys.is_finalizing():
            os.abort()  # as a thread of gloo that drops its last tensor while Python takes its modules apart

held = Held()
atexit.register(lambda: pathlib.Path("HERE", os.environ["RANK"]).touch())
"""


def test_finished_ranks_run_exit_handlers_and_skip_the_teardown(tmp_path):
    task = own_task(tmp_path, ENDING.replace("HERE", str(tmp_path)))
    finished(task, "--dry-run", *JOB[1:], yaml="ddp", real=True)
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}
