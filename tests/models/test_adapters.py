"""Adapters: each variant learns, goes on to the same bits, and is reloaded by plain peft on the base as it was; what is
merged, what is trained on, and what does not go together, or not under a launch, and is refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import sys

import fsdp2_on_cpu
import pytest
import torch
from accelerate import Accelerator
from architectures import make
from checkpoints import saved
from models import loaded
from peft import AdaLoraConfig, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from reference_job import FP32, SHARDED, goes_on_to_the_same_bits
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.api.limits import ADAPTERS, launch_problem
from accel_sft.api.options import settings
from accel_sft.checkpoint import checkpoint
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.audit import audit
from accel_sft.launch.info import read_launch
from accel_sft.memory.job import AS_CONFIGURED
from accel_sft.memory.job import Job as Planned
from accel_sft.memory.model_config import read_shape
from accel_sft.models.adapters import TYPES, type_of
from accel_sft.models.load import parameter_counts
from accel_sft.training.optimizer import Stepper, new_optimizer

IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
LORA = {"adapter": "lora", "lora_r": 4, "learning_rate": 0.01}
ALL_LINEAR = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
ADALORA = {"init_r": 4, "target_r": 2, "total_step": 30, "tinit": 2, "tfinal": 5, "deltaT": 2}
CONFIGS = {"lora": LoraConfig(r=2, **ALL_LINEAR), "adalora": AdaLoraConfig(**ADALORA, **ALL_LINEAR)}


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A model with experts in one tensor, of a family for which peft adapts none by itself."""
    return make(tmp_path_factory.mktemp("experts") / "gpt_oss", "gpt_oss")


