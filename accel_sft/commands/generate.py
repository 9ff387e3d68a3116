"""`accel-sft generate`: answers a prompt, a file of prompts, or a person at the terminal with a trained model."""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import click

from accel_sft.api.errors import UserError

LONGEST_ANSWER = 512
"""Maximum number of tokens of an answer, unless the command line or the run says otherwise."""
_LIMITS = {"temperature": (0, 100), "top_p": (0, 1), "top_k": (0, 2**31), "repetition_penalty": (0.01, 100)}
_LIMITS |= {"seed": (0, 2**31)}
_FILE: dict[str, Any] = {"type": click.Path(), "metavar": "FILE"}  # a shell completes paths for this type
EXAMPLES = """\b
For example:
  accel-sft generate runs/math-20261120-101500 "365="
  accel-sft generate runs/math-20261120-101500 --interactive
  accel-sft generate org/model --file prompts.txt --output answers.jsonl
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", type=click.Path(), metavar="RUN_OR_MODEL")
@click.argument("prompt", required=False)
@click.option("--file", **_FILE, help="Prompts: a line of text each, or JSONL with `messages` or `prompt`.")
@click.option("--image", **_FILE, multiple=True, help="An image of PROMPT, before it or at its <image>; repeatable.")
@click.option("--output", **_FILE, help="The answers to those of --file, as JSONL; a new file.")
@click.option("--interactive", is_flag=True, help="Talk to the model; answers appear as they are generated.")
@click.option("--base", metavar="MODEL", help="Answer with this model too; auto: what the run began with.")
@click.option("--system", metavar="TEXT", help="System message; default: the run's own. An empty one: none.")
@click.option("--chat-template", metavar="TEMPLATE", help="chatml, a Jinja file, or the model whose template to take.")
@click.option("--thinking", metavar="off|template|keep", help="As in training; default: the run's own, else template.")
@click.option("--control-tokens", metavar="text|tokens", help="As in training; default: the run's own, else text.")
@click.option("--template-date", metavar="DAY", help="YYYY-MM-DD told to templates; default: the run's, else today.")
@click.option("--max-new-tokens", type=int, help=f"Longest answer; default: the run's own, else {LONGEST_ANSWER}.")
@click.option("--temperature", type=float, help="Draw tokens instead of taking the most likely ones; 1: as predicted.")
@click.option("--top-p", type=float, help="Draw from the most likely tokens of this probability together.")
@click.option("--top-k", type=int, help="Draw from so many of the most likely tokens.")
@click.option("--repetition-penalty", type=float, help="Above 1: tokens that were there before become less likely.")
@click.option("--seed", type=int, default=42, show_default=True, help="Of the draws.")
@click.option("--eval-batch-size", type=int, help="Prompts of a file answered at once; default: by their length.")
@click.option("--dtype", metavar="auto|float32|bfloat16|float16", help="Of the weights; default: as the run computed.")
@click.option("--offload", metavar="host|disk", help="Where weights are that have no room on the GPU.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--debug", is_flag=True, help="Tracebacks, and the libraries' own messages.")
@click.pass_context
def generate(ctx: click.Context, model: str, **options: Any) -> None:
    """Answer a prompt, a file of prompts, or you at the terminal.

    RUN_OR_MODEL is a run's folder (its best/ weights, or else final/), exported weights, an adapter, or a hub id.
    Prompts are asked as the model was trained: with the run's own thinking, system message and longest answer; after a
    training on raw text they are texts to go on with.
    """
    from accel_sft.io.run_dir import absent_weights
    from accel_sft.launch.environment import prepare_environment
    from accel_sft.resilience.exit import ExitHandler

    ctx.ensure_object(ExitHandler).debug = options["debug"]
    if problems := [*_problems(options), *absent_weights(model, "RUN_OR_MODEL")]:
        raise UserError(*problems)
    prepare_environment(options["debug"])
    _run(model, options)


def _problems(options: dict[str, Any]) -> list[str]:
    """Return a line for each problem of the options; those that training has too are checked in `_as_trained`."""
    asked = [name for name in ("prompt", "file", "interactive") if options[name] not in (None, False)]
    found = []
    if len(asked) != 1:
        found.append("give one of these: a PROMPT, --file FILE, or --interactive")
    if options["image"] and options["prompt"] is None:
        found.append("--image goes with a PROMPT; rows of --file have a column `images`, or parts of type image")
    if options["prompt"] is not None and not options["prompt"].strip():
        found.append("PROMPT: empty; write what is to be answered")
    if bool(options["file"]) != bool(options["output"]):
        found.append("--file and --output go together: name a file of prompts and a new file for the answers")
    if options["output"] and Path(options["output"]).exists():
        found.append(f"--output {options['output']}: is there already; name a new file")
    for name, (least, most) in _LIMITS.items():
        value = options[name]
        if value is not None and not least <= value <= most:
            found.append(f"--{name.replace('_', '-')} {value:g}: must be {least:g} to {most:g}")
    for name in ("top_p", "top_k"):
        if options[name] is not None and not options["temperature"]:
            found.append(f"--{name.replace('_', '-')} needs --temperature above 0: without it nothing is drawn")
    return [*found, *one_process("generate")]


def one_process(command: str) -> list[str]:
    """Return a line that refuses a launch of several ranks, which would all do the same work; empty for one process."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return []
    return [f"{command} runs in one process: start it as `accel-sft {command}`, without accelerate launch"]


