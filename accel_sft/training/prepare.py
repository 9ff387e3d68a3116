"""Makes a run's parts from its settings: source, tokenizer, tokenized examples, step plan, model, evaluator."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.batching.device_memory import forwards_alone
from accel_sft.chat.conversation import limited_examples, read_split
from accel_sft.chat.encode import blank_row
from accel_sft.chat.encoded import UNPAIRED, Encoded
from accel_sft.data.step_plan import StepPlan, check_sources, in_words, rows_by_source
from accel_sft.data.token_store import StoredEncoding
from accel_sft.data.tokenization import SplitEncoder
from accel_sft.evaluation.evaluator import Evaluator
from accel_sft.evaluation.generate import Generator
from accel_sft.evaluation.scoring import check_scoring, limits_on_scores
from accel_sft.io.files import begin_folder, put_in_place
from accel_sft.io.run_dir import RunDir
from accel_sft.io.terminal import terminal, wrapped
from accel_sft.launch.collectives import by_each_rank, decided_by_main
from accel_sft.launch.deepspeed_ops import lacking
from accel_sft.launch.environment import device_count
from accel_sft.launch.groups import sequence_ranks, tensor_ranks
from accel_sft.launch.info import Launch
from accel_sft.memory import lengths
from accel_sft.memory.model_config import read_config
from accel_sft.models.architecture import beyond_text
from accel_sft.models.kernels import bitsandbytes, liger
from accel_sft.models.load import load_model
from accel_sft.models.source import Source, find_source, is_tiny, other_base
from accel_sft.models.tiny import build_tiny, texts_of
from accel_sft.models.tokenizer import GivenTemplate, encoding_rules, load_processor, load_tokenizer
from accel_sft.rows.reading import MAX_PROBLEMS
from accel_sft.rows.rows import with_places

_COMPARED = 8
"""Number of validation examples whose system messages are compared."""


class Assembly:
    """The parts of a run that training and `evaluate` both make from the settings; all ranks make them together.

    The model is not kept here: the caller that loads it decides when to free it. `encode` turns a split's examples into
    tokens. `blank` is set by `load_model`, and passed to `Batching.batch`.
    """

    def __init__(self, accelerator: Accelerator, task: Task, config: TrainConfig, source: Source) -> None:
        self.accelerator, self.task, self.config, self.source = accelerator, task, config, source
        trusted = config.trust_remote_code
        self.template = GivenTemplate(config.chat_template, trusted) if config.chat_template is not None else None
        # raw text needs no template; if the model has none, the first conversation raises an error
        self.tokenizer = load_tokenizer(source, trust_remote_code=trusted, given=self.template, templated=False)
        rules = encoding_rules(self.tokenizer, source, config)
        load = functools.partial(load_processor, source, model=config.model, trust_remote_code=trusted)
        self.encode = SplitEncoder(accelerator, self.tokenizer, task, rules, load)
        self.blank: Encoded | None = None

    def load_model(self, *encodings: StoredEncoding, total_steps: int = 0, **more: Any) -> Any:
        """Load the model for these tokens, to be trained for `total_steps` (0: only evaluated)."""
        images = any(len(encoding.kept.pictured) for encoding in encodings)
        if images and sequence_ranks(self.accelerator) > 1:
            problem = "the data has images, and sequence parallelism would cut an image's tokens apart"
            raise UserError(f"{problem}; launch with accelerate_configs/z3.yaml or fsdp2.yaml")
        if images:
            for encoding in encodings:
                self._check_texts(encoding)
        model = load_model(
            self.source,
            self.config,
            precision=self.accelerator.mixed_precision,
            deepspeed=self.accelerator.state.deepspeed_plugin is not None,
            total_steps=total_steps,
            largest_id=max(self.tokenizer.pad_token_id, *(encoding.kept.largest_id() for encoding in encodings)),
            images=images,
            tensor_ranks=tensor_ranks(self.accelerator),
            tokenizer=self.tokenizer,
            new_tokens=self.template.new_tokens if self.template else (),
            **more,
        )
        trained = any(weights.requires_grad for weights in beyond_text(model).values())
        if images and (trained or not forwards_alone(self.accelerator)):
            # every rank must run the vision tower in every step: other ranks wait for the tower's weights or gradients,
            # and otherwise AdamW would update the tower on some ranks only
            self.blank = blank_row(self.encode.images)
        return model

    def _check_texts(self, encoding: StoredEncoding) -> None:
        """Raise UserError if a text without images has an image's placeholder: the model would look for pixels."""
        processor = self.encode.images.processor
        index = encoding.kept.text_with(processor.image_token_ids)
        if index is not None:
            problem = f"the text has the image placeholder {processor.image_token}, but there is no image; remove it"
            line = f"{encoding.split} example {index}: {problem}"
            raise UserError(*with_places([line], encoding.examples, encoding.split))

    def evaluator(self, model: Any, split: StoredEncoding, max_new_tokens: int | None = None, **more: Any) -> Evaluator:
        """Make the Evaluator of a split; `more` are options of its `Generator`."""
        config, tokenizer = self.config, self.tokenizer
        more.setdefault("log", lambda line: print(wrapped(line), file=terminal()))
        backend = Generator(self.accelerator, tokenizer, model, config.eval_batch_size, **more)
        rows = split.examples, split.kept
        return Evaluator(self.accelerator, tokenizer, self.task, *rows, config, backend, max_new_tokens, self.blank)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run's launch, data and model source; the same on every rank."""

    launch: Launch
    assembly: Assembly
    train: StoredEncoding
    validation: StoredEncoding
    plan: StepPlan
    beyond_limit: int = 0  # training examples that `--train-limit` leaves out
    pairs: StoredEncoding | None = None  # the validation examples as pairs, with `--loss dpo` or `ipo`

    @property
    def lines(self) -> list[str]:
        """Lines for the console: notes on the examples, then one line with the size of the job."""
        train, validation, plan, config = self.train, self.validation, self.plan, self.assembly.config
        tokens, supervised = int(plan.lengths.sum()), int(plan.supervised.sum())
        evaluated = f"{validation.kept.examples:,}"
        if (limit := config.eval_limit) and limit < validation.kept.examples:
            evaluated = f"{limit:,} of {evaluated}"
        count, epochs = plan.total_steps, plan.epoch(plan.total_steps)
        steps = f"{count:,} step{'s' * (count != 1)} of {plan.global_batch_size}: {epochs:.3g} epochs"
        if epochs >= 20:
            steps += "; for fewer: --epochs, --max-steps or --global-batch-size"
        examples = "examples" if len(train.kept) == train.kept.examples else "rows"
        examples = examples if config.loss == "sft" else "pairs"
        read = train.kept.examples + sum(map(len, train.left_out.values()))
        limit_line = f"--train-limit {config.train_limit}: {read:,} of {read + self.beyond_limit:,} {examples}"
        evaluation = validation.lines()
        of_pairs = [line for line in self.pairs.lines() if line not in evaluation] if self.pairs else []
        repeated = f"--global-batch-size {plan.global_batch_size} is more than the number of rows: a step repeats rows"
        merged = "the adapter is merged into its base, and all weights are trained (to train the adapter: --adapter)"
        return [
            *(RunDir.choice_in(config.init_from, train=True) if config.init_from else []),
            *(f"warning: {line}" for line in other_base(self.assembly.source)),
            *([merged] if self.assembly.source.adapter and config.adapter == "none" else []),
            *(self.assembly.template.lines if self.assembly.template else []),
            *train.lines(),
            *evaluation,
            *(f"pairs of {line}" for line in of_pairs),
            *([limit_line] if self.beyond_limit else []),
            *([repeated] if min(plan.global_batch_size, plan.stream_length or math.inf) > plan.epoch_rows else []),
            *([f"--mix: {in_words(plan)}"] if config.mix else []),
            f"data      {len(train.kept):,} training {examples} ({tokens:,} tokens, {supervised:,} supervised), "
            f"{evaluated} validation; {steps}",
        ]

    def counts(self) -> dict[str, int]:
        """Numbers about the data, for the run's record and the model card."""
        counts = {}
        if self.beyond_limit:
            counts["train examples beyond --train-limit"] = self.beyond_limit
        for encoding in (self.train, self.validation):
            counts[f"{encoding.split} examples"] = encoding.kept.examples
            if len(encoding.kept) > encoding.kept.examples:
                counts[f"{encoding.split} rows"] = len(encoding.kept)
            for reason, indices in encoding.left_out.items():
                counts[f"{encoding.split} examples {reason}"] = len(indices)
            if encoding.cut:
                counts[f"{encoding.split} examples cut"] = len(encoding.cut)
        for (name, rows), share in zip(self.plan.sources.items(), self.plan.shares, strict=True):
            if name:
                counts[f"train rows of {name} (share {share} of {sum(self.plan.shares)})"] = len(rows)
        counts["training tokens"] = int(self.plan.lengths.sum())
        counts["training supervised tokens"] = int(self.plan.supervised.sum())
        return counts

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer in both splits, end of turn included: the default limit for generation."""
        return max(int(split.kept.answers.max()) for split in (self.train, self.validation))

    @property
    def system_prompt(self) -> str | None:
        """The system message that the first validation examples have in common; None if there is none."""
        task, validation = self.assembly.task, self.validation
        chats = [task.messages(validation.examples[row.index]) for row in validation.kept[:_COMPARED]]
        prompts = {tuple(str(turn["content"]) for turn in turns if turn["role"] == "system") for turns in chats}
        (common,) = prompts if len(prompts) == 1 else ((),)
        return common[0] if len(common) == 1 else None

    def fingerprint(self) -> str:
        """SHA-256 of both splits' tokens, in order, and of the number of rows per source; a resume needs the same."""
        both = self.train.kept.fingerprint + self.validation.kept.fingerprint
        if len(self.plan.sources) > 1:
            both += " ".join(str(len(rows)) for rows in self.plan.sources.values())
        return hashlib.sha256(both.encode()).hexdigest()


