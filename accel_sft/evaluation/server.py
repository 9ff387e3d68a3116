"""A program on this machine that answers prompts over HTTP: started, waited for, asked in token ids, and ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.data.chat import Encoded
from accel_sft.io.terminal import terminal

START_SECONDS = 1800.0
"""A large model is read, compiled and captured in minutes."""
TELL_SECONDS = 30.0
"""Between two lines that say how far it is."""
LAST_LINES, LONGEST_LINE = 10, 400
"""Of the log, in an error."""

_UNPROXIED = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know this machine's ports


class Server(contextlib.AbstractContextManager["Server"]):
    """A server of completions, ready inside the block and gone after it, even if this process is killed.

    Entering raises UserError if the program ends, or is not ready in time.

    Args:
        words: its command line, which names `port` on 127.0.0.1.
        environment: its variables.
        log: what it prints is appended to it; None: a temporary file, kept if the block raises.
    """

    def __init__(
        self, words: Sequence[str], port: int, environment: Mapping[str, str], log: Path | None = None
    ) -> None:
        self._words, self._environment = list(words), dict(environment)
        self._name, self._url = Path(words[0]).name, f"http://127.0.0.1:{port}"
        self._temporary = log is None
        if log is None:
            handle, name = tempfile.mkstemp(prefix=f"accel-sft-{self._name}-", suffix=".log")
            os.close(handle)
            log = Path(name)
        self._log, self._earlier = log, log.stat().st_size if log.exists() else 0

    def __enter__(self) -> Server:
        self._print(f"starting {self._words[0]}; its log: {self._log}")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "accel_sft.evaluation.supervise", *self._words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # an interrupt at the terminal is for this process, which then ends it
            )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if kind is None and self._temporary:
            self._log.unlink()

    def _stop(self) -> None:
        self._process.stdin.close()  # what the keeper waits for
        self._process.wait()

    def _wait(self) -> None:
        started = told = time.monotonic()
        while True:
            if self._process.poll() is not None:
                raise self._failure(f"ended with status {self._process.returncode} before it was ready")
            with contextlib.suppress(OSError, http.client.HTTPException):  # nobody listens yet, or it is not ready
                _UNPROXIED.open(f"{self._url}/health", timeout=TELL_SECONDS).close()
                break
            now = time.monotonic()
            if now - started > START_SECONDS:
                raise self._failure(f"was not ready after {START_SECONDS:.0f} s")
            if now - told > TELL_SECONDS:
                self._print(f"not ready after {now - started:.0f} s")
                told = now
            time.sleep(0.2)
        self._print(f"ready after {time.monotonic() - started:.0f} s")

    def answers(
        self, pool: ThreadPoolExecutor, request: dict[str, Any], examples: Sequence[Encoded]
    ) -> tuple[list[list[int]], float]:
        """Each example's answer, the token that ended it included, and the seconds all took.

        Args:
            pool: as many questions as it has threads are asked at once. It must outlive this server, whose end makes
                those under way fail.
            request: what is asked of each besides the prompt.
        Raises:
            UserError: a question was refused, or the server ended.
        """
        started = told = time.monotonic()
        asked = [pool.submit(self._ask, request, example) for example in examples]
        try:
            for done, future in enumerate(as_completed(asked), 1):
                future.result()
                if time.monotonic() - told > TELL_SECONDS:
                    told = time.monotonic()
                    self._print(f"{done} of {len(asked)} answers")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in asked], time.monotonic() - started

    def _ask(self, request: dict[str, Any], example: Encoded) -> list[int]:
        body = json.dumps({**request, "prompt": example.input_ids[: example.prompt_length]}).encode()
        post = urllib.request.Request(f"{self._url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with _UNPROXIED.open(post) as reply:
                token_ids = json.load(reply)["choices"][0]["token_ids"]
        except urllib.error.HTTPError as error:
            raise self._failure(f"answered validation example {example.index} with {_told(error)}") from None
        except (OSError, http.client.HTTPException) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            status = self._process.returncode
            how = f"broke off ({error})" if status is None else f"ended with status {status}"
            raise self._failure(f"{how} while it answered") from None
        except (ValueError, LookupError, TypeError):
            token_ids = None
        if not isinstance(token_ids, list):
            raise self._failure("gave no token ids with its answers, as vLLM does from version 0.10.2 on")
        return token_ids

    def _failure(self, what: str) -> UserError:
        """`what` with the log's last lines, and above them what exceptions said: the cause is often far before."""
        with self._log.open(encoding="utf-8", errors="replace") as log:
            log.seek(self._earlier)
            lines = [line.rstrip()[:LONGEST_LINE] for line in log if line.strip()]
        last = lines[-LAST_LINES:]
        causes = [line for line in lines[:-LAST_LINES] if re.search(r"\b[A-Za-z]+(Error|Exception): ", line)]
        told = [*dict.fromkeys(causes[-LAST_LINES:]), "...", *last] if causes else last
        return UserError("\n    ".join([f"{self._name} {what}; the end of its log, {self._log}:", *told]))

    def _print(self, text: str) -> None:
        print(f"{self._name}: {text}", file=terminal(), flush=True)


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _told(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):  # no JSON, or of another form: shown as it is
        text = str(json.loads(text)["error"]["message"])
    return f"HTTP status {error.code}: {' '.join(text.split())[:LONGEST_LINE]}"
