"""A headless Chromium that is spoken to over a pipe (its debugging protocol), so nothing has to be installed for it.

Keeps what went wrong in a page: errors on its console, and addresses it asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 60.0


class Browser:
    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._number = 0
        self._unread = b""
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []

    def ask(self, method: str, **parameters: Any) -> Any:
        """A call of the protocol; events that come meanwhile are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path: Path, *, width: int = 1280, height: int = 1600, dark: bool = False) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self.ask("Page.navigate", url=path.absolute().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def point_at(self, selector: str, *, across: float = 0.5) -> None:
        """Move the pointer to the first element of that kind, which is scrolled into view."""
        box = self.value(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); "
            "one.scrollIntoView({block: 'center', behavior: 'instant'}); const box = one.getBoundingClientRect(); "
            "return [box.left, box.top, box.width, box.height]; })()"
        )
        # Scrolling hides what is shown, with an event that comes with the next frame.
        self.ask(
            "Runtime.evaluate",
            expression="new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))",
            awaitPromise=True,
        )
        x, y = box[0] + across * box[2], box[1] + box[3] / 2
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            received = os.read(self._read, 2**20)
            assert received, "the browser has ended"
            self._unread += received
        line, self._unread = self._unread.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" or method == "Log.entryAdded":
            self.errors.append(str(parameters.get("entry", parameters)))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    commands, write = os.pipe()
    read, replies = os.pipe()
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
    ]
    # The browser reads from 3 and writes to 4, which may be anything here: a process in between moves ours there.
    move = (
        f"import fcntl, os, sys; far = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in ({commands}, {replies})]; "
        "os.dup2(far[0], 3); os.dup2(far[1], 4); os.closerange(5, 100); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", move, CHROMIUM, *flags, "about:blank"],
        pass_fds=(commands, replies),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for descriptor in (commands, replies):
        os.close(descriptor)
    try:
        yield Browser(write, read)
    finally:
        for descriptor in (write, read):
            os.close(descriptor)
        process.kill()
        process.wait()
