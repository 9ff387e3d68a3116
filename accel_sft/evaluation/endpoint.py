"""The client of an OpenAI-compatible endpoint: greedy answers, their tokens, and how the server tokenizes prompts.

It uses the standard library: the versions of huggingface_hub that `pyproject.toml` allows bring two different clients.
"""

import contextlib
import dataclasses
import http.client
import ipaddress
import itertools
import json
import math
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from accel_sft.api.errors import UserError
from accel_sft.chat.conversation import Tools, Turns
from accel_sft.io.files import is_number, mapping
from accel_sft.io.terminal import waiting
from accel_sft.io.text import LONGEST_ERROR, one_line

KEY = "ACCEL_SFT_API_KEY"
"""The environment variable of the key, unless `--key-from` names another."""
RETRIES, PAUSE_SECONDS, LONGEST_PAUSE = 4, 1.0, 60.0
"""How often a request is repeated, the pause before the first repetition, which doubles, and the longest pause."""
AT_ONCE = 8
"""Requests under way at the same time: servers answer several as fast as one."""
_MOST_BYTES = 1 << 26
_BUSY = (429, 500, 502, 503, 504)
_OPTIONAL = "logprobs", "top_logprobs"
"""Keys of a request without which an answer is still an answer. A server that refuses them is asked without them."""
_LIMIT, _NEWER_LIMIT = "max_tokens", "max_completion_tokens"
"""Keys of the largest number of an answer's tokens: some servers take the newer one alone."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class EndpointError(UserError):
    """A server's refusal, or its silence; `status` is the HTTP status, None if there was no answer."""

    def __init__(self, line: str, status: int | None = None) -> None:
        super().__init__(line)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Whether the server does not know this request, and may know another one."""
        return self.status in (400, 404, 405, 415, 422, 501)


@dataclasses.dataclass(frozen=True)
class Reply:
    """An answer.

    Attributes:
        finish: why it ended: "stop", "length", or another word of the server.
        prompt_tokens, tokens: what the server counted in the prompt and in the answer.
        logprobs: text and log-probability of each token; empty if the server gives none.
    """

    text: str
    finish: str
    prompt_tokens: int | None = None
    tokens: int | None = None
    logprobs: Sequence[tuple[str, float]] = ()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *given: Any) -> None:
        """Follow no redirect, which would take prompts and key to an address that nobody named."""


class Endpoint:
    """A server and the model that is asked there. Only `--url` is contacted, and nothing but prompts is sent.

    Args:
        url: the address with its version, as http://127.0.0.1:8000/v1.
        model: the name that the server knows the model by; None: its only one.
        key_from: the environment variable that has the key; None: KEY, if it is set.
        timeout: seconds after which a request without an answer is given up.
    """

    def __init__(self, url: str, model: str | None, key_from: str | None = None, timeout: float = 600) -> None:
        self.url, self.timeout = _address(url), timeout
        self._key = _key(key_from)
        self._reached = False
        self._refused: frozenset[str] = frozenset()
        self._limit = _LIMIT
        handlers: list[Any] = [_NoRedirects()]
        if _is_local(urllib.parse.urlsplit(self.url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)
        self.model = model or self._only_model()

    def chat(self, turns: Turns, most: int, tools: Tools = None, thinking: str | None = None) -> Reply:
        """The greedy answer to a conversation, as the server's own chat template writes it.

        Args:
            most: the largest number of the answer's tokens.
            thinking: `--thinking`; "off" is passed on to the template.
        """
        more = {_LIMIT: most, "logprobs": True, "top_logprobs": 1}
        answer = self._ask("chat/completions", {**_of_chat(turns, tools, thinking), **more})
        return _reply(answer, mapping(answer["choices"][0].get("message")).get("content"))

    def complete(self, prompt: str | list[int], most: int) -> Reply:
        """The greedy continuation of a prompt, which the server's template does not touch.

        Args:
            prompt: a text, or its token ids where the server takes them.
        """
        answer = self._ask("completions", {"prompt": prompt, _LIMIT: most, "logprobs": 1})
        return _reply(answer, answer["choices"][0].get("text"))

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        complete = {"model": self.model, "temperature": 0, **body}
        limit, refused = self._limit, self._refused
        while True:
            sent = {limit if key == _LIMIT else key: value for key, value in complete.items() if key not in refused}
            try:
                answer = self.post(path, sent)
                break
            except EndpointError as error:
                if error.status in (400, 422) and _LIMIT in sent and _NEWER_LIMIT in str(error):
                    limit = _NEWER_LIMIT
                elif error.status in (400, 422) and sent.keys() & {*_OPTIONAL}:
                    refused = frozenset(_OPTIONAL)
                else:
                    raise
        self._limit, self._refused = limit, refused
        choices = answer.get("choices")
        if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
            raise EndpointError(f"--url {self.url}: {path} answered without `choices`; is it OpenAI-compatible?")
        return answer

    def chat_tokens(self, turns: Turns, tools: Tools = None, thinking: str | None = None) -> list[int] | None:
        """The ids that the server makes of a conversation's prompt; None if it has no call that tells."""
        body = {**_of_chat(turns, tools, thinking), "add_generation_prompt": True}
        answer = self._tokens({"model": self.model, **body})  # vLLM's form
        if answer is not None:
            return answer
        text = self._beside("apply-template", body).get("prompt")  # llama.cpp's form
        return self.text_tokens(text, special=True) if isinstance(text, str) else None

    def text_tokens(self, text: str, *, special: bool = False) -> list[int] | None:
        """The ids that the server makes of a text; None if it has no call that tells.

        Args:
            special: whether its tokenizer adds what it adds to prompts, such as a first token.
        """
        vllm = {"model": self.model, "prompt": text, "add_special_tokens": special}
        return self._tokens({"content": text, "add_special": special, **vllm})  # each server reads its own keys

    def _tokens(self, body: dict[str, Any]) -> list[int] | None:
        answer = self._beside("tokenize", body).get("tokens")
        complete = isinstance(answer, list) and answer and all(isinstance(token, int) for token in answer)
        return answer if complete else None

    def _beside(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What a call beside the API's version answers, as those of vLLM and llama.cpp stand; {} if there is none."""
        try:
            return self.post(path, body, root=True)
        except EndpointError as error:
            if error.is_refusal:
                return {}
            raise

    def _only_model(self) -> str:
        try:
            listed = self.post("models").get("data")
        except EndpointError as error:
            if error.status is None:
                raise
            base = self.url.partition("/v1/")[0].removesuffix("/v1") + "/v1"
            other = "" if self.url == base else f", or give --url {base} if that is its address"
            raise EndpointError(f"{error}; it lists no models: name one with --model{other}", error.status) from None
        names = [str(one.get("id")) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        if len(names) != 1:
            models = f"has {', '.join(map(self._shown, names[:8]))}" if names else "lists no model"
            raise UserError(f"--url {self.url}: the server {models}; name one with --model")
        return names[0]

    def post(self, path: str, body: dict[str, Any] | None = None, *, root: bool = False) -> dict[str, Any]:
        """The JSON object that the server answers; without a body it is a GET. With `root`, the path stands beside the
        API's version."""
        at = f"{self.url.removesuffix('/v1') if root else self.url}/{path}"
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "accel-sft"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        pause, left = PAUSE_SECONDS, RETRIES
        while True:
            try:
                request = urllib.request.Request(at, data, headers)
                with self._opener.open(request, timeout=self.timeout) as response:
                    content = _body(response)
                self._reached = True
                break
            except urllib.error.HTTPError as error:
                self._reached = True
                if error.code not in _BUSY or not left:
                    raise self._refusal(at, error) from None
                pause = max(pause, _asked_to_wait(error))
            except (ValueError, OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                if isinstance(reason, TimeoutError):
                    advice = "the server is too slow or stuck; --timeout gives it longer"
                    raise EndpointError(f"{at}: no answer within {self.timeout:g} s; {advice}") from None
                unusable = isinstance(error, ValueError)  # no request can be made of the address
                if unusable or not left or not self._reached:
                    cause = one_line(str(reason) or type(reason).__name__, LONGEST_ERROR)
                    raise EndpointError(f"{at}: cannot be reached ({cause}); is the server running there?") from None
            time.sleep(min(pause, LONGEST_PAUSE))
            pause, left = pause * 2, left - 1
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            raise EndpointError(f"{at}: the answer is no JSON; is it an OpenAI-compatible server?") from None
        if not isinstance(answer, dict):
            raise EndpointError(f"{at}: answered {self._shown(str(answer))}; is it an OpenAI-compatible server?")
        return answer

    def _shown(self, text: str) -> str:
        """What a server says, as a line in which the key is masked."""
        return one_line(text.replace(self._key, "***") if self._key else text, LONGEST_ERROR)

    def _refusal(self, at: str, error: urllib.error.HTTPError) -> EndpointError:
        message = str(error.reason)
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            message = _message(_body(error).decode(errors="replace")) or message
        message = self._shown(message)
        if 300 <= error.code < 400:
            where = self._shown(error.headers.get("Location", "elsewhere"))
            return EndpointError(f"{at}: redirects to {where}, which is not followed; name that address in --url")
        if error.code in (401, 403):
            advice = f"give the server's key in ${KEY}, or by --key-from NAME"
            if self._key:
                advice = "the key that was sent is not accepted; see that it is this server's"
            return EndpointError(f"{at}: {error.code} ({message}); {advice}")
        advice = f" after {RETRIES + 1} tries" if error.code in _BUSY else ""
        return EndpointError(f"{at}: the server answered {error.code}{advice} ({message})", error.code)

    def call_all(self, what: str, call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """What `call` gives for each item; several at once. A line says now and then how many are done.

        The first error, or an interrupt, ends it at once: the threads are daemons, and a stuck request keeps nobody.
        """
        numbered, done = iter([*enumerate(items)]), queue.SimpleQueue[tuple[int, Result | None, Exception | None]]()
        results: dict[int, Any] = {}

        def work() -> None:
            for at, item in numbered:
                try:
                    done.put((at, call(item), None))
                except Exception as error:  # noqa: BLE001 - raised by the thread that waits
                    done.put((at, None, error))

        with waiting(lambda: f"{what}: {len(results):,} of {len(items):,}"):
            for _ in range(min(AT_ONCE, len(items))):
                threading.Thread(target=work, daemon=True).start()
            while len(results) < len(items):
                at, result, error = done.get()
                if error:
                    for _ in numbered:  # nothing more is asked
                        pass
                    raise error
                results[at] = result
        return [results[at] for at in range(len(items))]


def _of_chat(turns: Turns, tools: Tools, thinking: str | None) -> dict[str, Any]:
    """What decides a prompt, as the API takes it."""
    body: dict[str, Any] = {"messages": messages_of(turns)}
    body |= {"tools": tools} if tools else {}
    return body | ({"chat_template_kwargs": {"enable_thinking": False}} if thinking == "off" else {})


def messages_of(turns: Turns) -> list[dict[str, Any]]:
    """Turns as the API takes them: arguments of tool calls are JSON in a text there."""
    messages = []
    for turn in turns:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in turn.get("tool_calls", ())
        ]
        messages.append({**turn, **({"tool_calls": calls} if calls else {})})
    return messages


def _body(response: Any) -> bytes:
    """The body of a response, of at most _MOST_BYTES; raises IncompleteRead if the server ended it too early."""
    body: bytes = response.read(_MOST_BYTES + 1)
    if len(body) > _MOST_BYTES:
        raise EndpointError(f"{response.url}: more than {_MOST_BYTES >> 20} MiB of answer; given up")
    if response.length:
        raise http.client.IncompleteRead(body, response.length)
    return body


def _reply(answer: dict[str, Any], text: Any) -> Reply:
    choice, usage = answer["choices"][0], mapping(answer.get("usage"))
    given = mapping(choice.get("logprobs"))
    names, values = (_list(given.get(name)) for name in ("tokens", "token_logprobs"))
    if listed := _list(given.get("content")):  # of chats, and of llama.cpp's completions
        names, values = ([mapping(one).get(name) for one in listed] for name in ("token", "logprob"))
    finite = itertools.takewhile(lambda value: is_number(value) and math.isfinite(value), values)
    logprobs = [(_text(token), float(value)) for token, value in zip(names, finite, strict=False)]
    counts = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
    prompt, written = (count if isinstance(count, int) else None for count in counts)
    return Reply(_text(text), str(choice.get("finish_reason")), prompt, written, logprobs)


def _text(answer: Any) -> str:
    """A text of a server's answer, also where it comes in parts; half a surrogate pair, which no file takes, is "?"."""
    parts = [mapping(part).get("text") or "" for part in answer] if isinstance(answer, list) else [answer or ""]
    return "".join(map(str, parts)).encode(errors="replace").decode()


def _list(answer: Any) -> list[Any]:
    """A list of a server's answer; empty if it is none."""
    return answer if isinstance(answer, list) else []


def _address(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        bad = parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment
        _ = parts.port
    except ValueError:
        bad = True
    if bad or any(mark.isspace() or not mark.isprintable() for mark in url):
        raise UserError(f"--url {one_line(url)}: expected an address such as http://127.0.0.1:8000/v1")
    if "@" in parts.netloc:
        raise UserError(f"--url: a key or password in an address is shown by many programs; export it as {KEY}")
    return url.rstrip("/")


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _key(named: str | None) -> str | None:
    key = os.environ.get(named or KEY)
    if named and not key:
        name = named if named.isidentifier() else "***"  # it may be the key itself
        raise UserError(f"--key-from {name}: this environment variable is not set; export it, or leave the option out")
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(f"{named or KEY}: the key has characters that no header may have; is it a single line?")
    return key or None


def _asked_to_wait(error: urllib.error.HTTPError) -> float:
    try:
        return float(error.headers.get("Retry-After", "0"))
    except ValueError:
        return 0.0


def _message(body: str) -> str:
    """The sentence in a server's error, whatever its form."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return body.strip()
    while isinstance(answer, dict):
        answer = next((answer[key] for key in ("error", "message", "detail") if key in answer), None)
    return str(answer or "")
