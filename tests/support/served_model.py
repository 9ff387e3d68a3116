"""A server around a small model, in the forms of vLLM, llama.cpp and others, into which a test plants one fault."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import local_server
import torch
from local_server import Handler


@dataclass
class Served:
    """What is served, and how."""

    model: Any
    tokenizer: Any
    form: str = "vllm"  # or "llama", or "plain": no calls for tokens, no log-probabilities, prompts as text only
    newer: bool = False  # whether the answer's length is limited by max_completion_tokens alone
    template: str | None = None  # another chat template than the tokenizer's
    double_first: bool = False  # whether the prompt's first token stands there twice
    ends: bool = True  # whether an end-of-turn token ends an answer
    draws: bool = False  # whether tokens are drawn at any temperature, once the likeliest one would end the answer
    context: int | None = None  # tokens of the prompt that are read, the last ones; None: all
    names: tuple[str, ...] = ("tuned",)
    status: list[int] = field(default_factory=list)  # HTTP statuses of the next requests, before any is answered
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)  # path, headers and body
    lock: Any = field(default_factory=threading.Lock)

    def text(self, messages: list[dict[str, Any]]) -> str:
        how = {"tokenize": False, "add_generation_prompt": True, "chat_template": self.template}
        return self.tokenizer.apply_chat_template(messages, **how)

    def ids(self, text: str, special: bool = False) -> list[int]:
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        ids = self.ids(self.text(messages))
        return ids[:1] * self.double_first + ids

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in self.names]}
        if path == "/tokenize" and self.form == "vllm":
            if "messages" in body:
                return 200, {"tokens": self.prompt(body["messages"])}
            return 200, {"tokens": self.ids(body["prompt"], body["add_special_tokens"])}
        if path == "/tokenize" and self.form == "llama":
            ids = self.ids(body.get("content", ""))
            return 200, {"tokens": ids[:1] * (self.double_first and bool(body.get("add_special"))) + ids}
        if path == "/apply-template" and self.form == "llama":
            return 200, {"prompt": self.text(body["messages"])}
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return 404, {"error": {"message": "not found"}}
        if self.form == "plain" and "logprobs" in body:
            return 422, {"detail": "Unexpected fields in the request: {'logprobs'}"}
        if self.newer and "max_tokens" in body:
            told = "Unsupported parameter: 'max_tokens' is not supported; use 'max_completion_tokens' instead."
            return 400, {"error": {"message": told}}
        prompt = body.get("prompt")
        if isinstance(prompt, list) and self.form == "plain":
            return 400, {"detail": "prompt must be a string."}
        if isinstance(prompt, str):
            prompt = self.ids(prompt)
        with self.lock:
            return 200, self.completion(prompt or self.prompt(body["messages"]), body)

    def completion(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        read = prompt[-self.context :] if self.context else prompt
        ids, known, ending = [], [], {self.tokenizer.eos_token_id}
        finish, drawing = "length", False
        with torch.no_grad():
            while len(ids) < body["max_completion_tokens" if self.newer else "max_tokens"]:
                logits = self.model(torch.tensor([[*read, *ids]])).logits[0, -1].float()
                token = int(logits.argmax())
                if drawing := self.draws and (drawing or token in ending):
                    token = int(logits.index_fill(0, torch.tensor([*ending]), -torch.inf).softmax(-1).multinomial(1))
                ids.append(token)
                known.append(float(logits.log_softmax(-1)[token]))
                if token in ending and self.ends:
                    finish = "stop"
                    break
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        words = [self.tokenizer.decode([token]) for token in ids]
        choice: dict[str, Any] = {"finish_reason": finish}
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": text}
            listed = [{"token": word, "logprob": value} for word, value in zip(words, known, strict=True)]
            choice["logprobs"] = {"content": listed} if "logprobs" in body else None
        else:
            choice["text"] = text
            choice["logprobs"] = {"tokens": words, "token_logprobs": known} if "logprobs" in body else None
        usage = {"prompt_tokens": len(read), "completion_tokens": len(ids)}
        return {"choices": [choice], "usage": usage}


@contextlib.contextmanager
def serving(served: Served) -> Iterator[str]:
    """The address of a server, which is gone after the block."""

    class Model(Handler):
        def do_POST(self) -> None:
            body = json.loads(self.body() or b"{}")
            served.asked.append((self.path, dict(self.headers), body))
            if not served.status:
                code, content = served.answer(self.path, body)
                self.answer(content, code)
            elif code := served.status.pop(0):
                location = {"Location": "http://127.0.0.1:9/v1"} if code == 302 else {}
                self.answer({"error": {"message": f"no: {self.headers.get('Authorization')}"}}, code, location)
            else:
                self.close_connection = True

        do_GET = do_POST

    with local_server.serving(Model) as address:
        yield f"{address}/v1"