def _run(model: str, options: dict[str, Any]) -> None:
    import torch
    from accelerate.utils.memory import clear_device_cache

    from accel_sft.evaluation.answerer import Answerer
    from accel_sft.evaluation.dialogue import talk
    from accel_sft.evaluation.left_padded import Sampling
    from accel_sft.evaluation.prompts import prompt_with, read_prompts
    from accel_sft.io import terminal
    from accel_sft.io.run_dir import RunDir
    from accel_sft.io.text import printable
    from accel_sft.launch.accelerator import create_accelerator
    from accel_sft.launch.info import launch_of_this_process
    from accel_sft.launch.precision import precision_in_record
    from accel_sft.models.pretrained import refuse_offload
    from accel_sft.models.source import other_base

    chosen = {name: options[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
    sampling = Sampling(**{name: value for name, value in chosen.items() if value is not None})
    config, record, folder = _as_trained(model, options)
    refuse_offload(config.offload, ranks=1, quantized=False)
    raw = options["chat_template"] is None and bool((record or {}).get("raw_text"))
    system = options["system"] if options["system"] is not None else _system_of(record)
    if options["file"]:
        chats, names = read_prompts(options["file"], system)
    else:
        chats, names = [prompt_with(options["prompt"] or "", options["image"], system)], ["PROMPT"]
    images, tools = [chat.images for chat in chats], [chat.tools for chat in chats]
    if raw and (options["interactive"] or any(images) or any(tools) or any(chat.turns[1:] for chat in chats)):
        raise UserError(f"{model}: trained on raw text, which it goes on with: give texts alone, or a --chat-template")
    most = config.max_new_tokens or LONGEST_ANSWER
    sides, told = {}, {}
    with terminal.quiet(None, config.debug, shown_on=2) as out:

        def tell(line: str) -> None:
            print(terminal.wrapped(printable(line)), file=out)

        for line in RunDir.choice_in(model):
            tell(line)
        precision_of_run = precision_in_record(record) if record else None
        accelerator, _ = create_accelerator(config, launch_of_this_process(), precision_of_run=precision_of_run)
        for side, source in _sources(folder, record, options["base"]).items():
            print(terminal.wrapped(f"{side:<5}  {source.adapter or source.weights}", 7), file=out)
            for line in other_base(source):
                tell(f"warning: {line}")
            offloaded: dict[str, Any] = {"offload": config.offload, "log": tell} if config.offload else {}
            answerer = Answerer(accelerator, config, source, sampling, images=any(images), raw=raw, **offloaded)
            torch.manual_seed(options["seed"])
            if options["interactive"]:
                sides[side] = answerer
            else:
                with terminal.waiting(f"answering {len(chats):,} prompts" if len(chats) > 1 else "answering"):
                    told[side] = answerer.answers([chat.turns for chat in chats], most, names, images, tools)
            for note in answerer.notes:
                tell(note)
            del answerer  # the next model may need its memory
            clear_device_cache(garbage_collection=True)
    if options["interactive"]:
        return talk(sides, system, most)
    if options["file"]:
        return _write(options["output"], chats, told, most)
    for side, (answer,) in told.items():
        if len(told) > 1:
            click.echo(f"[{side}]")
        click.echo(printable(answer.text))
        if not answer.ended:
            own = "" if options["max_new_tokens"] else " (the run's own, or the default)"
            click.echo(f"cut after {answer.tokens} tokens: --max-new-tokens {most}{own}", err=True)
    return None


def _as_trained(model: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any] | None, str]:
    """Return the settings, the run's record if there is one, and the folder of the weights.

    Settings that are not given are the run's own.
    """
    from accel_sft.api.tool_configs import EvaluateConfig
    from accel_sft.io.run_dir import RunDir

    of_runs = "thinking", "template_date", "control_tokens", "max_new_tokens"
    names = *of_runs, "chat_template", "eval_batch_size", "dtype", "offload", "trust_remote_code", "debug"
    given = {name: options[name] for name in names if options[name] is not None}
    folder, record = RunDir.weights_in(model), RunDir.record_around(model)
    config = EvaluateConfig(model=folder, **given)
    if found := config.problems():
        raise UserError(*found)
    if record:
        own = {name: record["config"].get(name) for name in of_runs}
        own["max_new_tokens"] = own["max_new_tokens"] or record.get("max_new_tokens")
        config = dataclasses.replace(config, **{key: own[key] for key in own if getattr(config, key) is None})
        if found := config.problems():
            raise UserError(*(f"{line}; so says the run.json of {model}" for line in found))
    config = config.resolved({})
    return dataclasses.replace(config, template_date=config.template_date or time.strftime("%Y-%m-%d")), record, folder


def _system_of(record: dict[str, Any] | None) -> str | None:
    """The system message in a run's record; None if it is no text, since the record may be someone else's."""
    found = (record or {}).get("system_prompt")
    return found if isinstance(found, str) else None


def _sources(folder: str, record: dict[str, Any] | None, base: str | None) -> dict[str, Any]:
    """Return the sources of the models to load, by side ("base" comes first, if asked for)."""
    from accel_sft.models.source import as_it_began, began_with, find_source

    source = find_source(folder)
    if not base:
        return {"model": source}
    if base == "auto":
        return {"base": as_it_began(find_source(began_with(source, record)), source, record), "tuned": source}
    return {"base": find_source(base), "tuned": source}


def _write(output: str, chats: list[Any], told: dict[str, list[Any]], most: int) -> None:
    """Write the answers as JSONL: the model's as `generated`, the base's, if asked for, as `base`."""
    from accel_sft.io.files import expanded, write_json_lines

    rows = []
    for at, chat in enumerate(chats):
        *before, last = (answers[at] for answers in told.values())
        row = {"messages": chat.messages(), **({"tools": chat.tools} if chat.tools else {})}
        row |= {"generated": last.text, "tokens": last.tokens, "ended": last.ended}
        rows.append({**row, **({"base": before[0].text} if before else {})})
    try:
        write_json_lines(expanded(output, "--output"), rows)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror}); name another file") from None
    cut = sum(not row["ended"] for row in rows)
    click.echo(f"{output}: {len(rows):,} answers" + (f", {cut:,} of them cut after {most} tokens" if cut else ""))
