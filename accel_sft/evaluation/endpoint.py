"""A client for OpenAI-compatible endpoints: it asks for answers, and for the token ids of prompts and texts.

It uses only the standard library, because different versions of huggingface_hub use different HTTP clients.
"""

import contextlib
import copy
import dataclasses
import http.client
import itertools
import json
import math
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from accel_sft.api.errors import UserError
from accel_sft.chat.conversation import Tools, Turns
from accel_sft.io.files import mapping
from accel_sft.io.terminal import waiting
from accel_sft.io.text import LONGEST_ERROR, one_line

KEY = "ACCEL_SFT_API_KEY"
"""The environment variable that holds the API key, unless `--key-from` names a different variable."""
RETRIES, PAUSE_SECONDS, LONGEST_PAUSE = 4, 1.0, 60.0
"""How often a failed request is repeated, the pause before the first repetition (pauses double), the longest pause."""
AT_ONCE = 8
"""Number of requests under way at the same time: servers answer several about as fast as one."""
_BUSY = (429, 500, 502, 503, 504)
_LIMIT, _NEWER_LIMIT = "max_tokens", "max_completion_tokens"
"""Keys for the maximum number of tokens of an answer; some servers take only the newer key."""
_WITHOUT_LOGPROBS = {"logprobs": "", "top_logprobs": ""}
"""`Endpoint._keys` for a server that refuses these keys; such a server's answers have no log-probabilities."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class EndpointError(UserError):
    """Raised if a server refuses a request or does not answer; `status` is the HTTP status, None without an answer."""

    def __init__(self, line: str, status: int | None = None) -> None:
        super().__init__(line)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Whether the server does not support this request, but may support a different one."""
        return self.status in (400, 404, 405, 415, 422, 501)


@dataclasses.dataclass(frozen=True)
class Reply:
    """A server's answer. `logprobs` has text and log-probability of each token; [] if the server gives none."""

    text: str
    finish: str
    prompt_tokens: int | None = None
    tokens: int | None = None
    logprobs: Sequence[tuple[str, float]] = ()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *given: Any) -> None:
        """Follow no redirect: that would send prompts and key to an address that the user did not name."""


