"""Compiles a model's blocks (`--compile`), and says what went wrong with that."""

import logging
import sys
from collections.abc import Callable
from typing import Any

from accel_sft.api.errors import UserError, first_line

COMPILED_VARIANTS = 64
"""Maximum number of variants of a block's code that torch compiles. All blocks of a model share one code, and a variant
is needed for each combination of mask, dropout, gradient mode and adapter. The checks before the first step need up to
11, which is more than torch's default, 8: all of training would then run uncompiled."""


def compile_blocks(model: Any, log: Callable[[str], None]) -> None:
    """Have torch compile each of the model's repeated blocks, in place; torch compiles on their first forwards.

    Args:
        log: called with a line if torch compiles no further variant of a block, and runs it uncompiled from then on.
    Raises:
        UserError: the model does not say which blocks it repeats.
    """
    import torch._dynamo

    names = set(getattr(model, "_no_split_modules", None) or [])
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError("--compile: the model does not name its repeated blocks (_no_split_modules); leave it out")
    torch._dynamo.config.recompile_limit = COMPILED_VARIANTS
    logging.getLogger("torch._dynamo.convert_frame").addHandler(_TellsOfTheLimit(log))
    for block in blocks:
        block.compile(dynamic=True)  # forwards differ in length


class _TellsOfTheLimit(logging.Handler):
    """Calls `log` with a line when torch's compiler warns that it has reached its limit of variants."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        if "recompile_limit" in record.getMessage():
            self.log(
                f"--compile: a block has {COMPILED_VARIANTS} compiled variants, torch's limit here; it runs uncompiled "
                "from now on, so --compile may cost more than it saves"
            )


def trouble_of_compiling(error: BaseException) -> str:
    """The message for an error of torch's compiler on the blocks' first forward; "" for any other error."""
    compiler = sys.modules.get("torch._dynamo.exc")  # imported once torch compiles
    if compiler is None or not isinstance(error, compiler.BackendCompilerFailed):
        return ""
    return (
        f"--compile: torch cannot compile here ({first_line(error)[:200]}); it needs a compiler (g++, on GPUs gcc, or "
        "the one that CXX or CC names) and a folder with room that it can write (TORCHINDUCTOR_CACHE_DIR, or else one "
        "in the system's temporary folder); see to these, or leave --compile out"
    )


def compile_seconds() -> float:
    """Seconds that torch has spent compiling in this process."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent().get("total_wall_time", 0.0)
