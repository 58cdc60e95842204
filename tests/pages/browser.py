"""A headless Chromium, driven by the DevTools protocol over its pipe: JSON messages ended by a zero byte."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 30.0  # for an answer
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)
# The pipe's ends become 3 and 4, where Chromium looks for them.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

# The lowest contrast of an element with text of its own: color against the nearest background, by WCAG 2.2.
CONTRAST = """
(() => {
  const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return m.length < 4 ? [...m, 1] : m; };
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.map(v => linear(v / 255));
                       return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c[3] > 0) return c;
    }
    return [255, 255, 255, 1];
  };
  let worst = [99, ''];
  for (const e of document.body.querySelectorAll('*')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!e.getClientRects().length || !own) continue;
    const style = getComputedStyle(e);
    const front = parse(e instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [front, behind(e)].map(c => light(c.slice(0, 3)));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < worst[0]) worst = [contrast, e.textContent.slice(0, 60)];
  }
  return worst;
})()
"""


def find() -> str | None:
    """The path of a Chromium."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. `complaints`: of the console, whoever wrote them.

    `requests`: addresses asked for, by the browser's own names; `blocked`: those that the page's policy
    stopped.
    """

    def __init__(self, program: str) -> None:
        self.requests: dict[str, str] = {}
        self.blocked: list[str] = []
        self.complaints: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="agro-chromium-")
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-IS",
                "-c",
                LAUNCH,
                str(theirs_in),
                str(theirs_out),
                program,
                *OPTIONS,
                f"--user-data-dir={self._profile}",
            ],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._rest, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(10)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command; events that come before it are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return dict(found["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], SECONDS)
            if not ready or not (part := os.read(self._in, 1 << 16)):
                raise RuntimeError(f"{self._process.args}: no answer in {SECONDS:g} s, or it ended")
            self._rest += part
        text, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests[about["requestId"]] = about["request"]["url"]
        elif event == "Network.loadingFailed" and about.get("blockedReason") == "csp":
            self.blocked.append(self.requests.pop(about["requestId"]))
        elif event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(about)[:500])
        elif event == "Page.loadEventFired":
            self.loaded = True

    def open(self, page: Path | str, *, scheme: str = "light", width: int = 1400) -> None:
        """Load a file, or an address, into a window of this width under this color scheme."""
        self.requests.clear()
        self.complaints.clear()
        self.blocked.clear()
        self.loaded = False
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.wait()

    def wait(self) -> None:
        """Until a page is loaded."""
        while not self.loaded:
            self._read()

    def press(self, key: str) -> None:
        """A key that leads to another page."""
        self.loaded = False
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.wait()

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script:.80}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def picture(self, path: Path, area: dict[str, float] | None = None) -> None:
        """The whole page, or an area of it, as a PNG."""
        clip = {} if area is None else {"clip": area}
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, **clip)
        path.write_bytes(base64.b64decode(found["data"]))
