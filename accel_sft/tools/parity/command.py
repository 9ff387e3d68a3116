"""`accel-sft parity`: compares a server's answers with those of the run's own weights."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from accel_sft.api.errors import UserError
from accel_sft.api.options import settings
from accel_sft.api.registry import build, load
from accel_sft.api.task_file import recorded_name
from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.commands.trained import LONGEST_ANSWER, Trained, begin_command
from accel_sft.io import terminal
from accel_sft.io.run_record import recorded_options

NOISE_FLOAT32, NOISE_REDUCED = 2e-4, 5e-2
"""Mean difference of log-probabilities, in nats, that is normal between two libraries: in float32, and in 16 bits."""
EXAMPLES = """\b
For example:
  accel-sft parity runs/math-20261120-101500 --url http://127.0.0.1:8000/v1
  accel-sft parity runs/ner-20261120-101500 --url https://host/v1 --model ner --same-data
"""


@click.command(epilog=EXAMPLES)
@click.argument("run", type=click.Path(), metavar="RUN")
@click.option("--url", required=True, metavar="URL", help="An OpenAI-compatible server: http://127.0.0.1:8000/v1.")
@click.option("--model", metavar="NAME", help="The model's name on the server; default: the only model there.")
@click.option("--examples", type=click.IntRange(1), default=20, show_default=True, help="Validation examples to ask.")
@click.option("--same-data", is_flag=True, help="Read the files that the run's record names, and send their prompts.")
@click.option("--task", metavar="TASK", help="The run's task, if it was a file: ./mytask.py.")
@click.option("--key-from", metavar="NAME", help="The environment variable that has the key [ACCEL_SFT_API_KEY].")
@click.option("--timeout", type=click.IntRange(1), default=600, show_default=True, help="Seconds for one answer.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--json", "as_json", is_flag=True, help="Print only JSON on standard output.")
@click.option("--debug", is_flag=True, help="Tracebacks, and the libraries' own messages.")
@click.pass_context
def parity(ctx: click.Context, run: str, as_json: bool, **options: Any) -> None:
    """Compare a server's answers with those of the trained weights.

    RUN is a run's folder. Its weights (in best/, or in final/ if there is no best/) and the server get the same
    prompts: those of the task's validation examples. If answers differ, likely causes are tested: context, chat
    template, a missing adapter, stop token. The exit status is 0 if the answers agree (near ties that rounding decides
    do not count), 1 if not.
    """
    begin_command(ctx, debug=options["debug"])
    result = compared(run, options)
    if as_json:
        click.echo(json.dumps(result, ensure_ascii=False, indent=2))
    else:
        for line in lines(result):
            click.echo(line)
    if not result["holds"]:
        ctx.exit(1)


def compared(run: str, options: dict[str, Any]) -> dict[str, Any]:
    """Compare the answers, and return what `--json` prints."""
    trained = Trained(run)
    record = trained.record
    if record is None:  # raised before the imports below, which take seconds
        raise UserError(f"RUN {run}: no run.json there; name the folder of a run")
    from accel_sft.chat.conversation import read_split
    from accel_sft.evaluation.endpoint import Endpoint
    from accel_sft.evaluation.evaluator import problems_of_served
    from accel_sft.launch.accelerator import create_accelerator
    from accel_sft.launch.info import launch_of_this_process
    from accel_sft.models.source import find_source, other_base
    from accel_sft.tools.parity.comparison import Reference
    from accel_sft.training.prepare import Assembly

    if trained.raw_text:
        raise UserError(f"RUN {run}: raw text has no answers; compare /v1/completions with accel-sft generate")
    task_name = options["task"] or record["task"]
    if recorded_name(task_name) != record["task"]:
        raise UserError(f"--task {task_name}: {run} was trained for {record['task']}; name that task")
    task_class = load(task_name)
    own = recorded_options(record, settings(task_class), None, f"RUN {run}", same_data=options["same_data"])
    task = build(task_name, task_class, own)
    if problems := problems_of_served(task):
        raise UserError(*problems)
    given = {name: options[name] for name in ("trust_remote_code", "debug")}
    config = EvaluateConfig(model=trained.weights, eval_limit=options["examples"], **given)
    config = dataclasses.replace(trained.settings(config, "seed"), load_in_4bit=trained.in_4bit)
    endpoint = Endpoint(options["url"], options["model"], options["key_from"], options["timeout"])
    endpoint.text_tokens(".")  # a missing server is reported before weights are loaded
    with terminal.quiet(None, config.debug, shown_on=2) as out:
        for line in trained.notes:
            print(terminal.wrapped(line), file=out)
        accelerator, _ = create_accelerator(
            config, launch_of_this_process(), train=False, precision_of_run=trained.precision
        )
        source = find_source(config.model)
        for line in other_base(source):
            print(terminal.wrapped(f"warning: {line}"), file=out)
        assembly = Assembly(accelerator, task, config, source)
        encoding = assembly.encode(read_split(task, "validation"), "validation")
        model = assembly.load_model(encoding).to(accelerator.device).eval()
        evaluator = assembly.evaluator(model, encoding, sharded=False)
        most = config.max_new_tokens or LONGEST_ANSWER
        with terminal.waiting(f"{Path(config.model)} answers"):
            reference = Reference(evaluator, model, most)
        return _result(reference, endpoint)


def _result(reference: Any, endpoint: Any) -> dict[str, Any]:
    """Compare and score the answers of both, look for a cause of differences, and return all results."""
    from accel_sft.tools.parity.comparison import cause_of, compare, lead, served_answer

    pairs = compare(reference, endpoint)
    metric = reference.evaluator.task.main_metric
    own = reference.metric(reference.answers)
    served = reference.metric({pair.row.index: served_answer(pair, reference.thinking) for pair in pairs})
    cause = cause_of(reference, endpoint, pairs) or lead(pairs, metric, own, served)
    differences = [
        {"example": pair.row.index, "token": pair.at, "run": reference.text(pair.ids), "served": pair.reply.text}
        for pair in pairs
        if pair.differs and pair.reply
    ]
    return {
        "run": reference.evaluator.config.model,
        "served": f"{endpoint.model} at {endpoint.url}",
        "holds": cause is None,
        "examples": len(pairs),
        "prompts": {
            "other": sum(pair.misread for pair in pairs),
            "by_tokens": sum(pair.theirs is not None for pair in pairs),
        },
        "answers": {
            "same": sum(pair.at is None and pair.reply is not None for pair in pairs),
            "near_ties": sum(pair.at is not None and not pair.differs for pair in pairs),
            "other": sum(pair.differs for pair in pairs),
        },
        "log_probabilities": _log_probabilities(pairs, str(reference.model.dtype).removeprefix("torch.")),
        "metric": {"name": metric, "here": own, "served": served},
        "first_difference": differences[0] if differences else None,
        "cause": cause and cause._asdict(),
    }


def _log_probabilities(pairs: Sequence[Any], dtype: str) -> dict[str, Any] | None:
    """How far the server's log-probabilities are from the run's, for equal prompts; None if the server gives none."""
    off = [value for pair in pairs if not pair.misread for value in pair.off]
    if not off:
        return None
    mean = statistics.fmean(off)
    same_bits = mean <= (NOISE_FLOAT32 if dtype == "float32" else NOISE_REDUCED)
    precision = f"as usual for {dtype}" if same_bits else f"more than {dtype} explains: the server has fewer bits"
    return {"tokens": len(off), "mean": mean, "largest": max(off), "precision": precision}


def lines(result: dict[str, Any]) -> list[str]:
    """The result as lines for the terminal."""
    from accel_sft.io.terminal import wrapped
    from accel_sft.io.text import one_line, printable

    count, prompts, answers, metric = (result[name] for name in ("examples", "prompts", "answers", "metric"))
    how = "token by token" if prompts["by_tokens"] else "by length: the server returns no token ids"
    rows = [
        f"run      {result['run']}",
        f"served   {result['served']}",
        f"prompts  {count - prompts['other']} of {count} are those of training, compared {how}",
        f"answers  {answers['same']} of {count} the same, {answers['near_ties']} differ at a near tie, "
        f"{answers['other']} differ",
    ]
    if off := result["log_probabilities"]:
        rows.append(
            f"nats     log-probabilities are off by {off['mean']:.2g} on average, {off['largest']:.2g} at most "
            f"({off['tokens']:,} tokens), {off['precision']}"
        )
    rows.append(f"{metric['name']}  {metric['here']:.4g} by the run's weights, {metric['served']:.4g} by the server")
    if first := result["first_difference"]:
        rows.append(f"example {first['example']}, from token {first['token']} of the answer:")
        rows += [f"  {side:<6}  {one_line(first[side], 200)}" for side in ("run", "served")]
    if cause := result["cause"]:
        rows.append(f"cause    {cause['cause']}: {cause['evidence']}; {cause['fix']}")
    agree, differ = "holds    the server's answers are the run's", "differs  the server's answers are not the run's"
    rows.append(agree if result["holds"] else differ)
    return [wrapped(printable(row), 9) for row in rows]
