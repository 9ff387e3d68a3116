"""Law 1 inside a step: however its rows are laid out, each example is run once, and loss and gradients are the same."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import types

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from forwards import CPU, WAYS, batching_of, loss_and_gradients, rows
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from accel_sft.api.config import TrainConfig
from accel_sft.api.options import settings
from accel_sft.batching import choice, collate, loss, verify
from accel_sft.batching.choice import choose_batching, least_work
from accel_sft.batching.layouts import LAYOUTS, Batching
from accel_sft.batching.loss import nll, nll_sum
from accel_sft.batching.trial import Trial
from accel_sft.batching.verify import UNLIMITED
from accel_sft.chat.encoded import Encoded
from accel_sft.io.run_dir import RunDir
from accel_sft.launch import collectives
from accel_sft.models.prefix_attention import install, installed
from accel_sft.training.step import TrainStep

install(CPU)


def by_hand(model, example):
    ids = torch.tensor([example.input_ids])
    logs = model(ids).logits.log_softmax(-1)[0]
    return -sum(logs[t - 1, ids[0, t]].item() for t in range(max(example.prompt_length, 1), ids.shape[1]))


def same(got, expected):
    """Whether losses and gradients, as `loss_and_gradients` returns them, are the same to float error."""
    assert got[0] == pytest.approx(expected[0], rel=1e-6)
    for name, gradient in expected[1].items():
        assert (got[1][name] - gradient).norm() <= 2e-6 * gradient.norm() + 1e-9, name


# --- who runs what ---


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_get_equally_many_forwards_in_any_order(way, world_size):
    examples = rows(17)
    for tokens, limit in ((1024, 1), (1024, 3), (1024, 64), (60, None), (200, None), (5, None)):
        batching = batching_of(way, tokens, limit)
        ranks = batching.divide(examples, world_size)
        assert ranks == batching.divide(examples[::-1], world_size)
        assert len(ranks) == world_size
        assert len({len(forwards) for forwards in ranks}) == 1
        forwards = list(itertools.chain(*ranks))
        assert sorted(example.index for forward in forwards for example in forward) == list(range(17))
        for forward in forwards:
            assert len(forward) <= (limit or 17)
            if not limit and len(forward) > 1:
                assert batching.batch(forward, 0, CPU).inputs["input_ids"].numel() <= tokens


@pytest.mark.parametrize("way", WAYS)
def test_ranks_carry_near_equal_tokens(way):
    batching = batching_of(way, 128)
    ranks = batching.divide(rows(64), 2)
    loads = [sum(batching.batch(f, 0, CPU).inputs["input_ids"].numel() for f in forwards) for forwards in ranks]
    assert abs(loads[0] - loads[1]) <= 0.1 * sum(loads)
    assert [len(forwards) for forwards in batching_of(way, 4096).divide(rows(16), 2)] == [1, 1]


def test_shared_prefix_ends_before_what_predicts_a_target():
    ids = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7]]

    def prefix(layout, prompts, earlier=()):
        examples = [Encoded(0, row, prompt, earlier) for row, prompt in zip(ids, prompts, strict=True)]
        return batching_of((layout, "rows"), 64).way.prefix(examples)

    assert [prefix("shared", prompts) for prompts in ((5, 6, 5), (4, 3, 4), (1, 4, 4))] == [4, 2, 0]
    assert (prefix("shared", (4, 4, 4), ((2, 3),)), prefix("packed", (4, 4, 4))) == (1, 0)
    assert Batching("shared", 64, attention="rows").way.prefix([]) == 0


# --- that it is the same mathematics ---


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", ["labelled", "everywhere"])
def test_the_loss_is_that_of_the_supervised_tokens_by_hand(model, way, head):
    examples = [*rows(5), Encoded(5, [7], 1), Encoded(6, [4, 9, 9], 0), Encoded(7, [1, 2, 3], 3)]
    batching = batching_of(way, 64, head=head)
    forwards = batching.divide(examples, 1)[0]
    got = sum(nll_sum(model, batching.batch(forward, 0, CPU)).item() for forward in forwards)
    assert got == pytest.approx(sum(by_hand(model, example) for example in examples), rel=1e-5)


@pytest.mark.parametrize("way", WAYS[:-1])
@pytest.mark.parametrize(("tokens", "checkpointing"), [(48, False), (4096, False), (300, True)])
def test_every_layout_gives_the_loss_and_gradients_of_padded_rows(model, way, tokens, checkpointing):
    model = copy.deepcopy(model).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = loss_and_gradients(model, batching_of(WAYS[-1], 4096), rows())
    same(loss_and_gradients(model, batching_of(way, tokens), rows(), world_size=2), expected)


@pytest.mark.parametrize("way", WAYS[:-1])
def test_grouped_heads_and_reduced_precision_are_the_same_to_rounding(way):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(small(Qwen2Config, num_key_value_heads=1, num_attention_heads=2)).eval()
    expected = sum(by_hand(model, example) for example in rows())
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        got, _ = loss_and_gradients(model.to(dtype), batching_of(way, 300), rows())
        assert got == pytest.approx(expected, rel=tolerance)


def test_a_forward_without_examples_gives_a_connected_zero(model):
    model = copy.deepcopy(model)
    nothing = nll_sum(model, batching_of(WAYS[0], 64).batch([], 0, CPU))
    assert nothing.item() == 0.0
    nothing.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_rows_behind_a_prefix_have_no_quadratic_mask():
    alike = [Encoded(number, [7] * 300 + [number] * 300, 310) for number in range(1, 4)]
    inputs = batching_of(("shared", "rows"), 4096).batch(alike, 0, CPU).inputs
    tensors = [*inputs.values(), *vars(inputs["rows"]).values()]
    assert max(tensor.numel() for tensor in tensors if torch.is_tensor(tensor)) == 300 + 3 * 300


def test_ranks_without_a_row_do_not_change_the_loss(model, tmp_path):
    """Two of three ranks have nothing to learn from: theirs is a part of a sum, and no 0.0 in a mean."""
    model, examples, parts = copy.deepcopy(model), rows(1), []
    for rank in range(3):
        ranks = {"num_processes": 3, "process_index": rank, "parallelism_config": None}
        accelerator = types.SimpleNamespace(device=CPU, **ranks)
        stepper = types.SimpleNamespace(accelerator=accelerator, model=model, forwards_alone=True, averaged_over=1)
        stepper.boundary, stepper.backward = (lambda last: contextlib.nullcontext()), torch.Tensor.backward
        step = TrainStep(stepper, Batching("padded", 64), 0, RunDir(tmp_path), print)
        parts.append(step.forward_backward(examples, examples[0].supervised_tokens, 1)[0].item())
    assert sorted(parts)[:2] == [0.0, 0.0]
    assert sum(parts) == pytest.approx(by_hand(model, examples[0]) / examples[0].supervised_tokens, rel=1e-5)


def test_pad_token_is_learnt_where_it_ends_the_turn():
    examples = [Encoded(0, [5, 6, 7, 8, 3], 3), Encoded(1, [5, 9, 3], 1)]
    batch = batching_of(WAYS[-1], 64).batch(examples, 3, CPU)
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 8, 3], [5, 9, 3, 3, 3]]
    assert batch.inputs["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert batch.keep.tolist() == [[False, False, True, True, False], [True, True, False, False, False]]
    assert batch.targets.tolist() == [8, 3, 9, 3]


# --- what a model can take ---


def trial(model, examples=None, **settings):
    return Trial(Accelerator(cpu=True), model, TrainConfig(**settings).resolved({}), examples or rows(), 0)


def chosen(*subject, **settings):
    return choose_batching(trial(*subject, **settings))


def test_attention_of_rows_is_registered_when_first_used(model, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)  # transformers' own
    assert chosen(model, batching="padded")[0].layout == "padded"
    by_rows = batching_of(("shared", "rows"), 64)
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
    with pytest.raises(RuntimeError, match=r"call prefix_attention.install\(\)"):  # plain attention would mix rows
        by_rows.batch(rows(4), 0, CPU)
    assert chosen(model, batching="shared")[0].attention == "rows"
    assert installed()


def test_the_settings_win(model):
    batching, message = chosen(model, batching="shared")
    line = f"batching shared (one copy of what rows share), up to {batching.tokens:,} tokens per forward"
    assert message == f"{line}, the least work of 3 sizes"
    assert chosen(model, batching="packed")[0].layout == "packed"
    padded = batching_of(("padded", "causal"), UNLIMITED, 4, head="pieces")
    assert chosen(model, batching="padded", micro_batch_size="4")[0] == padded
    assert chosen(model, micro_batch_size="4")[0] == batching_of(("shared", "rows"), UNLIMITED, 4, head="pieces")


def test_rows_without_a_common_prompt_are_packed(model):
    batching, line = chosen(model, [Encoded(number, [number + 3, 7, 8, 9], 1) for number in range(9)])
    assert batching.layout == "packed"
    assert "not shared: rows have no common beginning before their first target" in line


def test_earlier_choice_is_kept_while_it_is_exact(model):
    earlier = batching_of(("shared", "rows"), 777, head="pieces")
    for attention in ("sdpa", "eager"):
        changed = copy.deepcopy(model)
        changed.set_attn_implementation(attention)
        batching, _ = choose_batching(trial(changed, rows()), before=earlier)
        assert (batching == earlier) is (attention == "sdpa")


def test_recorded_batching_keeps_its_words_and_comes_back():
    for layout, head in itertools.product(LAYOUTS, loss.HEADS):
        batching = Batching(layout.name, 64, attention=layout.attention, head=head)
        record = json.loads(json.dumps(choice.recorded(["auto", "auto"], batching)))
        words = {"layout": layout.name, "tokens": 64, "rows": None, "attention": layout.attention, "head": head}
        assert record["chosen"] == words
        assert (choice.restored(record, ["auto", "auto"]), batching.way) == (batching, layout)
        for wrong in ({"layout": "woven"}, {"attention": "none"}, {"head": "fused"}, {"later": 1}):
            assert choice.restored({**record, "chosen": words | wrong}, ["auto", "auto"]) is None
    (choices,) = (setting.choices for setting in settings(TrainConfig) if setting.name == "batching")
    assert choices == ("auto", *dict.fromkeys(layout.name for layout in LAYOUTS))


def test_two_starts_choose_alike_and_read_no_clock(model, monkeypatch):
    batching, line = chosen(model)
    assert "the least work of 5 sizes" in line
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("something was timed"))
    assert chosen(model)[0] == batching


def test_smallest_of_nearly_equal_sizes_is_taken(model, monkeypatch):
    job = trial(model, rows(64, instruction=0))
    sizes = [batching_of(("packed", "rows"), n) for n in (64, 128, 256, 4096)]
    assert least_work(job, sizes).tokens == 4096
    work = {64: 104.0, 128: 102.9, 256: 101.0, 4096: 100.0}
    monkeypatch.setattr(choice, "_work", lambda _, batching: work[batching.tokens])
    assert least_work(job, sizes).tokens == 128


def test_runs_choice_is_read_for_its_own_job_and_launch(tmp_path):
    accelerator, batching, options = Accelerator(cpu=True), batching_of(WAYS[2], 64), ["auto", "auto"]
    assert choice.read(accelerator, RunDir(tmp_path), ["job"]) is None
    choice.write(accelerator, RunDir(tmp_path), options, batching, ["job"])
    record = choice.read(accelerator, RunDir(tmp_path), ["job"])
    assert choice.restored(record, options) == batching
    assert choice.restored(record, ["auto", "4"]) is None, "something else is asked for now"
    assert choice.read(accelerator, RunDir(tmp_path), ["other data"]) is None
    record = json.loads((tmp_path / "batching.json").read_text())
    record["layout"]["ranks"] = 2
    (tmp_path / "batching.json").write_text(json.dumps(record))
    assert choice.read(accelerator, RunDir(tmp_path), ["job"]) is None, "another launch"
    for broken in ("[", "[]"):
        (tmp_path / "batching.json").write_text(broken)
        assert choice.read(accelerator, RunDir(tmp_path), ["job"]) is None
    (tmp_path / "batching.json").unlink()
    os.mkfifo(tmp_path / "batching.json")  # to read it would wait for ever
    assert choice.read(accelerator, RunDir(tmp_path), ["job"]) is None


def test_dropout_is_not_shared_between_rows(model):
    dropping = copy.deepcopy(model)
    dropping.config.attention_dropout = 0.1
    batching, reasons = chosen(dropping, batching="shared")
    assert batching.layout == "packed"
    assert "not shared: rows of a step would share their dropout (attention_dropout)" in reasons


def test_attention_without_our_mask_continues_from_a_cache(tiny):
    eager = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager")
    batching, reasons = chosen(eager)
    assert (batching.layout, batching.attention) == ("shared", "cache"), reasons
    assert reasons.startswith("batching shared (one copy of what rows share, in a cache), up to ")
    assert "not packed: attention eager cannot keep rows apart" in reasons


def small(kind, **settings):
    common = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
    return kind(**{**common, "num_hidden_layers": 2, "num_key_value_heads": 2, **settings})


@pytest.mark.parametrize("window", [16, 512])
def test_rows_reaching_a_sliding_window_continue_from_a_cache(window):
    torch.manual_seed(0)
    model = MistralForCausalLM(small(MistralConfig, sliding_window=window))
    short = [row for row in rows(64, instruction=4, longest=8) if len(row.input_ids) <= 16]
    (longer,) = rows(1, instruction=40, longest=8)
    assert chosen(model, short, batching="shared")[0].attention == "rows"
    batching, reasons = choose_batching(trial(model, short, batching="shared"), also=[longer])
    assert batching.attention == ("cache" if window == 16 else "rows"), reasons


def test_undeclared_window_is_detected_by_the_longest_row(monkeypatch):
    torch.manual_seed(0)
    model = MistralForCausalLM(small(MistralConfig, sliding_window=16, initializer_range=0.5))
    monkeypatch.setattr("accel_sft.batching.layouts.limited_layers", lambda model, longest: None)
    batching, reasons = chosen(model, rows(64, instruction=4, longest=40), batching="packed")
    assert batching.layout == "padded"
    assert "its loss is not that of single rows" in reasons


def test_randomness_that_is_no_module_is_seen_by_two_forwards():
    torch.manual_seed(0)
    config = small(PhimoeConfig, num_local_experts=4, num_experts_per_tok=2, intermediate_size=32)
    model = PhimoeForCausalLM(config)  # it draws experts at random
    batching, line = chosen(model, batching="shared")
    assert batching.layout == "packed", line
    assert "would share their dropout (its forward is random in training)" in line


def flash(module, query, key, value, attention_mask, cu_seq_lens_q=None, max_length_q=None, **kwargs):
    """What FlashAttention computes: of rows in one sequence, one row after another by sdpa."""
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    bounds = [*itertools.pairwise(cu_seq_lens_q.tolist())]
    assert max_length_q == max(b - a for a, b in bounds)
    own = [[part[:, :, a:b] for part in (query, key, value)] for a, b in bounds]
    kwargs["is_causal"] = True
    return torch.cat([sdpa_attention_forward(module, *row, None, **kwargs)[0] for row in own], dim=1), None


def test_flash_attention_gets_the_ends_of_packed_rows(model):
    name = "kernels-community/flash-attn2"  # as transformers renames it
    AttentionInterface.register(name, flash)
    AttentionMaskInterface.register(name, sdpa_mask)
    flashing = copy.deepcopy(model)
    flashing.config._attn_implementation = name
    batching, reasons = chosen(flashing, batching="packed")
    assert (batching.layout, batching.attention) == ("packed", "varlen"), reasons
    batching, reasons = chosen(flashing, batching="shared")
    assert (batching.layout, batching.attention) == ("shared", "cache"), reasons
    expected = loss_and_gradients(model, batching_of(WAYS[-1], 4096), rows())
    same(loss_and_gradients(flashing, batching_of(("packed", "varlen"), 300), rows()), expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_head_in_pieces_gives_the_same_loss_and_gradients(model, way, monkeypatch):
    expected = loss_and_gradients(model, batching_of(way, 300), rows())
    seen, real = [], loss._nll
    monkeypatch.setattr(loss, "_nll", lambda logits, targets: seen.append(len(logits)) or real(logits, targets))
    monkeypatch.setattr(loss, "MOST_LOGITS", 1000)
    same(loss_and_gradients(model, batching_of(way, 300, head="pieces"), rows()), expected)
    assert max(seen) <= 1000 // model.config.vocab_size
    assert "forward" not in vars(model.get_output_embeddings())


class Counted(torch.nn.Linear):
    def forward(self, hidden):
        self.counts.append(hidden.shape[:-1].numel())
        return super().forward(hidden)


def test_checks_before_the_first_step_hold_few_logits(model, monkeypatch):
    model, most = copy.deepcopy(model), 20
    head = model.get_output_embeddings()
    head.__class__, head.counts = Counted, []
    monkeypatch.setattr(verify, "HEAD_TOKENS", most)
    monkeypatch.setattr(loss, "MOST_LOGITS", most * model.config.vocab_size)
    long = [Encoded(number, [number + 3, *[7, 8, 9] * 30], 1) for number in range(4)]
    assert chosen(model, long)[0].head == "pieces"
    assert max(head.counts) == most


def test_a_head_that_is_scaled_afterwards_is_never_in_pieces():
    torch.manual_seed(0)
    for softcap, pieces in ((None, True), (5.0, False)):
        config = small(Gemma3TextConfig, final_logit_softcapping=softcap, layer_types=["full_attention"] * 2)
        assert (chosen(Gemma3ForCausalLM(config))[0].head == "pieces") is pieces


# --- what the device has room for ---


def test_batch_is_copied_where_memory_cannot_be_pinned(monkeypatch):
    def refuse(tensor):
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    with pytest.warns(UserWarning, match=r"host memory cannot be pinned \(CUDA error: out of memory"):
        assert collate._pinned(row := torch.ones(2)) is row


def test_reason_on_one_rank_rules_a_layout_out(model, monkeypatch):
    monkeypatch.setattr(collectives, "gather_object", lambda mine: [*mine, "the other rank says so"])
    batching, reasons = chosen(model)
    assert (batching.layout, batching.head) == ("padded", "everywhere")
    assert "not shared: the other rank says so" in reasons


def test_one_long_row_does_not_fill_many_short_ones_up():
    examples = [Encoded(0, [1] * 2000, 1), *(Encoded(index, [2, index], 1) for index in range(1, 300))]
    batching = batching_of(("shared", "rows"), 4096)
    forwards = batching.divide(examples, 1)[0]
    assert sorted(example.index for forward in forwards for example in forward) == list(range(300))
    for forward in forwards:
        rows_in = batching.batch(forward, 0, CPU).inputs.get("rows")
        assert rows_in is None or len(rows_in.own) <= 2 * 4096


class Wrapped(torch.nn.Module):
    """The real model, given `inputs` in place of its own; unless it is `aware`, its attention knows no `rows`."""

    aware = True

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def forward(self, input_ids, attention_mask=None, position_ids=None, logits_to_keep=0, use_cache=None, **more):
        inputs = self.inputs(input_ids, attention_mask, position_ids) | (more if self.aware else {})
        output = self.model(**inputs, logits_to_keep=logits_to_keep, use_cache=False)
        output.logits = output.logits * self.factor(input_ids, attention_mask, output.logits)
        return output

    def inputs(self, ids, mask, positions):
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}

    def factor(self, ids, mask, logits):
        return 1


class Unaware(Wrapped):
    aware = False


class Sighted(Unaware):
    """A model whose tokens see what comes after them where no mask says what is padding, as a mean over all would."""

    def factor(self, ids, mask, logits):
        return 1 if mask is not None else 1 + 1e-6 * (ids == 1).sum()


def test_rows_have_a_mask_only_where_it_is_needed(model):
    for subject, attention in ((model, "causal"), (Sighted(model), "mask")):
        assert chosen(subject, batching="padded")[0].attention == attention


class Refusing(Unaware):
    """One that takes nothing but padded rows, and refuses the rest without a message."""

    def inputs(self, ids, mask, positions):
        if mask is None or mask.ndim > 2:
            raise AssertionError
        return super().inputs(ids, mask, positions)


class Smearing(Wrapped):
    """One that sees a little of the token before, whosever it is."""

    leak = 1e-6

    def inputs(self, ids, mask, positions):
        embedded = self.get_input_embeddings()(ids)
        embedded = embedded + self.leak * torch.roll(embedded, 1, dims=1)
        return {"inputs_embeds": embedded, "attention_mask": mask, "position_ids": positions}


@pytest.mark.parametrize(
    ("wrapped", "reason"),
    [
        (Unaware, "not shared: its loss is not that of single rows"),
        (Refusing, "the model's forward fails (AssertionError)"),
        (Smearing, "not packed: a change in one row changes another"),
    ],
)
def test_examples_that_would_see_each_other_are_detected(model, wrapped, reason):
    batching, reasons = chosen(wrapped(model))
    assert (batching.layout, reason in reasons) == ("padded", True), reasons


class Unplaced(Wrapped):
    """One that takes positions and ignores them: a row of several begins where it stands."""

    def inputs(self, ids, mask, positions):
        return super().inputs(ids, mask, None)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_model_that_ignores_positions_is_detected_in_any_precision(precision, request):
    AcceleratorState._reset_state()
    request.addfinalizer(AcceleratorState._reset_state)
    torch.manual_seed(0)
    shape = {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 97, "n_positions": 512}
    model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    for subject, layout in ((model, "shared"), (Unplaced(model), "padded")):
        prepared = accelerator.prepare(copy.deepcopy(subject))
        batching, reasons = choose_batching(Trial(accelerator, prepared, TrainConfig().resolved({}), rows(), 0))
        assert batching.layout == layout, reasons


class Wavering(Smearing):
    """A model that rounds otherwise from one forward to the next, as on a busy machine; rows see `leak` of others."""

    leak = 0.0

    def factor(self, ids, mask, logits):
        return 1 + 3e-7 * torch.randn_like(logits)


def test_wavering_rounding_is_no_leak_and_hides_none(model):
    wavering = Wavering(model)
    batching, reasons = chosen(wavering, batching="shared")
    assert batching.layout == "shared", reasons
    wavering.leak = 1e-4
    batching, reasons = chosen(wavering)
    assert batching.layout == "padded"
    assert "not packed: a change in one row changes another" in reasons


class WholeHead(Wrapped):
    """A model of the kind that knows no logits_to_keep."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None):
        return self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)


def test_model_without_logits_to_keep_trains_its_whole_head(model):
    batching, _ = chosen(WholeHead(model))
    assert batching.head == "everywhere"
    batch = batching_of(WAYS[-1], 1024, head="everywhere").batch(rows(4), 0, CPU)
    expected = nll(model, batching_of(WAYS[-1], 1024).batch(rows(4), 0, CPU))
    assert torch.allclose(nll(WholeHead(model), batch), expected, atol=1e-5)
