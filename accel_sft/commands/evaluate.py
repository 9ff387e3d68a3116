"""The command `evaluate`: scores a model, and also the model that `--base` names, on a task's validation examples."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.markdown import Markdown

from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, NAMES_A_FILE, flag_of, settings
from accel_sft.api.task import Task
from accel_sft.api.task_file import recorded_name
from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.batching.choice import choose_batching
from accel_sft.batching.trial import Trial
from accel_sft.chat.conversation import read_split
from accel_sft.commands.trained import LONGEST_ANSWER, Config, Trained, one_process
from accel_sft.evaluation.endpoint import Endpoint
from accel_sft.evaluation.evaluator import Evaluation, evaluate_served, problems_of_served
from accel_sft.evaluation.scoring import check_scoring, limits_on_scores
from accel_sft.io import terminal
from accel_sft.io.files import write_json_lines
from accel_sft.io.heartbeat import heartbeats_only
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import markdown_table, printable
from accel_sft.launch.accelerator import create_accelerator, shard_for_evaluation
from accel_sft.launch.collectives import by_each_rank, decided_by_main, largest
from accel_sft.launch.info import Launch, launch_of_this_process
from accel_sft.launch.recordable import recordable
from accel_sft.launch.start import begin, start
from accel_sft.models.pretrained import refuse_offload
from accel_sft.models.source import Source, other_base
from accel_sft.resilience.exit import leave_together
from accel_sft.resilience.watchdog import Watchdog
from accel_sft.results import resampled
from accel_sft.results import run_report as report
from accel_sft.results.labels import label_tables
from accel_sft.tracking.system import peak_memory_gib, reset_peak_memory
from accel_sft.training.predicted import job_of_run
from accel_sft.training.prepare import Assembly


@contextlib.contextmanager
def opened(
    task_name: str, task: Task, config: Config
) -> Iterator[tuple[Accelerator, Launch, Trained, Config, dict[str, Source]]]:
    """Find the model that `config` names, and start the launch on all ranks, which leave together in the end. Yields
    what was started, the resolved settings, and the models' sources by side."""
    launch = begin()
    if config.model == "tiny" or (config.base == "tiny" and not Path("tiny").exists()):
        raise UserError("--model and --base: the model tiny is made for each run; name a run's folder, or base/ in it")
    trained = Trained(config.model)
    config = dataclasses.replace(trained.settings(config), load_in_4bit=trained.in_4bit)
    sources = trained.sources(config.base, config.revision)
    if config.chat_template is not None:
        sources = {side: dataclasses.replace(source, adds_tokens=True) for side, source in sources.items()}
    with Watchdog(config.hang_timeout):
        accelerator, launch = start(launch, config, task, train=False, precision_of_run=trained.precision)
        refuse_offload(config.offload, ranks=launch.world_size, quantized=config.load_in_4bit)
        config = dataclasses.replace(config, template_date=decided_by_main(accelerator, lambda: config.template_date))
        if accelerator.is_main_process and not config.dry_run:
            tell(*trained.notes, *_differences(trained, task_name, accelerator.mixed_precision))
        yield accelerator, launch, trained, config, sources
        leave_together()


def run(task_name: str, task: Task, config: EvaluateConfig) -> None:
    """Score `--model`, and `--base` if given, on all ranks of a launch; or score the server at `--url`. Print the
    scores side by side, and write `--output-dir`."""
    if config.url:
        return _served(task_name, task, config)
    name = recorded_name(task_name)
    with opened(name, task, config) as (accelerator, launch, trained, config, sources):
        if config.dry_run:
            return
        named = {side: source.adapter or source.weights for side, source in sources.items()}
        if accelerator.is_main_process:
            tell(*_remembered(trained, name, task))
        if folder := config.output_dir:
            decided_by_main(accelerator, lambda: _claim(Path(folder)))
        with terminal.quiet(None, config.debug):
            evaluations = []
            for side, source in sources.items():
                if accelerator.is_main_process:
                    tell(f"{side:<8}  {named[side]}", indent=10)
                    tell(*(f"warning: {line}" for line in other_base(source)))
                evaluations.append(evaluate(accelerator, launch, task, config, source))
        if accelerator.is_main_process:
            _publish(name, task, config, named, evaluations)


def reached(config: Config, command: str) -> tuple[Endpoint, Config]:
    """Reach the server at `--url`, for a command of one process, and resolve the settings."""
    if problems := one_process(f"{command} --url"):
        raise UserError(*problems)
    endpoint = Endpoint(config.url or "", config.model or None, config.key_from, config.timeout)
    most = config.max_new_tokens or LONGEST_ANSWER
    config = dataclasses.replace(config, model=endpoint.model, max_new_tokens=most).resolved({})
    tell(f"server    {endpoint.model} at {endpoint.url}", indent=10)
    return endpoint, config


def _served(task_name: str, task: Task, config: EvaluateConfig) -> None:
    """Score the answers of the server at `--url`; load neither weights nor a tokenizer."""
    if problems := problems_of_served(task):
        raise UserError(*problems)
    endpoint, config = reached(config, "evaluate")
    accelerator, _ = create_accelerator(config, launch_of_this_process(), train=False)
    if config.dry_run:
        return
    if config.output_dir:
        _claim(Path(config.output_dir))
    evaluation = evaluate_served(accelerator, task, config, endpoint)
    tell(*evaluation.lines)
    _publish(recorded_name(task_name), task, config, {"model": f"{endpoint.model} at {endpoint.url}"}, [evaluation])


