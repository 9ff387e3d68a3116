"""The commands that list and print what is installed: `tasks`, `launch-file` and `completion`."""

import json
from typing import Any

import click
from click.shell_completion import get_completion_class

from accel_sft.api import registry
from accel_sft.api.errors import UserError
from accel_sft.io.terminal import wrapped
from accel_sft.launch.info import FOLDER, shipped

NAME, VARIABLE = "accel-sft", "_ACCEL_SFT_COMPLETE"
"""The program's name, and the environment variable with which the shell's script asks the program for completions."""
_INSTALLED = {
    "bash": "echo 'eval \"$(accel-sft completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(accel-sft completion zsh)\"' >> ~/.zshrc",
    "fish": "accel-sft completion fish > ~/.config/fish/completions/accel-sft.fish",
}
_BEFORE_SCRIPT = {"zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }"}
"""Lines that a shell must run before the script: a plain zsh has its completion system switched off."""
_ONCE = "\b\nRun one of these once; later shells complete words:\n" + "\n".join(f"  {c}" for c in _INSTALLED.values())


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with versions, entry points and problems.")
def tasks(as_json: bool) -> None:
    """List the installed tasks and their versions, and say why a broken task is broken."""
    listed = [_described(plugin) for plugin in registry.plugins()]
    if as_json:
        click.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    if not listed:
        click.echo("No task is installed. `accel-sft new-task NAME` creates one.")
    for task in listed:
        package, state = f"{task['distribution']} {task['version']}", "ok" if task["usable"] else "broken"
        click.echo(wrapped(f"{task['name']:<10}  {package:<26}  {state:<6}  {task['summary']}", 48))
    if broken := [line for task in listed for line in task["problems"]]:
        click.echo("\nBroken tasks, and why:")
        click.echo("\n".join(wrapped(f"  {line}") for line in broken))


def _described(plugin: registry.Plugin) -> dict[str, Any]:
    """The entry of a task in `tasks --json`; this imports the task."""
    summary, problems = plugin.summary, []
    try:
        summary = registry.summary_of(registry.load_plugin(plugin), plugin.summary)
    except UserError as error:
        problems = [*error.problems]
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.target,
        "summary": summary,
        "usable": not problems,
        "problems": problems,
    }


def _names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in shipped() if name.startswith(incomplete)]


@click.command("launch-file")
@click.argument("name", required=False, shell_complete=_names)
def launch_file(name: str | None) -> None:
    """Print a launch file (accel-sft launch-file z2 > z2.yaml) or, without NAME, list all.

    Then: accelerate launch --config_file z2.yaml -m accel_sft TASK

    To print the DeepSpeed JSON of a launch file, name the JSON: z3_twin_flow.json. Keep both files in one folder.
    """
    files = shipped()
    if name is None:
        width = max(map(len, files))
        for stem, path in files.items():  # a file's first line says what it is for
            purpose = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
            click.echo(f"{stem:<{width}}  {purpose}")
        return
    files |= {path.name: path for path in FOLDER.glob("*.json")}
    stem = name.removesuffix(".yaml")
    if stem not in files:
        near = registry.suggestion(stem, files) or f"; choose one of {', '.join(files)}"
        raise UserError(f"NAME {name!r}: no launch file has this name{near}")
    click.echo(files[stem].read_text(encoding="utf-8"), nl=False)


@click.command(epilog=_ONCE)
@click.argument("shell", type=click.Choice([*_INSTALLED]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes words of accel-sft in your shell: bash, zsh or fish.

    It completes names of installed tasks, files with tasks, the options of training, and the options of the tasks
    chat, math and ner. It does not run other tasks' code, and so does not complete their options.
    """
    completion_class = get_completion_class(shell)
    assert completion_class  # click knows the three shells
    script = completion_class(ctx.find_root().command, {}, NAME, VARIABLE).source()
    click.echo("\n".join(filter(None, (_BEFORE_SCRIPT.get(shell), script))))
