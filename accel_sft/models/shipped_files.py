"""Tells the files that make up a model from others in its folder of exported weights."""

import fnmatch
from pathlib import Path

from accel_sft.api.errors import UserError
from accel_sft.io.files import read_json

_SHIPPED: tuple[str, ...] = ("*.safetensors", "*.safetensors.index.json", "README.md", "*.jinja", "config.json")
_SHIPPED += ("chat_template.json", "adapter_config.json", "generation_config.json", "tokenizer_config.json")
_SHIPPED += ("*processor_config.json", "tokenizer.json", "added_tokens.json", "special_tokens_map.json", "tekken.json")
_SHIPPED += ("vocab.*", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece*.model", "*.tiktoken")
_TEMPLATES = "additional_chat_templates"
"""The only subfolder that belongs to a model; transformers gives it this name."""


def shipped_files(source: Path) -> tuple[list[Path], list[str]]:
    """Return the paths within `source` of the model's files, and the names of all other files and folders there.

    A Python file is the model's if a configuration names it as the model's own code, or if such a file imports it.

    Raises:
        UserError: a configuration or the model's own code cannot be read.
    """
    code = _own_code(source)
    shipped, left = [], []
    for path in sorted(source.iterdir()):
        if path.is_dir():
            templates = sorted(path.glob("*.jinja")) if path.name == _TEMPLATES else []
            shipped += [template.relative_to(source) for template in templates]
            left += [] if templates else [f"{path.name}/"]
        elif path in code or any(fnmatch.fnmatch(path.name, pattern) for pattern in _SHIPPED):
            shipped.append(Path(path.name))
        else:
            left.append(path.name)
    return shipped, left


def _own_code(source: Path) -> set[Path]:
    from transformers.dynamic_module_utils import get_relative_import_files

    found: set[Path] = set()
    for path in source.glob("*config.json"):
        content = read_json(path)
        named = content.get("auto_map") if isinstance(content, dict) else None
        for value in named.values() if isinstance(named, dict) else ():
            for name in value if isinstance(value, (list, tuple)) else (value,):
                module = str(name).partition(".")[0]
                file = source / f"{module}.py"
                if not (module.isidentifier() and file.is_file()):  # None, or on the hub: "org/name--module.Class"
                    continue
                try:
                    found |= {file, *map(Path, get_relative_import_files(file))}
                except (OSError, ValueError) as error:
                    raise UserError(
                        f"{file}: the model's own code cannot be read, nor what it imports ({error}); put it back"
                    ) from None
    return found
