"""`merge`: the sum predicts what base and adapter do apart, or is refused. `push`: weights and card, nothing else."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal

import hub
import pytest
import torch
import yaml
from conftest import finished
from fake_plugins import accel_sft as in_a_process
from huggingface_hub import constants
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, PromptTuningConfig
from report_card import card
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from weights import save_adapter

from accel_sft import UserError
from accel_sft.cli.group import cli
from accel_sft.commands import merge as merge_module
from accel_sft.commands.push import hub_id
from accel_sft.io.files import new_folder
from accel_sft.io.run_dir import RunDir
from accel_sft.models import merge as merging
from accel_sft.models.merge import merge
from accel_sft.models.source import find_source, other_base, weights_identity
from accel_sft.tools.verify.records import Recorded, examine

LORA = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
KINDS = {
    "lora": LoraConfig(r=4, **LORA),
    "adalora": AdaLoraConfig(init_r=4, target_r=2, total_step=30, tinit=2, tfinal=5, deltaT=2, **LORA),
    "ia3": IA3Config(task_type="CAUSAL_LM"),
}
IDS = torch.arange(3, 40)[None]


def merged(folder, dtype=None):
    source = find_source(str(folder))
    return merge(source, AutoTokenizer.from_pretrained(source.tokenizer), dtype, trust_remote_code=False)[0]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def apart(base, folder):
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder))


def test_overwritten_base_of_an_adapter_is_named(tiny, called, tmp_path):
    other = shutil.copytree(tiny, tmp_path / "base")
    final = save_adapter(other, tmp_path / "run" / "final", KINDS["lora"])
    record = {"task": "math", "config": {}, "task_options": {}}
    record["base_weights"] = weights_identity(str(other))
    run = RunDir(tmp_path / "run")
    run.record.write_text(json.dumps(record))
    assert other_base(find_source(str(run))) == []
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    line = f"{final}: its base {other} has changed since training; restore the old weights"
    assert other_base(find_source(str(run))) == [line]
    assert line in [finding.what for finding in examine(Recorded.read(run)) if finding.level == "differs"]
    for words in (["merge", str(run), str(tmp_path / "out")], ["serve", str(run), "--print"]):
        refused = called(*words)
        assert refused.status == 1
        assert line in " ".join(refused.output.split())


def test_merged_weights_predict_as_the_adapter_and_stay_tied(tiny, adapter, called, tmp_path):
    out = tmp_path / "out"
    (adapter / "tokenizer.model").write_bytes(b"pieces")  # as its run has copied it, for llama.cpp
    done = finished("merge", str(adapter), str(out))
    assert (out / "tokenizer.model").read_bytes() == b"pieces"
    assert f"base     {tiny}\n" in done.output
    assert "merged   float32 weights\n" in done.output
    model = AutoModelForCausalLM.from_pretrained(out)
    expected = apart(tiny, adapter)
    assert (expected - logits(AutoModelForCausalLM.from_pretrained(tiny))).abs().max() > 0.1
    assert (logits(model) - expected).abs().max() < 1e-5
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with safe_open(out / "model.safetensors", "pt") as weights:
        names = [*weights.keys()]
    assert "lm_head.weight" not in names
    assert not [name for name in names if "lora" in name]
    assert not (out / "adapter_config.json").exists()
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(tiny).chat_template
    text = (out / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "transformers"
    assert "`model`, fine-tuned with a lora adapter that is merged, for the task `math`" in text
    assert "peft" not in text.replace("| peft |", "")
    again = called("merge", str(adapter), str(out))
    assert again.status == 1
    assert f"OUT {out}: not empty; name another folder" in again.output
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_is_merged_in_each_precision(tiny, tmp_path, kind):
    folder = save_adapter(tiny, tmp_path / kind, KINDS[kind])
    expected = apart(tiny, folder)
    exact, rounded = merged(folder), merged(folder, "bf16")
    assert exact.dtype == torch.float32  # as the base's files
    assert (logits(exact) - expected).abs().max() < 1e-5
    assert rounded.dtype == torch.bfloat16
    assert 1e-4 < (logits(rounded) - expected).abs().max() < 0.5


def test_merged_weights_have_their_bases_names_and_type(tiny, tmp_path):
    rounded, out = tmp_path / "base", tmp_path / "out"
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(rounded)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(rounded)
    adapter = save_adapter(rounded, tmp_path / "lora", KINDS["lora"])
    (adapter / "chat_template.jinja").unlink()  # as of raw text
    merge_module.write_merged(str(adapter), out, None, trust_remote_code=False)
    before, after = (load_file(folder / "model.safetensors") for folder in (rounded, out))
    assert before.keys() == after.keys()
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(out).chat_template is None


def test_what_cannot_be_merged_is_refused_with_the_reason(tiny, adapter, called, tmp_path, monkeypatch):
    prompts = save_adapter(tiny, tmp_path / "prompts", PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    head = save_adapter(tiny, tmp_path / "head", LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"]))
    for folder, reason in (
        (tiny, "no adapter: there is nothing to merge"),
        (prompts, "adapters of type prompt_tuning cannot be merged into weights"),
        (head, r"cannot be merged: logits would be off by .* adapts only one of two tied layers"),
        ("", "--model '': no such folder"),
    ):
        with pytest.raises(UserError, match=reason):
            merged(folder)
    broken = shutil.copytree(adapter, tmp_path / "broken")
    weights = load_file(broken / "adapter_model.safetensors")
    next(iter(weights.values())).fill_(float("nan"))
    save_file(weights, broken / "adapter_model.safetensors")
    failed = called("merge", str(broken), str(tmp_path / "out"))
    assert failed.status == 1
    assert "cannot be merged: logits would be off by nan" in failed.output
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]  # nothing half-written either

    def quantized(*arguments, **options):
        model = load(*arguments, **options)
        model.get_base_model().config.quantization_config = {"quant_method": "bitsandbytes"}
        return model

    load = merging.load_model
    monkeypatch.setattr(merging, "load_model", quantized)
    with pytest.raises(UserError, match="the base is quantized"):
        merged(adapter)


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))
    try:
        too_large = pytest.raises(UserError, match=r"^OUT .*: file too large; free space, or raise the limit")
        with too_large, new_folder(str(tmp_path / "out"), "OUT") as partial:
            save_file({"weight": torch.zeros(1 << 16)}, partial / "model.safetensors")  # its error is no OSError
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())


def test_second_writer_of_a_folder_is_refused(tmp_path):
    out, umask = tmp_path / "out", os.umask(0o027)
    try:
        with new_folder(str(out), "OUT") as first:
            with pytest.raises(UserError, match="out: another process is writing it"), new_folder(str(out), "OUT"):
                pass
            save_file({"weight": torch.zeros(1)}, first / "model.safetensors")
            (first / "rows").write_text("whole")
    finally:
        os.umask(umask)
    assert (out / "rows").read_text() == "whole"
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o640}  # weights are as readable as the others
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def fill():
        with new_folder(str(tmp_path / "new"), "OUT"):
            shutil.copytree(out, tmp_path / "new")

    with pytest.raises(UserError, match=r"new: cannot be written \(.*\); name another folder"):
        fill()  # what appeared meanwhile stays
    assert (tmp_path / "new" / "rows").read_text() == "whole"


def test_killed_merge_leaves_no_folder_and_the_next_cleans_up(adapter, tmp_path):
    def killed(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        merge_module.write_merged = lambda folder, target, *_: (target / "half").touch() or killed()
        cli.main(["merge", str(adapter), str(tmp_path / "out")], standalone_mode=False)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.")
    finished("merge", str(adapter), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def local_hub():
    with hub.running() as (server, address):
        yield server, address


@pytest.fixture
def push(local_hub, monkeypatch, capfd):
    """`push(...)` in this process, to the hub here, whose address huggingface_hub has read when it was imported."""
    monkeypatch.setattr(constants, "ENDPOINT", local_hub[1])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_own")
    monkeypatch.setattr("accel_sft.launch.environment.prepare_environment", lambda debug=False: None)

    def call(*arguments):
        with cli.make_context("accel-sft", ["push", *map(str, arguments)]) as context:
            cli.invoke(context)
        return capfd.readouterr().out

    return call


@pytest.fixture
def run(tiny, tmp_path):
    """A run's folder with weights, what lies beside them, and what is nobody else's."""
    folder = tmp_path / "run"
    shutil.copytree(tiny, folder / "best")
    (folder / "best" / "README.md").write_text(card())
    for name in ("best/rows.jsonl", "best/deploy.py", "samples/step-000006.jsonl", "logs/rank-0.log", "report.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("of the run")
    (folder / "best" / ".git").mkdir()
    (folder / "best" / ".git" / "config.json").write_text("of nobody else")
    (folder / "run.json").write_text(json.dumps({"task": "math", "config": {}, "task_options": {}}))
    return folder


def test_push_leaves_out_data_samples_and_logs_by_default(run, local_hub, push):
    there, address = local_hub
    assert "model.safetensors" in push(run, "org/name", "--dry-run")
    assert there.tokens == set()
    given = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_own", "HF_HUB_OFFLINE": "0"}
    done = in_a_process("push", str(run), "org/name", "--private", env=given)
    assert done.returncode == 0, done.stderr
    assert there.repos == {"org/name": True}
    assert "Bearer hf_own" in there.tokens
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} < there.files.keys()
    assert there.files["README.md"] == (run / "best/README.md").read_bytes()
    assert there.files["model.safetensors"] == (run / "best/model.safetensors").read_bytes()
    assert not [name for name in there.files if "rows" in name or "/" in name or "report" in name]
    assert "not uploaded: .git/, deploy.py, rows.jsonl" in done.stdout
    assert f"{address}/org/name" in done.stdout
    assert there.messages == ["run: best"]
    push(run, "org/name", "--also", "samples/*", "--also", "report.md")
    assert {"samples/step-000006.jsonl", "report.md"} < there.files.keys()
    there.repos["org/open"] = False
    with pytest.raises(UserError, match="org/open: this repository is public, but you gave --private"):
        push(run, "org/open", "--private")
    assert len(there.messages) == 2


def test_of_a_strangers_folder_only_the_models_files_are_pushed(tiny, push, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "org/other--configuration_own.Own"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": code}))
    (folder / "modeling_own.py").write_text("from .layers import Layer\n")
    (folder / "src").mkdir()
    for name in ("layers.py", "train.py", "api_tokens.json", "aws_config.json", "reward.model", "src/config.json"):
        (folder / name).write_text("{}")
    listed = push(folder, "org/name", "--dry-run")
    assert [name for name in ("modeling_own.py", "layers.py", "config.json") if f"MB  {name}\n" not in listed] == []
    assert "not uploaded: api_tokens.json, aws_config.json, reward.model, src/, train.py;" in listed
    (folder / "layers.py").unlink()
    with pytest.raises(UserError, match=r"modeling_own\.py: the model's own code cannot be read"):
        push(folder, "org/name", "--dry-run")


def test_adapter_is_pushed_with_its_base_id_or_merged(adapter, local_hub, push):
    there, _ = local_hub
    with pytest.raises(UserError, match="name the base's hub id: --base-model ORG/NAME"):
        push(adapter, "org/lora")
    push(adapter, "org/lora", "--base-model", "org/base")
    assert json.loads(there.files["adapter_config.json"])["base_model_name_or_path"] == "org/base"
    assert yaml.safe_load(there.files["README.md"].decode().split("---\n")[1])["base_model"] == "org/base"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] != "org/base"
    there.files.clear()
    push(adapter, "org/whole", "--what", "merged")
    assert "model.safetensors" in there.files
    assert "adapter_config.json" not in there.files


def test_a_base_in_the_hubs_cache_has_its_hub_id(tiny):
    assert hub_id("/home/me/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/0123abc") == "Qwen/Qwen2.5-0.5B"
    assert hub_id("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert [hub_id(path) for path in (str(tiny), "../base", "./base", "my org/base", "a/b/c")] == [None] * 5


def test_what_the_hub_refuses_is_one_line(run, local_hub, push):
    local_hub[0].status = 401
    with pytest.raises(UserError) as failed:
        push(run, "org/name")
    (line,) = failed.value.problems
    assert line.startswith(f"the hub {local_hub[1]} answers 401: ")
    assert line.endswith("; check that the token may write to org/name")
    assert local_hub[0].files == {}


def test_what_cannot_be_pushed_is_one_line(run, push, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    for arguments, problem in (
        ((run, "org/name", "--what", "final"), "no weights in .*/final; name a run"),
        ((run, "org/name", "--also", "../*"), r"--also ../\*: no such file in"),
        ((run, "a/b/c"), "REPO a/b/c: not a repository's name"),
        ((tmp_path, "org/name"), "no weights in "),
    ):
        with pytest.raises(UserError, match=problem):
            push(*arguments)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"the hub http://127\.0\.0\.1:9 cannot be reached"):
        push(run, "org/name")
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(UserError, match="no token for the hub: set HF_TOKEN"):
        push(run, "org/name")
