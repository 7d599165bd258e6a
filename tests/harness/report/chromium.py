"""A headless Chromium, driven over its DevTools pipe: no driver, no port, nothing to install but the browser.

With `--remote-debugging-pipe` Chromium reads commands from descriptor 3 and answers on 4, as JSON texts that
end with a zero byte. https://chromedevtools.github.io/devtools-protocol/ has the commands.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
MISSING = "no Chromium is installed: report.html is not looked at in a browser (Debian's package is `chromium`)"


def find_chromium() -> str | None:
    """The path of the browser, if there is one."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Chromium:
    """A running browser with one page. `events` are all that it told, besides answers, since the last `open`."""

    def __init__(self, commands: int, answers: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._commands, self._answers = commands, answers
        self._number, self._session, self._pending = 0, "", b""

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._commands, content) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def attach(self) -> None:
        """Make the page that everything else is about."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, url: str, *, width: int = 360, height: int = 800, scheme: str = "light", media: str = "") -> None:
        """Load a page as a phone or a window of that size shows it."""
        self.events.clear()
        is_phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)
        self.ask("Page.navigate", url="about:blank")  # a fragment alone would not load anything anew
        self.wait_for("Page.loadEventFired")
        self.events.clear()
        error = self.ask("Page.navigate", url=url).get("errorText")
        assert error is None, (url, error)
        self.wait_for("Page.loadEventFired")

    def wait_for(self, method: str) -> None:
        """Wait for an event."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._read())

    def events_of(self, method: str) -> list[dict[str, Any]]:
        """The parameters of every event of that name."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def evaluate(self, expression: str) -> Any:
        """What a JavaScript expression comes to on the page, as a JSON value."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def _read(self, seconds: float = 30.0) -> dict[str, Any]:
        limit = time.monotonic() + seconds
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, limit - time.monotonic()))
            assert ready, "Chromium does not answer"
            chunk = os.read(self._answers, 1 << 20)
            assert chunk, "Chromium has gone"
            self._pending += chunk
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def running(program: str, folder: Path) -> Iterator[Chromium]:
    """A browser with a profile of its own in `folder`; it and all its children are gone afterwards."""
    their_commands, commands = map(_high, os.pipe())
    answers, their_answers = map(_high, os.pipe())
    pid = os.posix_spawn(
        program,
        [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        {**os.environ, "HOME": str(folder)},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, their_commands, 3),
            (os.POSIX_SPAWN_DUP2, their_answers, 4),
            (os.POSIX_SPAWN_OPEN, 1, str(folder / "chromium.log"), os.O_WRONLY | os.O_CREAT, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setpgroup=0,
    )
    try:
        os.close(their_commands)
        os.close(their_answers)
        browser = Chromium(commands, answers)
        browser.attach()
        yield browser
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(commands)
        os.close(answers)


def _high(descriptor: int) -> int:
    """The same file under a number that 3 and 4 do not meet; a child does not inherit it."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return high