def tell(*lines: str, indent: int = 4) -> None:
    """Print lines to the terminal, wrapped and escaped."""
    for line in lines:
        print(terminal.wrapped(printable(line), indent), file=terminal.terminal())


def _publish(
    task_name: str, task: Task, config: EvaluateConfig, named: dict[str, str], evaluations: list[Evaluation]
) -> None:
    before, after = evaluations if config.base else (Evaluation({}, []), *evaluations)
    result = {
        "status": "complete",
        "task": task_name,
        "model": config.model,
        "url": config.url,
        "weights": named,
        "main_metric": task.main_metric,
        "before": before.metrics,
        "after": after.metrics,
    }
    run_dir = RunDir(Path(config.output_dir)) if config.output_dir else None
    resampled.add_intervals(result, task, before.samples, after.samples, run_dir)
    console = Console(highlight=False)
    report.print_report(result, before.samples, after.samples, console)
    for title, header, rows in label_tables(result.get("labels")):
        console.print(Markdown(f"{title}\n\n{markdown_table(header, rows)}"))
    if run_dir:
        run_dir.write_result(result)
        report.write_report(run_dir, result, before.samples, after.samples)
        if config.base:
            write_json_lines(run_dir.answers_of("base"), before.samples)
        write_json_lines(run_dir.answers_of("tuned"), after.samples)


def _differences(trained: Trained, task_name: str, precision: str) -> list[str]:
    """Return notes on how this evaluation differs from the run's own."""
    if trained.record is None:
        return []
    notes, run_precision = [], trained.precision or precision
    if trained.record["task"] != task_name:
        notes.append(f"note: {trained.name} was trained for {trained.record['task']}, but is scored for {task_name}")
    if run_precision != precision:
        advice = f"for the same scores, add --mixed_precision {run_precision}"
        notes.append(f"note: this launch's precision differs from the run's; {advice}")
    return notes


def _remembered(trained: Trained, task_name: str, task: Task) -> list[str]:
    """Return a warning (in a list) if the run was trained on validation examples of this evaluation; else [].

    The run's training rows are read again with its recorded options; if these name other files than `task`, return [].
    """
    run = trained.record
    if run is None or run["task"] != task_name:
        return []
    offered = {setting.name: getattr(task, setting.name) for setting in settings(type(task))}
    before = {name: run["task_options"].get(name, value) for name, value in offered.items()}
    changed = [name for name, value in recordable(offered).items() if before[name] != value]
    if not changed or any(NAMES_A_FILE.search(name) or before[name] == HIDDEN for name in changed):
        return []
    own = dataclasses.replace(task, **{name: before[name] for name in changed})
    learnt = {json.dumps(task.messages(row), default=str) for row in read_split(own, "train")}
    held_out = [json.dumps(task.messages(row), default=str) for row in read_split(task, "validation")]
    if not (seen := sum(prompt in learnt for prompt in held_out)):
        return []
    flags = " and ".join(map(flag_of, changed))
    overlap = f"{trained.name} was trained on {seen:,} of these {len(held_out):,} examples"
    return [f"warning: {overlap}, so the scores show what it memorized; leave {flags} out"]


def _claim(folder: Path) -> None:
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--output-dir {folder}: not empty; name another folder for this evaluation")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output-dir {folder}: cannot be used ({error.strerror}); name another folder") from None


def evaluate(
    accelerator: Accelerator, launch: Launch, task: Task, config: EvaluateConfig, source: Source
) -> Evaluation:
    """Load a model, evaluate it, and free it. ZeRO-3 and FSDP shard it; otherwise every rank holds the whole model."""
    reset_peak_memory(accelerator.device)
    examples = read_split(task, "validation")
    scoring, *_ = by_each_rank(lambda: check_scoring(task, examples, config.thinking))
    assembly = Assembly(accelerator, task, config, source)
    encoding = assembly.encode(examples, "validation")
    encoding.notes += [*scoring, *limits_on_scores(task, encoding, config)]
    if accelerator.is_main_process:
        tell(*encoding.lines())
    loaded, prepared = load(accelerator, launch, assembly, encoding, config.offload)
    load_peaks = largest(peak_memory_gib(accelerator.device), "load_")
    some = encoding.kept.some()
    pad, blank = assembly.tokenizer.pad_token_id, assembly.blank
    job = job_of_run(config, source.weights, launch, accelerator.device, lambda line: None)
    trial = Trial(accelerator, prepared, config, some, pad, train=False, blank=blank, job=job)
    batching, _ = choose_batching(trial)
    prepared.eval()
    evaluator = assembly.evaluator(prepared, encoding, sharded=launch.shards_weights)
    with heartbeats_only():
        evaluation = evaluator(prepared, batching)
    tell(*(evaluation.lines if accelerator.is_main_process else ()))
    release(accelerator, loaded)
    return Evaluation({**evaluation.metrics, **load_peaks}, evaluation.samples)


def load(accelerator: Accelerator, launch: Launch, assembly: Assembly, encoding: Any, offload: str | None) -> Any:
    """Load the model for a StoredEncoding; return it as loaded, for `release`, and as it computes."""
    if offload:
        return (assembly.load_model(encoding, offload=offload, log=tell),) * 2
    loaded = assembly.load_model(encoding)
    return loaded, shard_for_evaluation(accelerator, loaded) if launch.shards_weights else loaded.to(accelerator.device)


def release(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Free a model's memory, except for tensors that the caller still references."""
    accelerator.free_memory()
    for parameter in model.parameters():
        if hasattr(parameter, "ds_tensor"):  # DeepSpeed never frees its engine, which holds the model
            for tensor in (parameter, parameter.ds_tensor):
                tensor.data = tensor.data.new_empty(0)
