"""`accel-sft generate`: answers a prompt, a file of prompts, or a person at the terminal with a trained model."""

from pathlib import Path
from typing import Any

import click

from accel_sft.api.errors import UserError
from accel_sft.api.options import flag_of
from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.commands.trained import LONGEST_ANSWER, Trained, begin_command
from accel_sft.io import terminal
from accel_sft.io.files import expanded, write_json_lines
from accel_sft.io.run_dir import absent_weights
from accel_sft.io.text import printable

_OF_TRAINING = (
    *("thinking", "template_date", "control_tokens", "max_new_tokens", "chat_template", "eval_batch_size"),
    *("dtype", "offload", "trust_remote_code", "debug"),
)
_OF_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")
_FILE: dict[str, Any] = {"type": click.Path(), "metavar": "FILE"}  # a shell completes paths for this type


@click.command()
@click.argument("model", type=click.Path(), metavar="RUN_OR_MODEL")
@click.argument("prompt", required=False)
@click.option("--file", **_FILE, help="File of prompts: one per line, or JSONL with `messages` or `prompt`.")
@click.option("--image", **_FILE, multiple=True, help="Image before PROMPT, or in place of its <image>; repeatable.")
@click.option("--output", **_FILE, help="A new file for the answers to --file, as JSONL.")
@click.option("--interactive", is_flag=True, help="Talk to the model; answers appear as they are generated.")
@click.option("--base", metavar="MODEL", help="Answer with this model too; auto: the run's initial model.")
@click.option("--system", metavar="TEXT", help="System message (empty: none); default: the run's.")
@click.option("--chat-template", metavar="TEMPLATE", help="chatml, a Jinja file, or a model whose template to use.")
@click.option("--thinking", metavar="off|template|keep", help="As in training; default: the run's, else template.")
@click.option("--control-tokens", metavar="text|tokens", help="As in training; default: the run's, else text.")
@click.option("--template-date", metavar="DAY", help="Date for templates, YYYY-MM-DD; default: the run's, else today.")
@click.option("--max-new-tokens", type=int, help=f"Maximum tokens per answer; default: the run's, or {LONGEST_ANSWER}.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    help="Sampling temperature (default: greedy decoding); 1 leaves the distribution unchanged.",
)
@click.option(
    "--top-p", type=click.FloatRange(0, 1), help="Sample from the likeliest tokens with this total probability."
)
@click.option("--top-k", type=click.IntRange(0, 2**31), help="Sample from this many of the likeliest tokens.")
@click.option("--repetition-penalty", type=click.FloatRange(0.01, 100), help="Above 1, repetitions become less likely.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=42, show_default=True, help="Seed for sampling.")
@click.option("--eval-batch-size", type=int, help="Prompts per batch; default: by their length.")
@click.option(
    "--dtype", metavar="auto|float32|bfloat16|float16", help="Data type of the weights; default: the run's precision."
)
@click.option("--offload", metavar="host|disk", help="Where to keep weights that do not fit on the GPU.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--debug", is_flag=True, help="Show tracebacks and the libraries' messages.")
@click.pass_context
def generate(ctx: click.Context, model: str, **options: Any) -> None:
    """Answer a prompt, a file of prompts, or what you type at the terminal.

    For example: accel-sft generate runs/math-20261120-101500 "365="

    RUN_OR_MODEL is a run's folder (its best/ weights, or else final/), exported weights, an adapter, or a hub id.
    By default, answers are generated with the run's thinking, system message and maximum length.
    A model that was trained on raw text continues the prompt.
    """
    problems = [*_problems(options), *absent_weights(model, "RUN_OR_MODEL")]
    begin_command(ctx, debug=options["debug"], problems=problems)
    _run(Trained(model), options)


def _problems(options: dict[str, Any]) -> list[str]:
    """Return a line for each problem of the options; `Trained.settings` checks those that training has too."""
    lines = []
    if sum(options[name] not in (None, False) for name in ("prompt", "file", "interactive")) != 1:
        lines.append("give one of these: a PROMPT, --file FILE, or --interactive")
    if options["image"] and options["prompt"] is None:
        lines.append("--image needs a PROMPT")
    if options["prompt"] is not None and not options["prompt"].strip():
        lines.append("PROMPT is empty; write a text to answer")
    if bool(options["file"]) != bool(options["output"]):
        lines.append("--file and --output go together: name a file of prompts and a new file for the answers")
    if options["output"] and Path(options["output"]).exists():
        lines.append(f"--output {options['output']}: already exists; name a new file")
    for name in ("top_p", "top_k"):
        if options[name] is not None and not options["temperature"]:
            lines.append(f"{flag_of(name)} needs --temperature above 0, which switches sampling on")
    return lines


def _run(trained: Trained, options: dict[str, Any]) -> None:
    import torch
    from accelerate.utils.memory import clear_device_cache

    from accel_sft.evaluation.answerer import Answerer
    from accel_sft.evaluation.generate import Sampling
    from accel_sft.evaluation.prompts import prompt_with, read_prompts, talk
    from accel_sft.launch.accelerator import create_accelerator
    from accel_sft.launch.info import launch_of_this_process
    from accel_sft.models.pretrained import refuse_offload
    from accel_sft.models.source import other_base

    given = {name: value for name, value in options.items() if value is not None}
    sampling = Sampling(**{name: given[name] for name in given.keys() & {*_OF_SAMPLING}})
    own = {name: given[name] for name in given.keys() & {*_OF_TRAINING}}
    config = trained.settings(EvaluateConfig(model=trained.weights, **own))
    refuse_offload(config.offload, ranks=1, quantized=False)
    most = config.max_new_tokens or LONGEST_ANSWER
    of_run = (trained.record or {}).get("system_prompt")
    system = given.get("system", of_run if isinstance(of_run, str) else None)  # the record may hold anything
    raw = trained.raw_text and config.chat_template is None
    if options["file"]:
        chats, names = read_prompts(options["file"], system)
    else:  # for --interactive, a chat without a question
        chats, names = [prompt_with(options["prompt"] or "", options["image"], system)], ["PROMPT"]
    images = any(chat.images for chat in chats)
    if raw and (options["interactive"] or images or any(chat.tools or chat.turns[1:] for chat in chats)):
        raise UserError(f"{trained.name} was trained on raw text; give a text to continue, or a --chat-template")
    talking, answers = {}, {}
    with terminal.quiet(None, config.debug, shown_on=2) as out:

        def tell(line: str) -> None:
            print(terminal.wrapped(printable(line)), file=out)

        for line in trained.notes:
            tell(line)
        accelerator, _ = create_accelerator(config, launch_of_this_process(), precision_of_run=trained.precision)
        for side, source in trained.sources(options["base"]).items():
            print(terminal.wrapped(f"{side:<5}  {source.adapter or source.weights}", 7), file=out)
            for line in other_base(source):
                tell(f"warning: {line}")
            offloaded: dict[str, Any] = {"offload": config.offload, "log": tell} if config.offload else {}
            answerer = Answerer(accelerator, config, source, sampling, images=images, raw=raw, **offloaded)
            torch.manual_seed(options["seed"])
            if options["interactive"]:
                talking[side] = answerer
            else:
                with terminal.waiting(f"answering {len(chats):,} prompts" if len(chats) > 1 else "answering"):
                    answers[side] = answerer.answers(chats, most, names)
            for note in answerer.notes:
                tell(note)
            del answerer  # the next model may need its memory
            clear_device_cache(garbage_collection=True)
    if options["interactive"]:
        talk(talking, system, most)
    elif options["file"]:
        _write(options["output"], chats, answers, most)
    else:
        for side, (answer,) in answers.items():
            if len(answers) > 1:
                click.echo(f"[{side}]")
            click.echo(printable(answer.text))
            if not answer.ended:
                click.echo(f"the answer was cut after {answer.tokens} tokens; raise --max-new-tokens", err=True)


def _write(output: str, chats: list[Any], answers: dict[str, list[Any]], most: int) -> None:
    """Write the answers as JSONL: the model's as `generated`, and with `--base` the base's as `base`."""
    rows = []
    for chat, (*before, last) in zip(chats, zip(*answers.values(), strict=True), strict=True):
        row = {"messages": chat.turns, **({"tools": chat.tools} if chat.tools else {})}
        row |= {"generated": last.text, "tokens": last.tokens, "ended": last.ended}
        rows.append({**row, **({"base": before[0].text} if before else {})})
    try:
        write_json_lines(expanded(output, "--output"), rows)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror}); name another file") from None
    cut = sum(not row["ended"] for row in rows)
    click.echo(f"{output}: {len(rows):,} answers" + (f", {cut:,} of them cut after {most} tokens" if cut else ""))
