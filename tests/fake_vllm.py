"""Stands in for the program `vllm`: its routes and its form of answers, computed by transformers' own `generate`.

FAKE_VLLM in the environment is a folder: `record.json` tells who was started how, and the file `do`, if there is one,
what to do instead: die, linger, refuse, vanish, be-silent or be-old.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(os.environ["FAKE_VLLM"])
DO = (FOLDER / "do").read_text() if (FOLDER / "do").exists() else ""
ARGUMENTS = sys.argv[1:]
HELPER = "import signal, time; signal.signal(signal.SIGTERM, signal.{}); print(1, flush=True); time.sleep(600)"


def argument(flag: str) -> str | None:
    return ARGUMENTS[ARGUMENTS.index(flag) + 1] if flag in ARGUMENTS else None


def write(name: str, content: object) -> None:
    partial = FOLDER / f".{name}.{threading.get_ident()}"  # questions come side by side
    partial.write_text(json.dumps(content))
    partial.rename(FOLDER / name)


def load():
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ARGUMENTS[1], dtype=getattr(torch, argument("--dtype")))
    names = [argument("--served-model-name")]
    if "--enable-lora" in ARGUMENTS:
        from peft import PeftModel

        name, _, folder = argument("--lora-modules").partition("=")
        model, names = PeftModel.from_pretrained(model, folder), [*names, name]
    return model, names


def complete(asked: dict) -> list[int]:
    import torch

    prompt = torch.tensor([asked["prompt"]])
    assert prompt.shape[1] + asked["max_tokens"] <= int(argument("--max-model-len"))
    assert (asked["temperature"], asked["ignore_eos"], asked["return_token_ids"]) == (0, True, True)
    settings = {"do_sample": False, "max_new_tokens": asked["max_tokens"], "eos_token_id": asked["stop_token_ids"]}
    with LOCK:
        output = MODEL.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **settings)
    return output[0, prompt.shape[1] :].tolist()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(503 if DO == "linger" else 200 if self.path == "/health" else 404, {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if DO == "be-silent":
            write("asked.json", asked)
            time.sleep(600)
        if DO == "vanish":
            print("RuntimeError: the engine is dead", flush=True)
            os._exit(9)
        if DO == "refuse" or self.path != "/v1/completions" or (not DO and asked["model"] not in NAMES):
            return self.reply(400, {"error": {"message": "this prompt is\nnot for me", "code": 400}})
        choice = {"index": 0, "text": "", "finish_reason": "stop"}
        self.reply(200, {"choices": [choice if DO else {**choice, "token_ids": complete(asked)}]})

    def reply(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Listener(ThreadingHTTPServer):
    request_queue_size = 2048
    daemon_threads = True


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only who started it may end it
    stubborn = HELPER.format("SIG_IGN" if DO == "refuse" else "SIG_DFL")
    helper = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    helper.stdout.readline()
    write("record.json", {"words": ARGUMENTS, "pids": [os.getpid(), helper.pid], "environment": dict(os.environ)})
    if DO == "die":
        print("(Worker) ERROR ValueError: too little memory", *(f"trace {n}" for n in range(30)), sep="\n", flush=True)
        sys.exit(3)
    MODEL, NAMES = (None, []) if DO else load()
    LOCK = threading.Lock()
    Listener((argument("--host"), int(argument("--port"))), Handler).serve_forever()