def prepare_data(
    accelerator: Accelerator, launch: Launch, run_dir: RunDir, task: Task, config: TrainConfig
) -> Prepared:
    """Read the task's splits, find the model's source (building `tiny`), tokenize, and plan the steps."""
    _refuse_missing_packages(config)
    splits: list[Sequence[Any]] = []
    # an error of one rank is raised on all ranks, before any rank writes a file
    notes: list[str] = []
    by_each_rank(lambda: splits.extend(_read(task, notes, eval_every=config.eval_every, thinking=config.thinking)))
    train_examples, validation_examples = splits
    if config.mix:
        check_sources(train_examples, config.mix)
    model = config.model
    if model == "tiny" and not config.init_from:
        model = str(run_dir.base)
        if not run_dir.base.exists() or not run_dir.has_trained():  # a fresh start must not use an earlier tokenizer
            decided_by_main(accelerator, lambda: _build_base(run_dir.base, texts_of(task, train_examples), config.seed))
    source = source_of(run_dir, model, config)
    assembly = Assembly(accelerator, task, config, source)
    limited = limited_examples(train_examples, config.train_limit)
    train, validation, pairs = _encoded(assembly, limited, validation_examples)
    if not assembly.encode.rendering.control.as_text:
        _refuse_forged_turns(train, validation)
    plan = plan_steps(train, config)
    pixels = decided_by_main(accelerator, lambda: _most_pixels(assembly, train))  # an image file may be gone
    if accelerator.is_main_process and len(train.kept):
        tiny = is_tiny(config.model, init_from=config.init_from)
        vocabulary = read_config(Path(source.weights))["vocab_size"] if tiny else 0
        lengths.keep(task, config, plan.lengths, plan.supervised, plan.mean, vocabulary, pixels)
    train.notes += _ends_served(train, assembly)
    validation.notes += [*notes, *limits_on_scores(task, validation, config)]
    return Prepared(launch, assembly, train, validation, plan, len(train_examples) - len(limited), pairs)