class Endpoint:
    """A server and the model that answers there. Only `--url` is contacted, and nothing but prompts is sent.

    Without `model`, the server's only model answers. Without `key_from`, the key is taken from the environment variable
    ACCEL_SFT_API_KEY, if it is set.
    """

    def __init__(self, url: str, model: str | None, key_from: str | None = None, timeout: float = 600) -> None:
        self.url, self.timeout = _address(url), timeout
        self._key = _key(key_from)
        self._reached = False
        self._keys: dict[str, str] = {}  # request key -> this server's name for the key; "" if it refuses the key
        handlers: list[Any] = [_NoRedirects()]
        if urllib.parse.urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1"):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)
        self.model = model or self._only_model()

    def chat(self, turns: Turns, most: int, tools: Tools = None, thinking: str | None = None, **how: float) -> Reply:
        """The answer to a conversation, in at most `most` tokens; the server applies its own chat template. `how` may
        have temperature, top_p and seed; by default, the answer is greedy."""
        more = {_LIMIT: most, "logprobs": True, "top_logprobs": 1, **how}
        answer = self._ask("chat/completions", {**_of_chat(turns, tools, thinking), **more})
        return _reply(answer, mapping(answer["choices"][0].get("message")).get("content"))

    def complete(self, prompt: str | list[int], most: int) -> Reply:
        """The greedy continuation of a text (or of token ids, if the server takes them), without a chat template."""
        answer = self._ask("completions", {"prompt": prompt, _LIMIT: most, "logprobs": 1})
        return _reply(answer, answer["choices"][0].get("text"))

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        complete = {"model": self.model, "temperature": 0, **body}
        keys = self._keys
        while True:
            sent = {name: value for key, value in complete.items() if (name := keys.get(key, key))}
            try:
                answer = self.post(path, sent)
                break
            except EndpointError as error:
                other = {_LIMIT: _NEWER_LIMIT} if _NEWER_LIMIT in str(error) else _WITHOUT_LOGPROBS
                if error.status not in (400, 422) or other.items() <= keys.items():
                    raise
                keys = keys | other
        self._keys = keys
        choices = answer.get("choices")
        if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
            raise EndpointError(f"--url {self.url}: {path} answered without `choices`; is it OpenAI-compatible?")
        return answer

    def chat_tokens(self, turns: Turns, tools: Tools = None, thinking: str | None = None) -> list[int] | None:
        """The server's token ids of a conversation's prompt; None if it has no API call that returns them."""
        body = {**_of_chat(turns, tools, thinking), "add_generation_prompt": True}
        answer = self._tokens({"model": self.model, **body})  # vLLM's form
        if answer is not None:
            return answer
        text = self._beside("apply-template", body).get("prompt")  # llama.cpp's form
        return self.text_tokens(text, special=True) if isinstance(text, str) else None

    def text_tokens(self, text: str, *, special: bool = False) -> list[int] | None:
        """The server's token ids of a text; None if it has no API call that returns them. With `special`, the server
        adds special tokens as it does for prompts, such as a BOS token."""
        vllm = {"model": self.model, "prompt": text, "add_special_tokens": special}
        return self._tokens({"content": text, "add_special": special, **vllm})  # each server reads its own keys

    def _tokens(self, body: dict[str, Any]) -> list[int] | None:
        answer = self._beside("tokenize", body).get("tokens")
        complete = isinstance(answer, list) and answer and all(isinstance(token, int) for token in answer)
        return answer if complete else None

    def _beside(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to an API call outside of /v1, such as vLLM's /tokenize; {} if the server lacks this call."""
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
            if not error.is_refusal:
                raise
            base = self.url.partition("/v1/")[0].removesuffix("/v1") + "/v1"
            raise EndpointError(f"{error}; name a model with --model, or give --url {base}", error.status) from None
        names = [str(one.get("id")) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        if len(names) != 1:
            models = ", ".join(map(self._shown, names[:8])) or "no model"
            raise UserError(f"--url {self.url}: the server has {models}; name a model with --model")
        return names[0]

    def post(self, path: str, body: dict[str, Any] | None = None, *, root: bool = False) -> dict[str, Any]:
        """Send a request and return the JSON object in the answer. Without a body, the request is a GET. With `root`,
        the path is outside of /v1."""
        at = f"{self.url.removesuffix('/v1') if root else self.url}/{path}"
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "accel-sft"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        pause, left = PAUSE_SECONDS, RETRIES
        while True:
            try:
                request = urllib.request.Request(at, data, headers)
                with self._opener.open(request, timeout=self.timeout) as response:
                    content = response.read()
                self._reached = True
                break
            except urllib.error.HTTPError as error:
                self._reached = True
                if error.code not in _BUSY or not left:
                    raise self._refusal(at, error) from None
                with contextlib.suppress(ValueError):  # Retry-After may also be a date
                    pause = max(pause, float(error.headers.get("Retry-After", "0")))
            except (ValueError, OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                if isinstance(reason, TimeoutError):
                    advice = "the server is too slow or stuck; set a longer --timeout"
                    raise EndpointError(f"{at}: no answer within {self.timeout:g} s; {advice}") from None
                if not left or not self._reached:
                    cause = one_line(str(reason) or type(reason).__name__, LONGEST_ERROR)
                    raise EndpointError(f"{at}: cannot be reached ({cause}); is the server running there?") from None
            time.sleep(min(pause, LONGEST_PAUSE))
            pause, left = pause * 2, left - 1
        with contextlib.suppress(ValueError):
            if isinstance(answer := json.loads(content), dict):
                return answer
        text = self._shown(content.decode(errors="replace"))
        raise EndpointError(f"{at}: the server answered {text}; is it OpenAI-compatible?")

    def _shown(self, text: str) -> str:
        """A server's text as one line, with the key masked."""
        return one_line(text.replace(self._key, "***") if self._key else text, LONGEST_ERROR)

    def _refusal(self, at: str, error: urllib.error.HTTPError) -> EndpointError:
        try:
            with error:
                message = _message(error.read().decode(errors="replace")) or str(error.reason)
        except (OSError, http.client.HTTPException):
            message = str(error.reason)
        fix = ""
        if 300 <= error.code < 400:
            fix = f"; it redirects to {error.headers.get('Location')}; give that address with --url"
        if error.code in (401, 403):
            fix = f"; export the server's key as {KEY}, or give --key-from NAME"
        return EndpointError(
            f"{at}: the server answered {error.code} ({self._shown(message)}){self._shown(fix)}", error.code
        )

    def call_all(self, what: str, call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The results of `call` for all items, AT_ONCE of them at a time. A line says now and then how many are done.
        After an error or an interrupt, no further call starts."""
        threads = ThreadPoolExecutor(AT_ONCE)
        futures = [threads.submit(call, item) for item in items]
        try:
            with waiting(lambda: f"{what}: {sum(future.done() for future in futures):,} of {len(items):,}"):
                return [future.result() for future in futures]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _of_chat(turns: Turns, tools: Tools, thinking: str | None) -> dict[str, Any]:
    """The part of a request that decides the prompt. The API takes the arguments of tool calls as JSON text."""
    messages = copy.deepcopy(turns)
    for call in itertools.chain.from_iterable(turn.get("tool_calls", ()) for turn in messages):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    body = {"messages": messages, **({"tools": tools} if tools else {})}
    return body | ({"chat_template_kwargs": {"enable_thinking": False}} if thinking == "off" else {})


def _reply(answer: dict[str, Any], content: Any) -> Reply:
    choice, usage = answer["choices"][0], mapping(answer.get("usage"))
    counts = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
    prompt, written = (count if isinstance(count, int) else None for count in counts)
    if not isinstance(content, str | None):
        raise EndpointError("the server's answer is a list of parts; only answers that are text can be read")
    # half a surrogate pair is replaced: it cannot be written to a file
    text = (content or "").encode(errors="replace").decode()
    return Reply(text, str(choice.get("finish_reason")), prompt, written, _logprobs(mapping(choice.get("logprobs"))))


def _logprobs(given: dict[str, Any]) -> list[tuple[str, float]]:
    """Text and log-probability of each token; [] if `given` has an unknown form, or a log-probability is not finite."""
    try:
        if given.get("content"):  # the form of chats, and of llama.cpp's completions
            pairs = [(str(one["token"]), float(one["logprob"])) for one in given["content"]]
        else:
            pairs = [*zip(map(str, given["tokens"]), map(float, given["token_logprobs"]), strict=False)]
    except (KeyError, TypeError, ValueError, OverflowError):
        return []
    return pairs if all(math.isfinite(value) for _, value in pairs) else []


def _address(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        bad = parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment
        _ = parts.port
    except ValueError:
        bad = True
    if bad:
        raise UserError(f"--url {one_line(url)}: expected an address such as http://127.0.0.1:8000/v1")
    if "@" in parts.netloc:
        raise UserError(f"--url: programs may show it, so put no key or password in it; export the key as {KEY}")
    return url.rstrip("/")


def _key(named: str | None) -> str | None:
    key = os.environ.get(named or KEY)
    if named and not key:
        name = named if named.isidentifier() else "***"  # the user may have given the key itself
        raise UserError(f"--key-from {name}: this environment variable is not set; export it, or omit the option")
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(f"{named or KEY}: the key has characters that an HTTP header cannot hold; is it a single line?")
    return key or None


def _message(body: str) -> str:
    """The message in the body of a server's error; the body itself if it is not JSON."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body.strip()
    while isinstance(answer, dict):
        answer = next((answer[key] for key in ("error", "message", "detail") if key in answer), None)
    return str(answer or "")
