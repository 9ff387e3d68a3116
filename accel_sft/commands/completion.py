"""`accel-sft completion`: prints the script by which a shell completes commands, tasks, options and their values."""

import click
from click.shell_completion import get_completion_class

NAME, VARIABLE = "accel-sft", "_ACCEL_SFT_COMPLETE"
"""The program's name, and the environment variable with which the script asks it for completions."""
_INSTALLED = {
    "bash": "echo 'eval \"$(accel-sft completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(accel-sft completion zsh)\"' >> ~/.zshrc",
    "fish": "accel-sft completion fish > ~/.config/fish/completions/accel-sft.fish",
}
_BEFORE = {"zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }"}
"""Lines that a shell must run before the script: a plain zsh has its completion system switched off."""
EPILOG = "\b\nOnce, for every shell that is started from then on:\n" + "\n".join(f"  {c}" for c in _INSTALLED.values())


@click.command(epilog=EPILOG)
@click.argument("shell", type=click.Choice([*_INSTALLED]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes words of accel-sft in your shell: bash, zsh or fish.

    Names of installed tasks are completed, files that tasks are in, the options of training, and those of the tasks
    chat, math and ner. The code of other tasks does not run for that, so their own options are not completed.
    """
    completion_class = get_completion_class(shell)
    assert completion_class  # click knows the three shells
    script = completion_class(ctx.find_root().command, {}, NAME, VARIABLE).source()
    click.echo("\n".join(filter(None, (_BEFORE.get(shell), script))))