def _encoded(
    assembly: Assembly, train: Sequence[Any], validation: Sequence[Any]
) -> tuple[StoredEncoding, StoredEncoding, StoredEncoding | None]:
    """Encode both splits, and for `--loss dpo` or `ipo` the validation pairs, if there are any."""
    encode = assembly.encode
    if assembly.config.loss == "sft":
        encodings = encode(train, "train"), encode(validation, "validation"), None
        if unpaired := encodings[0].unpaired:
            line = f"train example {unpaired[0]}: {UNPAIRED} ({len(unpaired):,} such rows)"
            raise UserError(*with_places([line], train, "train"))
        return encodings
    of_pairs = encode.of_pairs()
    pairs, chosen = of_pairs(train, "train"), encode(validation, "validation")
    if chosen.unpaired:
        return pairs, chosen, of_pairs(validation, "validation")
    chosen.notes.append("validation: no example has a rejected answer, so margins are not measured")
    return pairs, chosen, None


def _build_base(folder: Path, texts: Sequence[str], seed: int) -> None:
    partial = begin_folder(folder)
    build_tiny(partial, texts, seed)
    put_in_place(partial, folder)


def _ends_served(train: StoredEncoding, assembly: Assembly) -> list[str]:
    """If answers end with a token missing from the model's generation settings, make it the exported tokenizer's eos,
    because many servers stop there. For an adapter, also return a warning, because its server reads the base model's
    settings."""
    rules, tokenizer = assembly.encode.rules, assembly.tokenizer
    last = (row.input_ids[-1] for row in train.kept[:_COMPARED])
    end = next((token for token in last if token in rules.eos_ids - rules.served_ends), None)
    if end is None:
        return []
    token = tokenizer.convert_ids_to_tokens(end)
    written = tokenizer.eos_token_id in assembly.encode.rendering.ends()  # then only tool calls have another end
    names_eos = "eos_token" in str(tokenizer.chat_template)  # a different eos would change such a template's prompts
    if not (train.raw or written or names_eos):
        tokenizer.eos_token = token
    what = f"warning: answers end with {token}, but a server running the base model does not stop there."
    fix = "Add it to the server's stop tokens, or serve merged weights."
    return [f"{what} {fix}"] if assembly.config.adapter != "none" else []


