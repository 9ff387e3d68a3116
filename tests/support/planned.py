"""Published models' configurations, and jobs of `plan` under the shipped launch files."""

import contextlib
import functools
import json

import numpy as np
import torch
from places import CONFIGS
from torch.profiler import ProfilerActivity, profile

from accel_sft.launch.info import launch_of_yaml
from accel_sft.launch.precision import assume_precision
from accel_sft.memory.job import Job
from accel_sft.memory.model_config import read_shape


def model(family, hidden_size, intermediate_size, layers, heads, key_value_heads, vocabulary, *, tied=False, **more):
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": key_value_heads, "vocab_size": vocabulary}
    return {"model_type": family, **sizes, "tie_word_embeddings": tied, "torch_dtype": "bfloat16", **more}


QWEN_14B = model("qwen2", 5120, 13_824, 48, 40, 8, 152_064)
QWEN_7B = model("qwen2", 3584, 18_944, 28, 28, 4, 152_064)
QWEN_05B = model("qwen2", 896, 4864, 24, 14, 2, 151_936, tied=True)
LLAMA_8B = model("llama", 4096, 14_336, 32, 32, 8, 128_256)


def count(config):
    """The shape of a configuration's model, counted once."""
    return _counted(json.dumps(config, sort_keys=True, default=str))


@functools.cache
def _counted(config):
    return read_shape(json.loads(config), "model")


def launch(name, *flags, bf16=True):
    return assume_precision(launch_of_yaml(CONFIGS / f"{name}.yaml", *flags), bf16=bf16)


def job_of(config, name="z2", ranks=2, device="cuda", bf16=True, **more):
    of_ranks = launch(name, "--num_processes", str(ranks), bf16=bf16)
    return Job(shape=count(config), launch=of_ranks, device=device, **more)


@contextlib.contextmanager
def saved_for_backward(model, but=lambda tensor: False):
    """Yields a function that returns how many bytes autograd has saved inside, without weights and what `but` takes."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and not but(tensor):
            saved[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(size for size, _ in saved.values())


def allocated(call):
    """Bytes held after each allocation and release that a call makes on a CPU, as torch's allocator reports them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = call()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    del result  # it was held until then
    return held
