"""What is loaded is whole, what is trained is what text reaches, and what is saved loads again."""

from __future__ import annotations

import functools
import json
import re
import shutil

import architectures
import models
import pytest
import torch
from accelerate import Accelerator
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.checkpoint import checkpoint
from accel_sft.cli.group import cli
from accel_sft.io.exported import complete_config, save_tokenizer
from accel_sft.models.architecture import alike
from accel_sft.models.pretrained import processor_files, stored_dtype
from accel_sft.models.source import find_source
from accel_sft.models.tokenizer import encoding_rules, load_tokenizer

IDS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(family)`: the folder of a model, made once."""
    return functools.cache(lambda family: architectures.make(tmp_path_factory.mktemp(family) / "model", family))


def loaded(folder, lines=None, steps=10, **options):
    return models.loaded(folder, steps, lines, **options)


def changed(folder, target, change, **settings):
    """A copy of a model with its weights changed, and these fields of its configuration."""
    target.mkdir()
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **settings}))
    return target


def exported(model, folder, source, **more):
    checkpoint.export(Accelerator(cpu=True), model, AutoTokenizer.from_pretrained(source), folder, "card", **more)
    return folder


def test_only_the_rank_that_writes_copies_whole_weights(made, tmp_path, monkeypatch):
    def copied(*_):
        raise MemoryError

    monkeypatch.setattr(Accelerator, "get_state_dict", copied)
    with pytest.raises(MemoryError):
        exported(loaded(made("llama")), tmp_path / "of rank 0", made("llama"))
    monkeypatch.setattr(Accelerator, "is_main_process", False)
    assert not exported(loaded(made("llama")), tmp_path / "of rank 1", made("llama")).exists()


def backward(model):
    """One step's gradients on text alone."""
    model.train()(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()


def test_weights_that_the_files_lack_are_refused_by_name(made, tmp_path):
    headless = changed(made("llama"), tmp_path / "headless", lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"its files lack 1 of the model's weights \(lm_head.weight\); name"):
        loaded(headless)
    other = changed(made("llama"), tmp_path / "other", lambda w: w.update({"lm_head.weight": torch.zeros(7, 32)}))
    with pytest.raises(UserError, match=r"config.json in the shapes of 1 of .*lm_head.weight \(7, 32\) for \("):
        loaded(other)
    tied = changed(made("llama"), tmp_path / "tied", lambda w: w.pop("lm_head.weight"), tie_word_embeddings=True)
    model = loaded(tied)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_adapter_whose_file_lacks_weights_is_refused(made, tmp_path):
    model = loaded(made("llama"), adapter="lora")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    del weights["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"Found missing adapter keys .*layers.1.self_attn.q_proj.lora_A"):
        loaded(tmp_path, steps=0)


@torch.no_grad()
def test_a_quantized_checkpoint_is_saved_as_it_loads_again(made, tmp_path):
    def quantize(weights):
        for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
            experts, inputs, outputs = weights.pop(name).shape
            shape = experts, outputs, inputs // 32
            weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            weights[f"{name}_scales"] = torch.randint(120, 126, shape, dtype=torch.uint8)

    unquantized = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": unquantized}
    torch.manual_seed(0)
    folder = changed(made("gpt_oss"), tmp_path / "mxfp4", quantize, quantization_config=settings)
    model = loaded(folder)
    again = loaded(exported(model, tmp_path / "final", made("gpt_oss")))
    assert torch.equal(model(IDS).logits, again(IDS).logits)


EYES = {"gemma3": "vision_tower, multi_modal_projector", "qwen2_5_vl": "visual"}


@pytest.mark.parametrize(("family", "adapter"), [("gemma3", "lora"), ("qwen2_5_vl", "none")])
def test_what_no_text_reaches_is_not_trained(made, family, adapter):
    model = loaded(made(family), lines := [], adapter=adapter)
    text = "the adapter leaves out" if adapter == "lora" else "not trained, because text does not pass through it:"
    assert f"{text} {EYES[family]}" in lines
    backward(model)
    for name, parameter in model.named_parameters():  # or data parallelism waits for a gradient that never comes
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert model.get_submodule("base_model.model" if adapter == "lora" else "").get_output_embeddings() is not None


def test_layers_named_by_the_user_are_those_that_text_reaches(made):
    model = loaded(made("gemma3"), adapter="lora", lora_target_modules="q_proj,v_proj")
    adapted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(adapted) == 2 * 2 * 4
    assert all("language_model.layers" in name for name in adapted)


@pytest.mark.parametrize(
    ("family", "name", "problem"),
    [("gemma3", "fc1", "no such module; this model has .*q_proj"), ("mamba2", "out_proj", r"peft does not adapt all")],
)
def test_layers_that_cannot_be_adapted_are_refused(made, family, name, problem):
    with pytest.raises(UserError, match=f"--lora-target-modules {name}: {problem}"):
        loaded(made(family), adapter="lora", lora_target_modules=name)


def test_multimodal_model_is_exported_with_its_processors_files(made, tmp_path):
    folder = made("qwen2_5_vl")
    (folder / "preprocessor_config.json").write_text('{"patch_size": 4}')
    model = loaded(folder)
    final = exported(model, tmp_path / "final", folder, beside=processor_files(str(folder), model))
    assert (final / "preprocessor_config.json").read_text() == '{"patch_size": 4}'
    again = AutoModelForImageTextToText.from_pretrained(final)
    assert torch.equal(model.model.visual.patch_embed.proj.weight, again.model.visual.patch_embed.proj.weight)
    assert processor_files(str(made("llama")), loaded(made("llama"))) == []


LEFT_OUT = {
    "falcon_h1": "mamba.out_proj",  # whose weights are used without calling it
    "mamba": "mixer.x_proj, mixer.dt_proj, mixer.out_proj",
    "llama4": "feed_forward.router, feed_forward.experts.gate_up_proj, feed_forward.experts.down_proj",
}


@pytest.mark.parametrize("family", LEFT_OUT)
def test_adapter_on_all_linear_layers_names_omitted_ones(made, family):
    model = loaded(made(family), lines := [], adapter="lora")
    assert f"the adapter leaves out {LEFT_OUT[family]}" in lines
    backward(model)
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3", "qwen3_moe"])
def test_an_adapter_on_all_linear_layers_stands_where_pefts_would(made, family):
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = get_peft_model(architectures.load(made(family)), config)
    assert loaded(made(family), adapter="lora").state_dict().keys() == theirs.state_dict().keys()


def test_token_beyond_the_models_vocabulary_is_one_line(made, tmp_path):
    folder, small = made("llama"), tmp_path / "small"
    model = architectures.load(folder)
    model.resize_token_embeddings(256)
    model.save_pretrained(small)
    AutoTokenizer.from_pretrained(folder).save_pretrained(small)
    command = ("math", "--train-examples", "8", "--validation-examples", "2", "--max-steps", "1", "--model", str(small))
    with pytest.raises(UserError, match="but the model's vocabulary ends at 255; use the model's own tokenizer"):
        CliRunner().invoke(cli, (*command, "--output-dir", str(tmp_path / "run")), catch_exceptions=False)


NAMED = {
    "qwen3_5": ({}, "only the language model of these multimodal weights is loaded and exported; to serve"),
    "llama": ({"num_hidden_layers": 3}, "not loaded, because config.json does not describe them: 9 weights (model"),
    "qwen3_moe": ({"output_router_logits": True}, "router_aux_loss_coef 0.001 is ignored: the loss has no term"),
}


@pytest.mark.parametrize("family", NAMED)
def test_what_is_not_trained_or_loaded_is_named(made, tmp_path, family):
    settings, expected = NAMED[family]
    loaded(changed(made(family), tmp_path / "changed", lambda weights: None, **settings), lines := [])
    (line,) = lines
    assert line.startswith(expected)


BROKEN = {
    "a list": ("config.json", "[]", "must be a mapping, not list"),
    "weights": ("pytorch_model.bin", "PK\x03\x04 and no more", "cannot be loaded"),
    "no vocabulary": ("tokenizer.json", "", "its tokenizer has no vocabulary; is its tokenizer.json there"),
    "a template": ("tokenizer_config.json", '{"chat_template": 5, "eos_token": "<|im_end|>"}', "chat template is int"),
    "an end": ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id 'x' is not a number"),
}


@pytest.mark.parametrize(("name", "content", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_model_files_are_one_line(made, tmp_path, name, content, message):
    folder = shutil.copytree(made("llama"), tmp_path / "broken")
    if "template" in content:
        (folder / "chat_template.jinja").unlink()
    if name.endswith(".bin"):
        (folder / "model.safetensors").unlink()
    if content:
        (folder / name).write_text(content)
    else:
        (folder / name).unlink()
    source = find_source(str(folder))

    def load():
        encoding_rules(load_tokenizer(source, trust_remote_code=False), source, TrainConfig().resolved({}))
        loaded(folder)

    with pytest.raises(UserError) as raised:
        load()
    (line,) = raised.value.problems
    assert message in line


def test_names_that_differ_in_numbers_are_one_with_these_numbers():
    names = [f"layers.{n}.norm.weight" for n in (0, 1, 2, 7, 20, 21)]
    experts = [f"layers.{n}.experts.{k}.up" for n in (3, 4) for k in range(8)]
    assert alike([*names, "layers.3.mlp.weight", *experts]) == [
        "layers.0-2,7,20-21.norm.weight (6)",
        "layers.3.mlp.weight",
        "layers.3-4.experts.0-7.up (16)",
    ]


def test_train_only_needs_an_expression_that_fits_and_no_adapter(made):
    with pytest.raises(UserError, match="--train-only no_such: no weight's name matches; names are like model"):
        loaded(made("llama"), train_only="no_such")
    (line,) = TrainConfig(train_only="layers.(").problems()
    assert line.startswith("--train-only layers.(: not a regular expression (")
    (line,) = TrainConfig(train_only="norm", adapter="lora").problems()
    assert line.startswith("--train-only cannot be combined with --adapter, ")


def in_bf16(folder, target):
    """A copy of a model with its weights in bfloat16, and one buffer in float32 as DeepSeek publishes it."""

    def rounded(weights):
        names = (name for name in weights if "e_score_correction_bias" not in name)
        weights.update({name: weights[name].bfloat16() for name in names})

    return changed(folder, target, rounded, dtype="bfloat16")


def types_in(folder):
    return {name: weight.dtype for name, weight in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize(("family", "precision"), [("deepseek_v3", "bf16"), ("gemma3", "no")])
def test_exports_have_their_bases_names_and_types(made, tmp_path, family, precision):
    base = in_bf16(made(family), tmp_path / "base")
    model = loaded(base, precision=precision, deepspeed=precision != "no")
    assert model.dtype == (torch.float32 if precision == "no" else torch.bfloat16)
    stored = stored_dtype(AutoConfig.from_pretrained(base))
    final = exported(model, tmp_path / "final", made(family), dtype=stored)
    AutoModelForCausalLM.from_pretrained(base, dtype="auto").save_pretrained(tmp_path / "plain")
    assert types_in(final) == types_in(tmp_path / "plain")
    config = json.loads((final / "config.json").read_text())
    assert {*re.findall(r'"dtype": "(\w+)"', json.dumps(config))} == {"bfloat16"}
    assert AutoConfig.from_pretrained(final).dtype == torch.bfloat16
    again, weights = load_file(final / "model.safetensors"), load_file(base / "model.safetensors")
    assert all(again[name].equal(weight.to(again[name].dtype)) for name, weight in weights.items())


def test_other_types_are_exported_where_asked_but_not_of_adapters(made, tmp_path):
    final = exported(loaded(made("llama")), tmp_path / "final", made("llama"), dtype=torch.float16)
    assert {*types_in(final).values()} == {torch.float16}
    assert TrainConfig(export_dtype="float16").problems() == []
    (problem,) = TrainConfig(export_dtype="float16", adapter="lora").problems()
    assert problem.startswith("--export-dtype does not apply to an adapter")


def test_configurations_are_read_alike_by_older_and_newer_keys(made, tmp_path):
    """transformers 4 reads rope_theta, rope_scaling and rope_local_base_freq, or takes defaults."""
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
    local = {"rope_type": "default", "rope_theta": 500.0}
    written = {}
    ropes = {"llama": yarn, "glm4": {**local, "partial_rotary_factor": 0.25}}
    ropes["gemma3"] = {"full_attention": yarn, "sliding_attention": local}
    for family, rope in ropes.items():
        content = json.loads((made(family) / "config.json").read_text())
        text = content.get("text_config", content)
        text["rope_parameters"] = rope
        folder = tmp_path / family
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
        before = AutoConfig.from_pretrained(folder).get_text_config().rope_parameters
        complete_config(folder, None, {})
        assert AutoConfig.from_pretrained(folder).get_text_config().rope_parameters == before
        content = json.loads((folder / "config.json").read_text())
        written[family] = content.get("text_config", content)
    assert written["llama"]["rope_theta"] == 5e5
    assert written["llama"]["rope_scaling"] == {key: value for key, value in yarn.items() if key != "rope_theta"}
    assert (written["glm4"]["rope_theta"], written["glm4"]["partial_rotary_factor"]) == (500.0, 0.25)
    assert (written["gemma3"]["rope_theta"], written["gemma3"]["rope_local_base_freq"]) == (5e5, 500.0)
    assert written["gemma3"]["rope_scaling"]["factor"] == 4.0


def test_positions_by_layer_get_old_keys_where_those_exist(tmp_path):
    plain = {"rope_theta": 5.0, "rope_type": "default"}
    for rope, written in (
        ({"main": {"rope_theta": 5.0}, "compress": {"rope_theta": 6.0}}, {}),
        ({"full_attention": None, "sliding_attention": {"rope_theta": 5.0}}, {"rope_local_base_freq": 5.0}),
        ({"full_attention": plain, "sliding_attention": None}, {"rope_theta": 5.0}),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "rope_parameters": rope}))
        complete_config(tmp_path, None, {})
        content = json.loads((tmp_path / "config.json").read_text())
        assert {key: content[key] for key in content if key.startswith("rope_")} == {"rope_parameters": rope, **written}


def test_exports_keep_keys_that_only_older_readers_know(made, tmp_path):
    base = json.loads((made("qwen3_moe") / "config.json").read_text())
    base["num_experts"] = base.pop("num_local_experts", 4)
    base |= {"torch_dtype": "float32", "auto_map": {"AutoConfig": "own.Config"}, "_name_or_path": "/home/me"}
    final = exported(loaded(made("qwen3_moe")), tmp_path / "final", made("qwen3_moe"), dtype=torch.bfloat16, base=base)
    content = json.loads((final / "config.json").read_text())
    assert content["num_experts"] == 4
    assert content["torch_dtype"] == content["dtype"] == "bfloat16"
    assert not {"auto_map", "_name_or_path"} & {*content}
    tokenizer = json.loads((final / "tokenizer_config.json").read_text())
    assert tokenizer["additional_special_tokens"] == ["<|im_start|>"]
    assert "extra_special_tokens" not in tokenizer
    again, own = AutoTokenizer.from_pretrained(final), AutoTokenizer.from_pretrained(made("qwen3_moe"))
    assert again("a <|im_start|>b")["input_ids"] == own("a <|im_start|>b")["input_ids"]
    assert again.all_special_tokens == own.all_special_tokens
    save_tokenizer(PreTrainedTokenizerFast(tokenizer_object=own._tokenizer), tmp_path / "plain")
    plain = json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text())
    assert plain["tokenizer_class"] == "PreTrainedTokenizerFast"
