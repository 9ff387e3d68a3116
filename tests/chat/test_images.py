"""Rows with images: loss, answers and resume are exact, and no two images are taken for the same."""

from __future__ import annotations

import base64
import functools
import io
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
import vision
from accelerate import Accelerator
from chats import jsonl
from click.testing import CliRunner
from conftest import accel_sft, finished
from models import make_tiny
from peft import PeftModel
from PIL import Image
from reference_job import goes_on_to_the_same_bits
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from vision import Colours

from accel_sft import UserError
from accel_sft.batching.layouts import Batching
from accel_sft.chat.conversation import conversation
from accel_sft.chat.encode import blank_row
from accel_sft.chat.encoded import Rules
from accel_sft.chat.image_inputs import ImageInputs, begin_images
from accel_sft.chat.pictures import IMAGE_MARK, Picture
from accel_sft.commands import export_data
from accel_sft.commands.generate import generate
from accel_sft.commands.merge import write_merged
from accel_sft.data.tokenization import SplitEncoder
from accel_sft.evaluation.prompts import prompt_with, read_prompts
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import printable
from accel_sft.models.source import find_source
from accel_sft.models.tokenizer import load_processor, load_tokenizer
from accel_sft.testing import TaskConformance
from accel_sft.training import step as training_step
from accel_sft.training.optimizer import Stepper
from accel_sft.training.prepare import Assembly
from accel_sft.training.step import TrainStep

