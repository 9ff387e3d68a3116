"""What a run's files can be held to afterwards: digests of what decided its numbers, and a manifest of its folder.

Checkpoints hold the digests too, and the chain over the lines of metrics.jsonl. Needs no torch.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from accel_sft.api.changes import LAYOUT
from accel_sft.io import manifest
from accel_sft.io.files import mapping
from accel_sft.io.run_dir import RunDir


def made_by(record: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a run's numbers, by its run.json: digests of settings, data and code, and the libraries' versions.

    Settings that a resume may change are left out. A digest that the record's version did not keep is None.
    """
    config = {name: value for name, value in record["config"].items() if name not in LAYOUT}
    settings = [record["task"], config, record["task_options"], record.get("total_steps")]
    return {
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "data": record.get("data_sha256"),
        "task_code": record.get("task_code"),
        "package_code": record.get("package_code"),
        "versions": mapping(record.get("launch")).get("versions"),
    }


def other_versions(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The libraries of `then` that have another version now, in words."""
    return [f"{name} {then[name]}, here {now.get(name)}" for name in then if then[name] != now.get(name)]


def write_manifest(run_dir: RunDir, result: str, about: dict[str, Any]) -> None:
    """Write the manifest of a finished run's folder: of its records, samples and exported weights, and of the manifests
    of its checkpoints. Logs, traces and the trackers' files are not in it.

    It is written before the result.json that says that the run is complete: a kill in between leaves a run that
    writes both again.

    Args:
        result: the text that result.json will have.
    """
    content = result.encode()
    known = {run_dir.result.name: [len(content), hashlib.sha256(content).hexdigest()]}
    manifest.write(run_dir.path, about, known, among=listed(run_dir) | known.keys())


def listed(run_dir: RunDir) -> set[str]:
    """Names of the files that are here now and that the manifest of a finished run lists, but for result.json."""
    alone = [run_dir.record, run_dir.settings, run_dir.launch, run_dir.deepspeed, run_dir.metrics, run_dir.nonfinite]
    alone += [run_dir.resamples, run_dir.report, run_dir.batching, run_dir.most_tokens]
    folders = run_dir.base, run_dir.best, run_dir.final, run_dir.final_plain, run_dir.samples
    within = [path for folder in folders for path in folder.rglob("*")]
    saved = [folder / manifest.MANIFEST for folder in run_dir.all_checkpoints()]
    return {str(path.relative_to(run_dir.path)) for path in (*alone, *within, *saved) if path.is_file()}