def source_of(run_dir: RunDir, model: str, config: TrainConfig) -> Source:
    """The source of a run's model; a resumed run loads the same commit of a hub id as its first start."""
    revision = config.revision
    if not (config.init_from or Path(model).exists()) and run_dir.record.is_file() and run_dir.has_trained():
        revision = run_dir.read_record().get("model_commit") or revision
    return find_source(model, init_from=config.init_from, revision=revision)


def _most_pixels(assembly: Assembly, train: StoredEncoding) -> int:
    """Number of pixel values of the row whose images have the most tokens."""
    if not len(train.kept.pictured):
        return 0
    images = assembly.encode.images
    row = train.kept.most_of(images.processor.image_token_ids)
    return images.pixels(row.images) if row.images else 0


def _refuse_forged_turns(*encodings: StoredEncoding) -> None:
    """Raise UserError if an answer's text contains a token that ends the turn: the rest would be trained on as a
    separate turn. Called only if control tokens in texts are not read as plain characters."""
    for encoding in encodings:
        if rows := encoding.control_tokens["answers"]:
            split = encoding.split
            named = [f"{split} example {row}: the answer's text ends the turn itself" for row in rows[:MAX_PROBLEMS]]
            fault = f"{len(rows):,} answers contain an end-of-turn token; the rest would be trained on as another turn"
            fix = "remove the token, or add --control-tokens text"
            raise UserError(*with_places(named, encoding.examples, split), f"{fault}; {fix}")


def plan_steps(train: StoredEncoding, config: TrainConfig) -> StepPlan:
    """Plan the optimizer steps over these examples, as the settings ask."""
    assert config.global_batch_size is not None  # resolved settings have a batch size, and either steps or epochs
    sources, shares = rows_by_source(train, config.mix) if config.mix else (None, (1,))
    plan = StepPlan(
        train.kept.lengths,
        train.kept.supervised,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
        sources=sources,
        shares=shares,
    )
    if plan.stream_length == 0:
        raise UserError(f"--epochs {config.epochs:g} is less than one of {len(train.kept)} examples; raise it")
    if (config.warmup_steps or 0) > plan.total_steps:
        raise UserError(f"--warmup-steps {config.warmup_steps}: the run has {plan.total_steps} steps; ask for fewer")
    return plan


def _refuse_missing_packages(config: TrainConfig) -> None:
    """Raise UserError, before any work is done, if a library or compiler that the settings need is missing."""
    if config.optimizer == "adamw-8bit":
        bitsandbytes(f"--optimizer {config.optimizer}")
    if config.load_in_4bit:
        bitsandbytes("--load-in-4bit")
    if config.use_liger_kernel:
        liger()
    gpu = device_count() > 0
    flag = "--compile" if config.compile else "--use-liger-kernel" if config.use_liger_kernel and gpu else None
    # on GPUs, Triton compiles the launchers of its kernels with a C compiler
    for what, fix in lacking(*(("CC", "gcc") if gpu else ("CXX", "g++"))) if flag else ():
        raise UserError(f"{flag}: {what}; {fix}")


def _read(task: Task, notes: list[str], *, eval_every: str, thinking: str | None) -> Iterator[Sequence[Any]]:
    """Yield both splits. If the run will score answers, check the task's scores and add the findings to `notes`."""
    yield read_split(task, "train")
    validation = read_split(task, "validation")
    if eval_every != "off":
        notes += check_scoring(task, validation, thinking)
    yield validation
