"""Headless Chromium, driven over a pipe with its own protocol: no driver, no library, no open port.

Must not know what page is looked at. Protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_S = 90.0  # on a machine that has other work to do


class Browser:
    """One page. events: what it was told of by the protocol's domains, as (method, params)."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        their_input, self._input = os.pipe()
        self._output, their_output = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--remote-debugging-pipe", "--disable-background-networking", f"--user-data-dir={profile}"]
        # It reads commands from descriptor 3 and answers on 4.
        script = f'exec "$0" "$@" 3<&{their_input} 4>&{their_output}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *options, "about:blank"],
            pass_fds=(their_input, their_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_input)
        os.close(their_output)
        self._id, self._rest, self._session = 0, b"", ""
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._input, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._id:
                assert "error" not in answer, answer
                return answer["result"]
            if "method" in answer:
                self.events.append((answer["method"], answer["params"]))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 30) -> Any:
        """Waits for an expression to be true."""
        deadline = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, f"it never became true: {expression}"
            time.sleep(0.05)
        return value

    def resize(self, width: int, height: int, *, scheme: str = "light") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> str:
        """A PNG of the whole page, in base64."""
        return self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]

    def complaints(self) -> list[str]:
        """Errors of scripts, and what the log and the console were told."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(params)[:500] for method, params in self.events if method in kinds]

    def requested(self) -> list[str]:
        """Addresses that were asked for."""
        return [p["request"]["url"] for method, p in self.events if method == "Network.requestWillBeSent"]

    def close(self) -> None:
        self._session = ""
        self.call("Browser.close")
        self._process.wait(START_S)
        os.close(self._input)
        os.close(self._output)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._output], [], [], START_S)
            assert ready, "the browser does not answer"
            data = os.read(self._output, 1 << 16)
            assert data, "the browser is gone"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
