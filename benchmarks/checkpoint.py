"""What a checkpoint by parameter, in safetensors, costs beside the library's own state of the same run.

    accelerate launch --config_file accelerate_configs/z2.yaml --mixed_precision no benchmarks/checkpoint.py --rounds 5
    python benchmarks/checkpoint.py --smoke

Both are written to the same disk in turns, each file on the disk and hashed before it counts, as a run's checkpoint is.
The library's is `accelerator.save_state`: torch's or DeepSpeed's own files, bound to the layout they are written under.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import smoke
from accel_sft.launch.environment import prepare_environment


def main(rounds: int, hidden_size: int, layers: int) -> None:
    prepare_environment()

    import torch
    from accelerate.utils import broadcast_object_list
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from accel_sft.api.config import TrainConfig
    from accel_sft.checkpoint import shards
    from accel_sft.io import manifest
    from accel_sft.launch.accelerator import create_accelerator, prepare_model
    from accel_sft.launch.read import read_launch
    from accel_sft.training.optimizer import Stepper, new_optimizer

    config = TrainConfig().resolved({})
    accelerator, launch = create_accelerator(config, read_launch())
    torch.manual_seed(0)
    shape = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "num_hidden_layers": layers}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=8, num_key_value_heads=8, vocab_size=32_000))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer = prepare_model(accelerator, launch, model.train(), new_optimizer(model, config), 1.0)
    stepper = Stepper(accelerator, model, optimizer, 1.0)
    ids = torch.arange(32, device=accelerator.device)[None]
    with stepper.boundary(last=True):
        stepper.backward(model(input_ids=ids, labels=ids).loss)
    stepper.update(0)

    main_process = accelerator.is_main_process
    folder = Path(broadcast_object_list([tempfile.mkdtemp() if main_process else None])[0])

    def seconds(write) -> tuple[float, int]:
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        write(folder)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            manifest.write(folder, {})
        accelerator.wait_for_everyone()
        return time.perf_counter() - started, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    ways = {
        "by parameter": lambda folder: shards.write(accelerator, model, optimizer, folder),
        "save_state": lambda folder: accelerator.save_state(str(folder)),
    }
    took = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, write in ways.items():
            second, size = seconds(write)
            if number:  # the first round warms up
                took[name].append((second, size))
    accelerator.print(
        f"{parameters:,} parameters, {accelerator.num_processes} ranks, {accelerator.distributed_type.value}"
    )
    accelerator.print("\n| way | median seconds | GiB |\n|---|---|---|")
    for name, each in took.items():
        accelerator.print(f"| {name} | {statistics.median(s for s, _ in each):.2f} | {each[0][1] / 2**30:.2f} |")
    accelerator.wait_for_everyone()
    if main_process:
        shutil.rmtree(folder)
    accelerator.end_training()


if __name__ == "__main__":
    parser = smoke.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=640)
    parser.add_argument("--layers", type=int, default=10)
    arguments = smoke.parse(parser, rounds=1, hidden_size=64, layers=2)
    main(arguments.rounds, arguments.hidden_size, arguments.layers)