class Job:
    """A small training in this process, with the package's own parts."""

    def __init__(self, accelerator, tiny, **options):
        self.config = TrainConfig(model=str(tiny), **options).resolved({})
        self.model = loaded(tiny, 4, **options)
        self.accelerator, self.optimizer = accelerator, new_optimizer(self.model, self.config)
        self.stepper = Stepper(accelerator, self.model, self.optimizer, 1.0)

    def train(self, steps):
        self.model.train()
        for step in steps:
            self.stepper.backward(self.model(IDS, labels=IDS).loss)
            self.stepper.update(step)

    @torch.no_grad()
    def logits(self):
        return self.model.eval()(IDS).logits

    def state(self):
        """All bits, frozen weights too."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        for number, values in enumerate(self.optimizer.state.values()):
            tensors |= {f"{number} {key}": torch.as_tensor(value).clone() for key, value in values.items()}
        return tensors


def needs(load_in_4bit=False, optimizer="adamw", **others):
    """Skip where what these options need is not installed."""
    if load_in_4bit or optimizer == "adamw-8bit":
        pytest.importorskip("bitsandbytes")


VARIANTS = {
    "dora, rslora": {"use_dora": True, "use_rslora": True},
    "modules of a tied model": {"lora_modules_to_save": "lm_head,norm"},
    "experts": {"lora_target_parameters": "mlp.experts.gate_up_proj, mlp.experts.down_proj"},
    "qlora, dora, adamw-8bit": {"load_in_4bit": True, "use_dora": True, "optimizer": "adamw-8bit"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_learns_resumes_to_same_bits_and_reloads(accelerator, tiny, experts, tmp_path, variant):
    options = LORA | VARIANTS[variant]
    needs(**options)
    source, run_dir = experts if variant == "experts" else tiny, RunDir(tmp_path)
    original = AutoModelForCausalLM.from_pretrained(source).eval()
    whole = Job(accelerator, source, **options)
    with torch.no_grad():
        before = original(IDS).logits
    quantized = {"rtol": 1, "atol": 1} if "qlora" in variant else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(whole.logits(), before, **quantized)  # untrained, it changes nothing

    assert resumed_to_the_same_bits(whole, run_dir, accelerator, source, **options)
    learnt = whole.logits()
    assert (learnt - before).abs().max() > 0.1
    tokenizer = AutoTokenizer.from_pretrained(source)
    checkpoint.export(accelerator, whole.model, tokenizer, run_dir.final, "")
    if "qlora" in variant:
        original = loaded(source, adapter="lora", load_in_4bit=True)
    plain = PeftModel.from_pretrained(original, run_dir.final).eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, learnt, rtol=1e-3, atol=1e-4)
        if "qlora" not in variant:
            torch.testing.assert_close(plain.merge_and_unload()(IDS).logits, learnt, rtol=1e-3, atol=1e-3)


def resumed_to_the_same_bits(whole, run_dir, *job, **options):
    """Train `whole` for four steps, and another job of the same kind from its checkpoint of step 2."""
    whole.train(range(2))
    path = saved(whole.accelerator, whole.model, whole.optimizer, run_dir, {"step": 2})
    whole.train(range(2, 4))
    again = Job(*job, **options)
    checkpoint.load(whole.accelerator, again.model, again.optimizer, path)
    again.train(range(2, 4))
    ours, theirs = again.state(), whole.state()
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []


@pytest.mark.parametrize("options", [{"optimizer": "adamw-8bit"}, {"train_only": r"layers\.1\.mlp\.|norm"}])
def test_training_without_an_adapter_resumes_to_same_bits(accelerator, tiny, tmp_path, options):
    needs(**options)
    options |= {"learning_rate": 0.01}
    whole = Job(accelerator, tiny, **options)
    assert resumed_to_the_same_bits(whole, RunDir(tmp_path), accelerator, tiny, **options)
    if "optimizer" in options:
        assert any("absmax1" in state for state in whole.optimizer.state.values())


def test_settings_of_an_adapter_without_one_are_warned_of():
    unused = audit(TrainConfig(lora_r=32, lora_dropout=0.1), read_launch({}, []), devices=0)
    lines = [str(finding) for finding in unused if "is not used" in str(finding)]
    assert [line.split("--", 1)[1].split()[:2] for line in lines] == [["lora-r", "32"], ["lora-dropout", "0.1"]]
    assert "is not used" not in str(audit(TrainConfig(adapter="lora", lora_r=32), read_launch({}, []), devices=0))


UNDER = {
    "z2 4bit": ("z2", "--load-in-4bit"),
    "z3 rslora": ("z3", "--use-rslora", "--lora-modules-to-save", "lm_head"),
    "fsdp2 dora": ("fsdp2", "--use-dora"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", UNDER)
def test_variant_under_a_launch_draws_the_curve_of_one_process(launched, tmp_path, name):
    yaml, *options = UNDER[name]
    needs(load_in_4bit="--load-in-4bit" in options)
    job = ("math", "--max-steps", "3", "--global-batch-size", "8", "--train-examples", "60", "--save-every", "2")
    job += ("--validation-examples", "7", "--max-new-tokens", "4", "--adapter", "lora", "--eval-every", "3", *options)
    job += ("--keep-checkpoints", "3")
    alone = launched(f"alone, {' '.join(options)}", *job)
    if yaml == "fsdp2" and not fsdp2_on_cpu.RUNS_HERE:
        pytest.skip("this torch's FSDP2 does not run on CPUs")
    sharing = dict(SHARDED) if yaml == "fsdp2" else {"yaml": yaml, "launcher": FP32}
    run = launched(f"variant {name}", *job, **sharing)
    for ours, theirs in zip(run.lines(), alone.lines(), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-5)
    ours, theirs = (load_file(launch.run_dir / "final" / "adapter_model.safetensors") for launch in (run, alone))
    assert {key: tensor.shape for key, tensor in ours.items()} == {key: tensor.shape for key, tensor in theirs.items()}
    after = [launch.result()["after"]["eval_loss"] for launch in (run, alone)]
    assert after[0] == pytest.approx(after[1], rel=2e-5)
    goes_on_to_the_same_bits(run, tmp_path / "run", 2, **sharing)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "--use-dora works only with --adapter lora; add it"),
        ({"adapter": "adalora", "use_rslora": True}, "--use-rslora works only with --adapter lora"),
        ({"adapter": "lora", "lora_target_parameters": "x", "lora_dropout": 0.1}, "neither DoRA nor dropout"),
    ],
)
def test_options_that_exclude_each_other_are_refused_before_loading(options, said):
    (problem,) = TrainConfig(**options).problems()
    assert said in problem


@pytest.mark.parametrize(
    ("options", "backend", "stage", "instead"),
    [
        ({"optimizer": "adamw-8bit"}, "DEEPSPEED", 2, "ddp"),
        ({"use_dora": True}, "DEEPSPEED", 3, "z2"),
        ({"load_in_4bit": True}, "FSDP", 0, "z2"),
        ({"lora_modules_to_save": "lm_head"}, "FSDP", 0, "z2"),
        ({"lora_modules_to_save": "lm_head"}, "DEEPSPEED", 3, None),
        ({"optimizer": "adamw-8bit"}, "MULTI_GPU", 0, None),
    ],
)
def test_what_a_launch_cannot_train_is_refused_with_one_that_can(options, backend, stage, instead):
    problem = launch_problem(TrainConfig(**options), backend, stage)
    assert (problem is None) if instead is None else problem.endswith(f"accelerate_configs/{instead}.yaml")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_modules_to_save": "score"}, "--lora-modules-to-save score: no such module"),
        ({"lora_modules_to_save": "q_proj", "lora_target_modules": "q_proj"}, "it is in --lora-target-modules too"),
        ({"lora_target_parameters": "experts.up"}, "not in this model. Its expert parameters are: none"),
    ],
)
def test_names_that_the_model_does_not_have_are_refused(accelerator, tiny, options, said):
    with pytest.raises(UserError, match=said):
        Job(accelerator, tiny, **(LORA | options))


def test_the_plan_counts_experts_and_a_refusal_names_them(accelerator, experts):
    options = LORA | VARIANTS["experts"]
    assert counted(experts, **options).trained == parameter_counts(Job(accelerator, experts, **options).model)[0]
    with pytest.raises(UserError, match=r"Its expert parameters are: mlp\.experts\.gate_up_proj, mlp\.experts\.down"):
        Job(accelerator, experts, **LORA, lora_target_parameters="experts.up")


def counted(tiny, **options):
    """The job of such a run, as `plan` sees it."""
    config = TrainConfig(model=str(tiny), **options).resolved({})
    more = {name: getattr(config, name) for name in AS_CONFIGURED}
    launch = read_launch({}, [])
    shape = read_shape(json.loads((tiny / "config.json").read_text()), "model")
    return Planned(shape=shape, launch=launch, device="cpu", target_modules=config.lora_target_modules, **more)


@pytest.mark.parametrize(
    "options",
    [
        {},
        LORA | {"lora_modules_to_save": "lm_head"},
        LORA | {"use_rslora": True, "lora_modules_to_save": "k_proj"},
    ],
    ids=["full", "tied module", "a module that is not adapted"],
)
def test_the_plan_counts_what_is_trained_and_the_optimizers_state(accelerator, tiny, options):
    needs(**options)
    job, predicted = Job(accelerator, tiny, **options), counted(tiny, **options)
    job.train(range(1))
    assert predicted.trained == parameter_counts(job.model)[0]
    tensors = [value for state in job.optimizer.state.values() for key, value in state.items() if key != "step"]
    assert predicted.moments_bytes(4) == sum(tensor.nbytes for tensor in tensors)


def test_plan_counts_4_bit_weights_and_8_bit_states(accelerator, tiny):
    options = LORA | {"load_in_4bit": True}
    needs(**options)
    job, predicted = Job(accelerator, tiny, **options), counted(tiny, **options)
    real = sum(parameter.nbytes for parameter in job.model.parameters())
    for parameter in job.model.parameters():
        if state := getattr(parameter, "quant_state", None):
            real += state.absmax.nbytes + state.state2.absmax.nbytes
    assert predicted.weights_bytes(4) == pytest.approx(real, rel=0.01)
    job = Job(accelerator, tiny, optimizer="adamw-8bit")
    job.train(range(1))
    states = ("state1", "state2", "absmax1", "absmax2")
    real = sum(state[key].nbytes for state in job.optimizer.state.values() for key in states if key in state)
    assert counted(tiny, optimizer="adamw-8bit").moments_bytes(4) == pytest.approx(real, rel=0.02)


def test_without_bitsandbytes_what_needs_it_says_so(accelerator, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"--optimizer adamw-8bit needs bitsandbytes .*; pip install"):
        Job(accelerator, tiny, optimizer="adamw-8bit")
    with pytest.raises(UserError, match=r"--load-in-4bit needs bitsandbytes .*; pip install"):
        Job(accelerator, tiny, **LORA, load_in_4bit=True)


def adapted(tiny, config):
    torch.manual_seed(0)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), copy.deepcopy(config))  # peft fills it in


def test_each_type_is_a_choice_that_every_backend_trains():
    assert ADAPTERS.keys() == TYPES.keys()
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    assert all({*recorded.values()} <= fields for recorded in ADAPTERS.values())
    (choices,) = (setting.choices for setting in settings(TrainConfig) if setting.name == "adapter")
    assert choices == ("none", *ADAPTERS)
    for name, backend in itertools.product(choices, ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP")):
        assert launch_problem(TrainConfig(adapter=name), backend, 3) is None


def test_under_autocast_no_layer_casts_its_input_for_the_adapter(tiny):
    """Autocast would cast it back; the copy would be kept for the backward."""
    for precision in ("bf16", "no"):
        layers = loaded(tiny, 9, precision=precision, adapter="lora").modules()
        casts = {layer.cast_input_dtype_enabled for layer in layers if hasattr(layer, "cast_input_dtype_enabled")}
        assert casts == {precision == "no"}


def test_unmergeable_adapter_is_refused_for_full_training(tiny, tmp_path):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    adapted(tiny, config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"adapters of type prompt_tuning cannot be merged into weights"):
        loaded(tmp_path, 10)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_adapter_is_merged_for_full_training(tiny, tmp_path, config):
    model = adapted(tiny, config).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    whole, ids = loaded(tmp_path, 10).eval(), torch.tensor([[1, 2, 3, 4]])
    assert type_of(whole) is None
    assert all(parameter.requires_grad for parameter in whole.parameters())
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(whole(ids).logits, expected, rtol=1e-3, atol=1e-3)


def test_an_adapter_that_is_trained_on_keeps_how_it_was_made(tiny, tmp_path):
    made = {"adapter": "lora", "lora_r": 2, "use_dora": True, "lora_modules_to_save": "norm"}
    loaded(tiny, 10, **made).save_pretrained(tmp_path / "lora")
    assert loaded(tmp_path / "lora", 10, **made).peft_config["default"].use_dora
    for other, problem in (
        ({"lora_r": 3}, r"--lora-r 3: the adapter in .* has 2; give that"),
        ({"use_dora": False}, "--use-dora False: the adapter in .* has True"),
        ({"lora_modules_to_save": "lm_head"}, "--lora-modules-to-save lm_head: the adapter in .* has"),
    ):
        with pytest.raises(UserError, match=problem):
            loaded(tmp_path / "lora", 10, **made | other)
    config = CONFIGS["adalora"]
    adapted(tiny, config).save_pretrained(tmp_path / "adalora")
    same = {"lora_r": 2, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
    assert type_of(loaded(tmp_path / "adalora", 10, adapter="adalora", **same)) == "adalora"
    with pytest.raises(UserError, match=r"--adapter LORA: the adapter in .* has ADALORA; give"):
        loaded(tmp_path / "adalora", 10, adapter="lora", **same)


def test_final_ranks_of_adalora_wait_for_a_finite_gradient(tiny, tmp_path):
    few = {"init_r": 4, "target_r": 2, "total_step": 8, "tinit": 1, "tfinal": 3, "deltaT": 9}  # final in step 5 alone
    model, ids = adapted(tiny, AdaLoraConfig(**few, **ALL_LINEAR)), torch.tensor([[1, 2, 3, 4]])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    stepper, ranks = Stepper(Accelerator(cpu=True), model, optimizer, 1.0), []
    for step in range(8):
        stepper.backward(model(ids, labels=ids).loss * (float("nan") if step == 5 else 1))
        stepper.update(step)
        pattern = model.peft_config["default"].rank_pattern or {}
        ranks.append(sum(map(sum, pattern.values())))
    matrices = len(pattern)
    assert ranks == [0] * 6 + [2 * matrices] * 2
    with torch.no_grad():
        expected = model.eval()(ids).logits
        model.save_pretrained(tmp_path)
        weights = load_file(tmp_path / "adapter_model.safetensors")
        assert sum(len(tensor) for name, tensor in weights.items() if "lora_E" in name) == 2 * matrices
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path).eval()
        torch.testing.assert_close(again(ids).logits, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(expected, AutoModelForCausalLM.from_pretrained(tiny)(ids).logits, atol=1e-2)
