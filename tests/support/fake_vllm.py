"""Replaces the package `vllm`: the names that vllm_script uses, computed by transformers' own `generate`.

The environment variable FAKE_VLLM names a folder. `record.json` there gets the process and the arguments of LLM; a file
`do` says how to misbehave: die, hang, work, vanish, cut or babble.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

FOLDER = Path(os.environ["FAKE_VLLM"])
DO = (FOLDER / "do").read_text() if (FOLDER / "do").exists() else ""
HELPER = "import signal, time; signal.signal(signal.SIGTERM, signal.{}); print(1, flush=True); time.sleep(600)"


@dataclasses.dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    detokenize: bool


def TokensPrompt(*, prompt_token_ids):
    return {"prompt_token_ids": prompt_token_ids}


class LLM:
    def __init__(self, model, *, dtype, max_model_len, skip_tokenizer_init, generation_config, **others):
        stubborn = HELPER.format("SIG_IGN" if DO == "cut" else "SIG_DFL")
        helper = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
        helper.stdout.readline()
        arguments = {**others, "model": model, "dtype": dtype, "max_model_len": max_model_len}
        partial = FOLDER / ".record"
        partial.write_text(
            json.dumps({"arguments": arguments, "pids": [os.getpid(), helper.pid], "environment": dict(os.environ)})
        )
        partial.rename(FOLDER / "record.json")
        if DO == "die":
            print("(Worker) ERROR ValueError: too little memory", *(f"trace {n}" for n in range(30)), sep="\n")
            sys.stdout.flush()
            sys.exit(3)
        if DO:
            return
        import torch
        from transformers import AutoModelForCausalLM

        assert (skip_tokenizer_init, generation_config) == (True, "vllm")
        self.limit, self.lora = max_model_len, others.get("enable_lora", False)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    def generate(self, prompts, sampling_params, *, lora_request=None):
        (FOLDER / "asked").touch()
        if DO == "hang":
            time.sleep(600)
        if DO == "work":
            until = time.monotonic() + 6
            while time.monotonic() < until:
                pass
        if DO == "vanish":
            print("progress 10%\rprogress 20%\nRuntimeError: the engine is dead", flush=True)
            os._exit(9)
        if DO == "cut":
            return [output([1])] * (len(prompts) - 1)
        if DO:
            return [output([1.5])] * len(prompts)
        if lora_request:
            from peft import PeftModel

            assert self.lora
            self.model = PeftModel.from_pretrained(self.model, lora_request.lora_path)
        return [output(self.answer(prompt["prompt_token_ids"], sampling_params)) for prompt in prompts]

    def answer(self, ids, sampling):
        import torch

        prompt = torch.tensor([ids])
        assert prompt.shape[1] + sampling.max_tokens <= self.limit
        assert (sampling.temperature, sampling.ignore_eos, sampling.detokenize) == (0, True, False)
        settings = {"max_new_tokens": sampling.max_tokens, "eos_token_id": sampling.stop_token_ids}
        mask = torch.ones_like(prompt)
        return self.model.generate(input_ids=prompt, attention_mask=mask, do_sample=False, **settings)[
            0, prompt.shape[1] :
        ].tolist()


def output(ids):
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(ids))])