TASK = f"{vision.__file__}:Colours"
JOB = (
    *("--max-steps", "4", "--global-batch-size", "20", "--eval-every", "4", "--save-every", "2"),
    *("--max-new-tokens", "6", "--learning-rate", "0.01", "--dtype", "float32"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(family)`: the folder of a model, made once."""
    return functools.cache(lambda family: vision.make(tmp_path_factory.mktemp(family) / "model", family))


LONG = [pytest.param(name, marks=pytest.mark.long) for name in vision.FAMILIES if name != "qwen2_vl"]


@pytest.fixture(scope="module", params=["qwen2_vl", *LONG])
def run(request, made, tmp_path_factory):
    """A family's model, and a short run of it."""
    folder = tmp_path_factory.mktemp("run")
    model = made(request.param)
    done = finished(TASK, *JOB, "--model", str(model), run_dir=folder / "run")
    return model, done


class Transformers:
    """A model as its users have it: messages through its own processor, one conversation at a time."""

    def __init__(self, folder, weights=None):
        self.processor = processor_of(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(weights or folder, dtype=torch.float32).eval()

    def inputs(self, messages, **more):
        template = self.processor.tokenizer.chat_template
        how = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "chat_template": template}
        return self.processor.apply_chat_template(messages, **how, **more)

    @torch.no_grad()
    def losses(self, task, example):
        """The loss of each token of the answer, its end included."""
        begin = self.inputs(task.messages(example), add_generation_prompt=True)["input_ids"].shape[1]
        said = {"role": "assistant", "content": [{"type": "text", "text": task.target(example)}]}
        whole = self.inputs([*task.messages(example), said])
        ids = whole["input_ids"]
        end = int((ids[0] == self.processor.tokenizer.eos_token_id).nonzero()[-1])
        logits = self.model(**whole, use_cache=False).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")[begin - 1 : end].tolist()

    @torch.no_grad()
    def answer(self, messages):
        inputs = self.inputs(messages, add_generation_prompt=True)
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=6)
        return self.processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def mean_loss(self, task, split):
        losses = [loss for example in task.dataset(split) for loss in self.losses(task, example)]
        return sum(losses) / len(losses), len(losses)


def processor_of(folder):
    return load_processor(find_source(str(folder)), model=str(folder), trust_remote_code=False)


def test_losses_are_those_of_transformers_own_processor_and_model(run):
    model, done = run
    task, theirs = Colours(), Transformers(model)
    loss, tokens = theirs.mean_loss(task, "train")
    first = done.lines()[0]
    assert first["supervised_tokens"] == tokens
    assert first["loss"] == pytest.approx(loss, rel=1e-4)
    assert done.lines("eval_loss")[0]["eval_loss"] == pytest.approx(theirs.mean_loss(task, "validation")[0], rel=1e-4)
    assert done.lines()[-1]["loss"] < first["loss"]
    assert "batching padded" in done.output
    assert "warning D4" not in done.output, "equal texts with other images are not the same row"
    assert "not shared or packed: rows hold images" in " ".join(done.output.split())


def test_answers_are_those_of_transformers_greedy_generate(run):
    model, done = run
    task, theirs = Colours(), Transformers(model)
    for step, weights in ((0, None), (4, done.run_dir / "final")):
        lines = (done.run_dir / "samples" / f"step-{step:06d}.jsonl").read_text().splitlines()
        theirs = Transformers(model, weights)
        for example, sample in zip(task.dataset("validation"), map(json.loads, lines), strict=True):
            assert sample["generated"] == theirs.answer(task.messages(example)), (step, example)
    assert sample["prompt"] == "Which colours are <image> this?<image> this?"


def test_generate_answers_prompts_with_images_as_transformers_does(run, tmp_path):
    model, done = run
    theirs = Transformers(model, done.run_dir / "final")
    images = [vision.picture(20 + number, "red") for number in range(2)]
    for number, image in enumerate(images):
        vision.write_picture(image, tmp_path / f"{number}.png")
    files = [str(tmp_path / f"{number}.png") for number in range(2)]
    first, second = ({"type": "image", "image": image} for image in images)
    content = [first, {"type": "text", "text": "What is this?"}, second]
    options = ("--max-new-tokens", "6", "--image", files[0], "--image", files[1])
    answered = accel_sft("generate", str(done.run_dir / "final"), *options, "<image>What is this?<image>")
    system = {"role": "system", "content": "You see."}
    expected = printable(theirs.answer([system, {"role": "user", "content": content}]))
    assert answered.output.startswith(f"{expected}\n"), answered.output
    turns, pictures, _ = prompt_with("What is this?", files, None)
    assert (turns[-1]["content"], len(pictures)) == (f"{IMAGE_MARK * 2}What is this?", 2), "by itself they come first"


def test_prompts_whose_images_are_not_there_are_named(tmp_path, made):
    (tmp_path / "a.png").write_bytes(png())
    with pytest.raises(UserError, match="PROMPT: there are 1 marks <image>, but --image is given 2 times"):
        prompt_with("<image>?", [str(tmp_path / "a.png")] * 2, None)
    with pytest.raises(UserError, match=r"PROMPT gave the image 'c\.png'; there is no such file"):
        prompt_with("?", ["c.png"], None)
    part = {"type": "image", "path": str(tmp_path / "a.png")}
    rows = jsonl(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": [part]}]}])
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the row has images; give images with --image"):
        read_prompts(rows, None)
    arguments = (str(made("qwen2_vl")), "--interactive", "--image", "a.png")
    with pytest.raises(UserError, match="--image needs a PROMPT"):
        CliRunner().invoke(generate, arguments, catch_exceptions=False)


def test_a_resumed_run_ends_with_the_same_bits(run, tmp_path):
    _, done = run
    goes_on_to_the_same_bits(done, tmp_path / "run", 2)


def test_vision_weights_stay_frozen_and_export_has_the_processor(run):
    model, done = run
    before, after = (load_file(folder / "model.safetensors") for folder in (model, done.run_dir / "final"))
    eyes = [name for name in before if "visual" in name or "vision_tower" in name]
    assert eyes
    assert all(torch.equal(before[name], after[name]) for name in eyes)
    assert not all(torch.equal(before[name], after[name]) for name in before.keys() - {*eyes})
    image = Image.new("RGB", (24, 16))
    processors = [processor_of(folder) for folder in (model, done.run_dir / "final")]
    one, other = (
        processor(text=[processor.image_token], images=[[image]], return_tensors="pt") for processor in processors
    )
    assert torch.equal(one["pixel_values"], other["pixel_values"])


# without torchvision, transformers by itself makes no processor that could read videos too, as Qwen's can
@pytest.mark.parametrize("run", [pytest.param("gemma3", marks=pytest.mark.long)], indirect=True)
def test_the_cards_lines_ask_with_an_image(run):
    model, done = run
    final, task = done.run_dir / "final", Colours()
    card = (final / "README.md").read_text()
    vision.write_picture(vision.picture(20, task.names(20)[0]), final / "image.png")
    code = card.partition("```python\n")[2].partition("```")[0]
    said = subprocess.run([sys.executable, "-c", code], cwd=final, capture_output=True, text=True)
    assert said.stdout == Transformers(model, final).answer(task.messages(20)) + "\n", said.stderr[-2000:]


def test_the_kit_knows_pil_images_by_their_pixels():
    kit = type("Kit", (TaskConformance,), {"task": Colours()})()
    kit.test_calls_are_repeatable()
    kit.test_no_prompt_of_validation_is_in_training()


def encoder(model, task, **rules):
    source = find_source(str(model))
    tokenizer = load_tokenizer(source, trust_remote_code=False)
    rules = Rules(frozenset({tokenizer.eos_token_id}), **{"max_length": 512, "truncation": "error"} | rules)
    return SplitEncoder(Accelerator(cpu=True), tokenizer, task, rules, lambda: processor_of(model))


def batch_of(rows, device="cpu"):
    return Batching("padded", 512).batch(rows, 0, torch.device(device))


def test_changed_image_misses_the_cache_and_changes_the_loss(made, tmp_path):
    task = Colours(folder=str(tmp_path / "images"), text_too=False)
    encode = encoder(made("qwen2_vl"), task)
    examples = vision.Kept(task.dataset("train"), "a fingerprint of the rows, which says nothing of files")
    before = encode(examples, "train").kept
    assert encode(examples, "train").notes == ["train: 20 examples, tokens from the cache"]
    batch = batch_of(before[:2])
    model = AutoModelForImageTextToText.from_pretrained(made("qwen2_vl"))
    logits = model(**batch.inputs).logits
    (path,) = (tmp_path / "images").glob("1-*.png")
    vision.write_picture(Image.new("RGB", (24, 16), (1, 2, 3)), path)  # of the same size, and so the same tokens
    with pytest.raises(UserError, match="train example 1: its images have changed since the start"):
        batch_of(before[:2])
    after = encode(examples, "train")
    assert after.notes == []
    changed = [row.index for row, other in zip(before, after.kept, strict=True) if row != other]
    assert changed == [1]
    assert before[1].input_ids == after.kept[1].input_ids
    assert before.fingerprint != after.kept.fingerprint
    other = model(**batch_of(after.kept[:2]).inputs).logits
    assert torch.equal(logits[0], other[0])
    assert not torch.allclose(logits[1], other[1], atol=0.1)


@pytest.mark.parametrize("family", ["qwen2_vl", *LONG])
def test_processors_compute_on_the_host_whatever_the_device(made, family):
    """On GPUs `Batching.batch` makes tensors where the default device is the GPU; processors that heed it would too."""
    row = blank_row(ImageInputs(lambda: processor_of(made(family))))
    batch = batch_of([row], "meta")
    assert {value.device.type for value in batch.inputs.values()} == {"meta"}


def test_images_that_a_thread_prepared_make_the_same_batch(made, monkeypatch):
    rows = encoder(made("qwen2_vl"), Colours(text_too=False))(range(20), "train").kept
    calls = []
    real = ImageInputs._processed
    monkeypatch.setattr(ImageInputs, "_processed", lambda *given: calls.append(given) or real(*given))
    expected = batch_of(rows[:3]).inputs
    state = torch.get_rng_state()
    for begun, processed in ((rows[:3], 2), (rows[3:5], 4)):
        begin_images([row.images for row in begun])
        inputs = batch_of(rows[:3]).inputs
        assert all(torch.equal(inputs[name], value) for name, value in expected.items())
        assert len(calls) == processed
    assert torch.equal(torch.get_rng_state(), state)
    rows[0].images.origin.inputs.processor.image_processor = None
    begin_images([rows[0].images])
    with pytest.raises(UserError, match="train example 0: the model's processor rejects the image"):
        batch_of(rows[:1])


def test_images_of_a_forward_begin_before_the_previous_backward(made, monkeypatch, tmp_path):
    happened, rows = [], encoder(made("qwen2_vl"), Colours(text_too=False))(range(3), "train").kept
    monkeypatch.setattr(training_step, "begin_images", lambda images: happened.append([one.index for one in images]))
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: happened.append("backward"))
    model = AutoModelForImageTextToText.from_pretrained(made("qwen2_vl"))
    stepper = Stepper(Accelerator(cpu=True), model, None, 1.0)
    step = TrainStep(stepper, Batching("padded", 512, rows=1), 0, RunDir(tmp_path), print)
    step.forward_backward(rows[:2], 2, 1, rows[2:])
    assert happened == [[0], "backward", [2], "backward"]  # the longer row, 1, is computed first


def test_rows_that_would_lose_image_tokens_are_left_out(made):
    whole = encoder(made("qwen2_vl"), Colours())(range(20), "train").kept
    most = max(len(row.input_ids) for row in whole) - 1
    cut = encoder(made("qwen2_vl"), Colours(), max_length=most, truncation="right")(range(20), "train")
    for row in cut.kept:
        assert row.input_ids == next(uncut.input_ids for uncut in whole if uncut.index == row.index)
    (left_out,) = cut.left_out.values()
    assert left_out == [row.index for row in whole if len(row.input_ids) > most]
    assert cut.cut == []


class Given(Colours):
    """One conversation: the parts that the test gives."""

    parts = ()

    def messages(self, example):
        return [{"role": "user", "content": list(self.parts)}]


def as_file(image, kind="png", **options):
    image.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def png(colour=(1, 2, 3), size=(16, 16), mode="RGB"):
    return as_file(Image.new(mode, size, colour if mode == "RGB" else 1))


def test_image_is_the_same_in_every_given_form(made, tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(png())
    encoded = base64.b64encode(png()).decode()
    forms = [
        *({"image": str(tmp_path / "a.png")}, {"path": tmp_path / "a.png"}, {"url": str(tmp_path / "a.png")}),
        *({"image": png()}, {"base64": encoded}, {"url": f"data:image/png;base64,{encoded}"}),
        {"image": {"bytes": png(), "path": None}},
        {"image": Image.open(io.BytesIO(png()))},
    ]
    encode = encoder(made("qwen2_vl"), Given())
    rows = []
    for form in forms:
        monkeypatch.setattr(Given, "parts", ({"type": "image", **form}, {"type": "text", "text": "?"}))
        (row,) = [row for part in encode.parts([0], [0], "train") for row in part.kept]
        rows.append(row)
    assert len({tuple(row.input_ids) for row in rows}) == 1
    assert len({row.images.digest for row in rows[:-1]}) == 1


def transparent(mode):
    """A black pixel that is transparent beside a grey one, as a file."""
    image = Image.new(mode, (2, 1))
    if mode == "P":
        image.putpalette([0, 0, 0, 90, 90, 90])
    image.putpixel((1, 0), {"RGBA": (90, 90, 90, 255), "P": 1, "RGB": (90, 90, 90)}[mode])
    return as_file(image, **({} if mode == "RGBA" else {"transparency": (0, 0, 0) if mode == "RGB" else 0}))


@pytest.mark.parametrize("mode", ["RGBA", "P", "RGB"])
def test_what_is_transparent_becomes_white(mode):
    content = transparent(mode)
    for given in (content, Image.open(io.BytesIO(content))):
        image = Picture(given).opened()
        assert image.mode in ("RGB", "L")
        assert numpy.asarray(image.convert("RGB"))[0].tolist() == [[255] * 3, [90] * 3]


def test_a_half_transparent_image_stays_upright():
    image = Image.new("RGBA", (4, 2), (0, 0, 0, 51))
    exif = image.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    opened = Picture(as_file(image, exif=exif)).opened()
    assert opened.size == (2, 4)
    assert opened.getpixel((0, 0)) == (204, 204, 204)


def test_pil_images_with_other_palettes_are_others():
    one, other = (Image.new("P", (16, 16)) for _ in range(2))
    one.putpalette([9, 9, 9])
    other.putpalette([200, 9, 9])
    assert Picture(one).digest != Picture(other).digest


def test_text_with_an_image_token_is_refused_beside_images(made, monkeypatch):
    original = Colours.messages

    def with_token(self, example):
        turns = original(self, example)
        return [*turns[:-1], {"role": "user", "content": "<|image_pad|>"}] if example == 13 else turns

    def check(**rules):
        encode = encoder(made("qwen2_vl"), Colours(), **rules)
        Assembly._check_texts(SimpleNamespace(encode=encode), encode(range(20), "train"))

    check()
    monkeypatch.setattr(Colours, "messages", with_token)
    check()  # it is characters
    with pytest.raises(UserError, match=r"^train example 13: the text has the image placeholder <\|image_pad\|>"):
        check(control_tokens="tokens")


def test_rows_with_images_are_not_exported(tmp_path):
    with pytest.raises(UserError, match=r"^train example 0.*: has images, which export-data cannot write"):
        export_data.run(Colours(folder=str(tmp_path / "images")), str(tmp_path / "rows"))
    assert not (tmp_path / "rows").exists()


REFUSED = {
    "a stripe": ({"image": Image.new("RGB", (2001, 2))}, "rejects the image (ValueError: absolute aspect ratio"),
    "a missing file": ({"path": "nowhere.png"}, "'nowhere.png'; there is no such file"),
    "an address": ({"url": "https://example.com/a.png"}, "fetched again in every epoch; download it"),
    "no image": ({"image": b"no image"}, "image 2 of the row cannot be read: cannot identify image"),
    "grey of 16 bits": (
        {"image": as_file(Image.new("I;16", (2, 1)))},
        "more than 8 bits a channel (Pillow's mode I;16)",
    ),
    "a program": ({"image": as_file(Image.new("RGB", (16, 16)), "eps")}, "EPS is a program, not pixels"),
    "too many pixels": ({"image": png(size=(9500, 9500), mode="1")}, "(90250000 pixels) exceeds limit of 89478485 pix"),
    "two": ({"image": png(), "path": "a.png"}, "expected one image in it"),
    "a video": ({"type": "video", "video": "a.mp4"}, 'expected {"type": "text"'),
    "a placeholder": ({"type": "text", "text": "<|image_pad|>"}, "writes 2 placeholders"),
    "a mark": ({"type": "text", "text": "\ue006\ue007"}, "U+E006 U+E007"),
}


@pytest.mark.parametrize(("part", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_refused_by_row(made, monkeypatch, part, message):
    monkeypatch.setattr(Given, "parts", ({"type": "image", "image": png()}, {"type": "image", **part}))
    encode = encoder(made("qwen2_vl"), Given(), control_tokens="tokens")
    with pytest.raises(UserError) as raised:
        list(encode.parts([0], [0], "train"))
    (line,) = raised.value.problems
    assert line.startswith("train example 0: ")
    assert message in line


def test_missing_parts_for_reading_images_are_named(made, tmp_path, monkeypatch):
    encode = encoder(make_tiny(tmp_path / "tiny"), Colours())
    with pytest.raises(UserError, match="it reads no images, but the data has some; name a vision-language model"):
        encode(range(20), "train")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("transformers.utils.is_torchvision_available", lambda: True)
    with pytest.raises(UserError, match=r"cannot be loaded \(operator torchvision::nms does not exist\)"):
        processor_of(made("qwen2_vl"))
    monkeypatch.setattr("transformers.utils.is_vision_available", lambda: False)
    with pytest.raises(UserError, match=r"need Pillow: pip install 'accel-sft\[images\]'"):
        processor_of(made("qwen2_vl"))


def test_earlier_answers_of_a_chat_have_the_images_before_them(monkeypatch):
    red, blue = ({"type": "image", "image": png(colour)} for colour in ((9, 0, 0), (0, 0, 9)))
    monkeypatch.setattr(Given, "parts", (red,))
    following = [
        *({"role": "assistant", "content": "It is red"}, {"role": "user", "content": [blue]}),
        *({"role": "assistant", "content": "It is blue"}, {"role": "user", "content": [red]}),
    ]
    following += [{"role": "assistant", "content": "what is left", "weight": 0}]
    monkeypatch.setattr(Given, "target", lambda self, example: following)
    chat = conversation(Given(), [0], "train", 0)
    assert [len(part.images) for part in chat.by_answer()] == [1, 2]
    assert len(chat.images) == 2
    following[2] = {"role": "assistant", "content": [red]}
    with pytest.raises(UserError, match="an answer with an image; answers can only be text"):
        conversation(Given(), [0], "train", 0)


@pytest.mark.parametrize("family", ["qwen2_vl", pytest.param("qwen3_5", marks=pytest.mark.long)])
def test_an_adapter_leaves_what_reads_images_alone_and_is_merged(made, tmp_path, family):
    model, task = made(family), Colours()
    quick = ("--adapter", "lora", "--lora-r", "2", "--max-steps", "2", "--save-every", "off")
    done = finished(TASK, *JOB, *quick, "--model", str(model), run_dir=tmp_path / "run")
    adapter = load_file(done.run_dir / "final" / "adapter_model.safetensors")
    assert adapter
    assert not [name for name in adapter if "visual" in name]
    assert not write_merged(str(done.run_dir / "final"), tmp_path / "merged", None, False)[-1].startswith("note")
    adapted, merged = Transformers(model), Transformers(tmp_path / "merged")
    adapted.model = PeftModel.from_pretrained(adapted.model, done.run_dir / "final").eval()
    for theirs in (adapted, merged):
        losses = [loss for example in range(20, 27) for loss in theirs.losses(task, example)]
        assert done.result()["after"]["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
