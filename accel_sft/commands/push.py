"""`accel-sft push`: uploads a run's weights, tokenizer and model card to a hub, and files that `--also` names."""

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from accel_sft.api.errors import UserError
from accel_sft.commands.merge import MERGED, write_merged
from accel_sft.commands.trained import begin_command
from accel_sft.io import terminal
from accel_sft.io.files import expanded, new_folder, read_json
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import one_line, printable


@click.command()
@click.argument("run", type=click.Path(), metavar="RUN")
@click.argument("repo", metavar="REPO")
@click.option(
    "--what", type=click.Choice(["best", "final", "merged"]), help="Weights to upload; default: best, or else final."
)
@click.option("--private", is_flag=True, help="Create a private repository; refuse an existing public one.")
@click.option("--base-model", metavar="HUB_ID", help="Hub id of an adapter's base, if the base is a local folder.")
@click.option("--also", metavar="PATTERN", multiple=True, help="More files of the run's folder (report.md, samples/*).")
@click.option("--dtype", type=MERGED, help="Data type of merged weights; default: the base's.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model, to merge it.")
@click.option("--dry-run", is_flag=True, help="List the files without contacting the hub.")
@click.option("--debug", is_flag=True, help="Show tracebacks and the libraries' messages.")
@click.pass_context
def push(ctx: click.Context, run: str, repo: str, **options: Any) -> None:
    """Upload a run's weights, tokenizer and model card to a hub.

    For example: accel-sft push runs/math-20261120-101500 org/math-0.5B --private

    RUN is a run's folder, or a folder of exported weights. REPO is created if it does not exist. The token comes from
    HF_TOKEN or from `hf auth login`; HF_ENDPOINT names another hub.
    """
    begin_command(ctx, debug=options["debug"])
    from huggingface_hub import get_token

    from accel_sft.models.source import shipped_files

    source = _folder(run, options["what"])
    if not options["dry_run"]:
        _check_name(repo, "REPO")
        if not get_token():
            raise UserError("no token for the hub: set HF_TOKEN, or run `hf auth login`, with a token that may write")
    with terminal.quiet(None, options["debug"]) as out, tempfile.TemporaryDirectory() as temporary:
        for line in RunDir.choice_in(run) if options["what"] not in ("best", "final") else ():
            print(terminal.wrapped(printable(line)), file=out)
        if options["what"] == "merged":
            adapter, source = source, Path(temporary, "merged")
            with new_folder(str(source), "TMPDIR") as partial:
                for line in write_merged(str(adapter), partial, options["dtype"], options["trust_remote_code"]):
                    print(terminal.wrapped(line, 9), file=out)
        shipped, left = shipped_files(source)
        files = {str(name): source / name for name in shipped}
        if "adapter_config.json" in files:
            files |= _on_its_hub_id(source, Path(temporary), options["base_model"])
        files = _also(Path(run), options["also"]) | files
        for name, path in sorted(files.items()):
            print(printable(f"{path.stat().st_size / 1e6:10,.2f} MB  {name}"), file=out)
        if left:
            print(terminal.wrapped(printable(f"not uploaded: {', '.join(left)}; --also adds files")), file=out)
        if "README.md" in files:
            print("README.md shows a prompt of the validation data; check that you may publish it", file=out)
        if options["dry_run"]:
            return
        with terminal.waiting(f"uploading to {repo}"):
            url = _upload(files, repo, options["private"], f"{Path(run).name}: {options['what'] or source.name}")
        print(url, file=out)


def _folder(run: str, what: str | None) -> Path:
    """Return the folder with the run's weights: the one that `what` names (best or final), otherwise the default."""
    chosen = Path(run, what) if what in ("best", "final") else RunDir.weights_in(run)
    folder = expanded(str(chosen), "RUN")
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"RUN {run}: no weights in {folder}; name a run's folder, or a folder of exported weights")
    return folder


def _on_its_hub_id(source: Path, folder: Path, base_model: str | None) -> dict[str, Path]:
    """Write an adapter's configuration and card, with its base's hub id, into `folder`; return the files by name."""
    from huggingface_hub import metadata_load, metadata_save

    content = read_json(source / "adapter_config.json")
    base = base_model or hub_id(str(content.get("base_model_name_or_path")))
    if base is None:
        raise UserError(f"{source}: its base model is a local folder; name the base's hub id: --base-model ORG/NAME")
    _check_name(base, "--base-model")
    files = {"adapter_config.json": folder / "adapter_config.json"}
    content |= {"base_model_name_or_path": base, **({"revision": None} if base_model else {})}
    files["adapter_config.json"].write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if (source / "README.md").exists():
        files["README.md"] = Path(shutil.copyfile(source / "README.md", folder / "README.md"))
        metadata_save(files["README.md"], {**(metadata_load(files["README.md"]) or {}), "base_model": base})
    return files


def hub_id(base: str) -> str | None:
    """The hub id of an adapter's base, found by name or from a folder in the hub's cache; None if unknown."""
    from accel_sft.models.source import hub_place

    if place := hub_place(base):
        return place[0]
    return base if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", base) and not Path(base).exists() else None


def _also(run: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """Return the run's files that match the patterns, by their paths within the run's folder."""
    files: dict[str, Path] = {}
    for pattern in patterns:
        inside = not Path(pattern).is_absolute() and ".." not in Path(pattern).parts
        matches = [path for path in run.glob(pattern) if path.is_file()] if inside and pattern else []
        if not matches:
            raise UserError(f"--also {pattern}: no such file in {run}; name files of that folder, such as report.md")
        files |= {path.relative_to(run).as_posix(): path for path in matches}
    return files


def _check_name(name: str, argument: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{argument} {name}: not a repository's name ({one_line(str(error), 100)})") from None


def _upload(files: Mapping[str, Path], repo: str, private: bool, message: str) -> str:
    """Make the repository unless it exists, and upload the files in one commit; return the repository's address."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    api = HfApi()
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise UserError(f"{repo}: this repository is public, but you gave --private; nothing was uploaded")
        operations = [CommitOperationAdd(name, path) for name, path in files.items()]
        api.create_commit(repo, operations, commit_message=message)
    except HfHubHTTPError as error:
        answer = f"{error.response.status_code}: {one_line(error.server_message or str(error), 200)}"
        raise UserError(f"the hub {api.endpoint} answers {answer}; check that the token may write to {repo}") from error
    except (HTTPError, OSError, ValueError, KeyError) as error:  # the last two: the server is not a hub
        cause = one_line(str(error) or type(error).__name__, 200)
        raise UserError(f"the hub {api.endpoint} cannot be reached ({cause}); check network and HF_ENDPOINT") from error
    return str(url)
