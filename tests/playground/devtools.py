"""A tab of a headless Chromium, driven over the DevTools protocol: mouse and touch events, pictures."""

import base64
import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


class Tab:
    """One page. `console` has what it complained about, `asked` the addresses that it asked for."""

    def __init__(self, process: subprocess.Popen, send: int, receive: int):
        self.process, self.out, self.into, self.rest, self.last = process, send, receive, b"", 0
        self.session: str | None = None
        self.console: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self.last += 1
        message = {"id": self.last, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self.last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(
        self, page: Path, width: int = 1400, height: int = 1000, dark: bool = False, touch: bool = False
    ):
        """Open a file in a window of this size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.value("try { localStorage.clear() } catch {}")  # a site keeps the colors chosen before
        self.console.clear()
        self.asked.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")
        self.settle()

    def value(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise what comes of it."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 20):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, f"not true within {seconds} s: {expression}"
            time.sleep(0.05)

    def settle(self):
        """Wait until what was asked to be drawn has been drawn."""
        self.value(
            "new Promise((done) => requestAnimationFrame("
            "() => requestAnimationFrame(() => setTimeout(done))))"
        )

    def center(self, selector: str) -> tuple[float, float]:
        """Where the middle of an element is, once it has been scrolled to."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.value(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({found}.getBoundingClientRect())")
        return box[0], box[1]

    def drag(self, selector: str, dx: float, dy: float, finger: bool = False):
        """Drag an element with the mouse or a finger, in eight moves."""
        x, y = self.center(selector)
        places = [(x + dx * i / 8, y + dy * i / 8) for i in range(9)]
        if finger:
            for kind, (px, py) in zip(["touchStart", *["touchMove"] * 8], places, strict=True):
                self.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": px, "y": py}])
            self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        else:
            kinds = ["mousePressed", *["mouseMoved"] * 8]
            for kind, (px, py) in zip(kinds, places, strict=True):
                self._mouse(kind, px, py)
            self._mouse("mouseReleased", *places[-1])
        self.settle()

    def click(self, selector: str):
        """Press an element with the mouse."""
        x, y = self.center(selector)
        self._mouse("mousePressed", x, y)
        self._mouse("mouseReleased", x, y)
        self.settle()

    def press(self, key: str, times: int = 1):
        """Press a key, such as ArrowLeft."""
        codes = {
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
            "Home": 36,
            "End": 35,
            "Tab": 9,
        }
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                code = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
                self.call("Input.dispatchKeyEvent", type=kind, **code)
        self.settle()

    def picture(self, path: Path):
        """A picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _mouse(self, kind: str, x: float, y: float):
        down = 0 if kind == "mouseReleased" else 1
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=down, clickCount=1)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.into], [], [], 60)
            part = os.read(self.into, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError(f"Chromium does not answer; it ended with {self.process.poll()}")
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        event = json.loads(message)
        self._note(event.get("method"), event.get("params", {}))
        return event

    def _note(self, method: str | None, event: dict[str, Any]):
        if method == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(a.get("value", a.get("description"))) for a in event["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(event["exceptionDetails"]["text"])
        elif method == "Log.entryAdded":
            self.console.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(event["request"]["url"])


@contextlib.contextmanager
def tab(chromium: ModuleType, folder: Path) -> Iterator[Tab]:
    """Start Chromium, with tests/report/chromium.py's flags, and end it with all its children."""
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()
    # The browser reads its file 3 and writes its file 4. A shell puts them there: no code runs between
    # fork and exec.
    script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    command = [
        chromium.browser(),
        *chromium.FLAGS,
        "--remote-debugging-pipe",
        f"--user-data-dir={folder / 'profile'}",
    ]
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *command],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        opened = Tab(process, send, receive)
        yield opened
        opened.session = None
        opened.call("Browser.close")
        process.wait(timeout=20)
    finally:
        process.kill()
        process.wait()
        os.close(send)
        os.close(receive)


def main():
    """Pictures of pages, for looking at: FOLDER PAGE..."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
    import chromium

    folder = Path(sys.argv[1])
    with tab(chromium, folder) as opened:
        for name in sys.argv[2:]:
            page = Path(name)
            for width in (1400, 390):
                for dark in (False, True):
                    opened.open(page, width, dark=dark, touch=width < 500)
                    opened.picture(folder / f"{page.stem}-{width}-{'dark' if dark else 'light'}.png")
                    print(
                        page.stem,
                        width,
                        dark,
                        opened.console,
                        opened.value("document.documentElement.scrollWidth"),
                    )


if __name__ == "__main__":
    main()
