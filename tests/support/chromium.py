"""Drives a headless Chromium for tests of pages over the pipe of its debugging protocol; nothing else is installed.

See https://chromedevtools.github.io/devtools-protocol/: each message is JSON followed by a zero byte.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

from limits import limit

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --hide-scrollbars --remote-debugging-pipe
"""
_SECONDS = 60


class Page:
    """One page in its own browser. `events` holds what the protocol reported: console, requests, exceptions."""

    def __init__(self, profile: Path, file: Path, *, width: int = 1280, scheme: str = "light") -> None:
        ours, theirs = zip(*(_pipe(reading) for reading in (True, False)), strict=True)
        self._writes, self._reads = ours
        inherit = f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        command = ["bash", "-c", inherit, EXECUTABLE, *_FLAGS.split(), f"--user-data-dir={profile}"]
        self._log = (profile.parent / f"{profile.name}.log").open("wb")
        self._process = subprocess.Popen(command, pass_fds=theirs, stderr=self._log, stdout=self._log)
        for descriptor in theirs:
            os.close(descriptor)
        self._number, self._rest, self._session, self.events = 0, b"", None, []
        try:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.send(f"{domain}.enable")
            self.emulate(scheme=scheme)
            self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            self.send("Page.navigate", url=file.as_uri())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._writes)
        os.close(self._reads)
        self._log.close()

    def send(self, method: str, **parameters):
        """The result of one command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + limit(_SECONDS)
        while True:
            while b"\0" not in self._rest:
                ready, _, _ = select.select([self._reads], [], [], until - time.monotonic())
                assert ready, f"no answer to {method}"
                piece = os.read(self._reads, 1 << 20)
                assert piece, f"Chromium ended: {Path(self._log.name).read_text(errors='replace')[-2000:]}"
                self._rest += piece
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def run(self, script: str):
        """The value of an expression in the page; of a promise, its value once fulfilled."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true in the page."""
        until = time.monotonic() + limit(_SECONDS)
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.05)

    def emulate(self, media: str = "screen", scheme: str = "light") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)

    def choose(self, select: str, value: str) -> None:
        """Choose an option of a list by its value, with the `change` event that a person's choice causes."""
        script = f"(s => {{ s.value = {json.dumps(value)}; s.dispatchEvent(new Event('change', {{bubbles: true}})) }})"
        self.run(f"{script}(document.querySelector({json.dumps(select)}))")

    def click(self, selector: str) -> None:
        """Click on the middle of an element."""
        x, y = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2] }})(document.querySelector({json.dumps(selector)}))"
        )
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def mouse(self, kind: str, x: float, y: float) -> None:
        pressed = {} if kind == "mouseMoved" else {"clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", **pressed)

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def complaints(self) -> list:
        """Errors and warnings on the console, exceptions, and requests for anything but the page itself."""
        self.run("1")  # everything reported before this has now arrived
        found = []
        for event in self.events:
            method, about = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown" or method == "Page.javascriptDialogOpening":
                found.append(about)
            elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
                found.append(about["args"])
            elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                found.append(about["entry"]["text"])
            elif method == "Network.requestWillBeSent" and not about["request"]["url"].startswith(("data:", "about:")):
                found.append(about["request"]["url"])
        return found


def _pipe(ours_writes: bool) -> tuple[int, int]:
    """A pipe: our end and the browser's end, with high numbers, clear of 3 and 4, to which bash redirects them."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends)
    for end in ends:
        os.close(end)
    return high[::-1] if ours_writes else high
