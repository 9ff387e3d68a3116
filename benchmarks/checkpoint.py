"""What a checkpoint costs: in the background, with training waiting for it, and as the library's own state.

    accelerate launch --config_file accelerate_configs/z2.yaml --mixed_precision no benchmarks/checkpoint.py --rounds 5
    python benchmarks/checkpoint.py --smoke

A cycle is a number of steps with one checkpoint after the first; its end waits for the checkpoint. Cycles without a
checkpoint, with training waiting for it, and with a checkpoint in the background take turns. `stall` is how long the
loop stands still for the checkpoint. `lost` is how much longer the cycle is than one without, slower steps included.

The library's own state is that of `accelerator.save_state`: files of torch or DeepSpeed that only the same layout can
read. Its time ends when they are on the disk and hashed, like a run's checkpoint.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import smoke
from accel_sft.launch.environment import prepare_environment


def main(rounds: int, hidden_size: int, layers: int, steps: int, tokens: int, ours: bool) -> None:
    prepare_environment()

    import torch
    from accelerate.utils import broadcast_object_list
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from accel_sft.api.config import TrainConfig
    from accel_sft.checkpoint.background import Checkpoints
    from accel_sft.io import manifest
    from accel_sft.io.run_dir import RunDir
    from accel_sft.launch.accelerator import create_accelerator, prepare_model
    from accel_sft.launch.info import launch_of_this_process
    from accel_sft.training.optimizer import Stepper, new_optimizer

    config = TrainConfig().resolved({})
    accelerator, launch = create_accelerator(config, launch_of_this_process())
    torch.manual_seed(0)
    shape = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "num_hidden_layers": layers}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=8, num_key_value_heads=8, vocab_size=16_000))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer = prepare_model(accelerator, launch, model.train(), new_optimizer(model, config), 1.0)
    stepper = Stepper(accelerator, model, optimizer, 1.0)
    ids = torch.arange(64, device=accelerator.device).expand(max(tokens // 64, 1), 64)
    main_process = accelerator.is_main_process
    folder = Path(broadcast_object_list([tempfile.mkdtemp() if main_process else None])[0])
    runs = {name: RunDir(folder / name) for name in ("waiting", "background")}
    checkpoints = {
        name: Checkpoints(accelerator, launch, model, optimizer, run, "1", log=accelerator.print)
        for name, run in runs.items()
    }
    if main_process:
        for run in runs.values():
            run.checkpoints.mkdir(parents=True)
    made = 0

    def step() -> None:
        with stepper.boundary(last=True):
            stepper.backward(model(input_ids=ids, labels=ids).loss)
        stepper.update(made)

    def cycle(name: str) -> tuple[float, float]:
        """Seconds of a cycle, and of its checkpoint's call."""
        nonlocal made
        accelerator.wait_for_everyone()
        began, stall = time.perf_counter(), 0.0
        for number in range(steps):
            step()
            made += 1
            if number == 0 and name in checkpoints:
                saves = time.perf_counter()
                checkpoints[name].save({"step": made}, wait=name == "waiting")
                stall = time.perf_counter() - saves
        if name in checkpoints:
            checkpoints[name].finish()
        accelerator.wait_for_everyone()
        return time.perf_counter() - began, stall

    def library() -> tuple[float, int]:
        """Seconds and bytes of the library's state."""
        state = folder / "state"
        if main_process:
            shutil.rmtree(state, ignore_errors=True)
            state.mkdir()
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        accelerator.save_state(str(state))
        accelerator.wait_for_everyone()
        if main_process:
            manifest.write(state, {})
        accelerator.wait_for_everyone()
        return time.perf_counter() - began, size_of(state)

    took: dict[str, list[tuple[float, float]]] = {"none": [], "waiting": [], "background": []}
    theirs = []
    for number in range(rounds + 1):
        for name, each in took.items():
            each.append(cycle(name))
        if number and not ours:  # the first round warms up
            theirs.append(library())
    first = took["background"][0][1]
    cycles, stalls = ({name: [pair[at] for pair in each[1:]] for name, each in took.items()} for at in (0, 1))
    middle = statistics.median
    lost = {
        name: middle(mine - without for mine, without in zip(cycles[name], cycles["none"], strict=True))
        for name in checkpoints
    }
    accelerator.print(
        f"{parameters:,} parameters, {accelerator.num_processes} ranks, {accelerator.distributed_type.value}; a step "
        f"{middle(cycles['none']) / steps:.2f} s, a cycle {steps} steps; the first background stall {first:.2f} s"
    )
    accelerator.print("\n| way | stall | lost | of the time lost by waiting | GiB |\n|---|---|---|---|---|")
    for name, run in runs.items():
        share = lost[name] / lost["waiting"]
        told = f"{middle(stalls[name]):.2f} s | {lost[name]:.2f} s | {share:.0%} | {size_of(run.path) / 2**30:.2f}"
        accelerator.print(f"| {name} | {told} |")
    if theirs:
        accelerator.print(f"| save_state | {middle(s for s, _ in theirs):.2f} s | | | {theirs[0][1] / 2**30:.2f} |")
    accelerator.wait_for_everyone()
    if main_process:
        shutil.rmtree(folder)
    accelerator.end_training()


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    parser = smoke.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=640)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6, help="steps of a cycle: enough for a checkpoint to be done")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a rank's step")
    parser.add_argument("--ours", action="store_true", help="leave the library's state out")
    arguments = smoke.parse(parser, rounds=1, hidden_size=64, layers=2, steps=2, tokens=64)
    main(**{name: value for name, value in vars(arguments).items() if name != "smoke"})
