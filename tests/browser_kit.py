"""A real browser that a test uses as a person does: a pointer, a wheel, keys, and what then stands on the screen.

Chromium is spoken to through a pair of pipes (`--remote-debugging-pipe`: the DevTools protocol, one JSON document up to
each zero byte), so nothing but the browser itself is needed. Its events are trusted ones: they go to whatever lies under
the pointer, or has the focus.
"""

from __future__ import annotations

import base64
import json
import select
import shutil
import struct
import subprocess
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 30.0
Pixel = tuple[int, int, int]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--force-device-scale-factor=1",
]  # fmt: skip
# Which key a person presses: the name that the page sees, its code, its number, and what it types.
KEYS = {"ArrowLeft": ("ArrowLeft", 37, ""), "ArrowRight": ("ArrowRight", 39, ""), "Home": ("Home", 36, "")}
KEYS |= {"+": ("Equal", 187, "+"), "-": ("Minus", 189, "-"), "Tab": ("Tab", 9, "")}


class Browser:
    """One window with one page; a context manager, so that it is closed."""

    def __init__(self, profile: Path, *, width: int = 1200, height: int = 600, dark: bool = False) -> None:
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        # The protocol is on the descriptors 3 and 4; what the browser says besides goes nowhere.
        shell = 'exec "$@" --remote-debugging-pipe about:blank 3<&0 4>&1 </dev/null >/dev/null 2>&1'
        self._process = subprocess.Popen(
            ["sh", "-c", shell, "sh", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._number, self._read, self._session = 0, b"", ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._session = ""
            self._call("Browser.close")
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.communicate()

    def open(self, url: str, *, ready: str) -> None:
        """Loads a page and waits until the expression is true in it."""
        self._call("Page.navigate", url=url)
        deadline = time.monotonic() + PATIENCE_S
        while not self.value(ready):
            assert time.monotonic() < deadline, f"{url} never became ready"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """Of an expression in the page."""
        told = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Moves the pointer there."""
        self._mouse("mouseMoved", x, y)

    def click(self, x: float, y: float, *, times: int = 1) -> None:
        """Once, or twice in a row."""
        self.point(x, y)
        for number in range(1, times + 1):
            for what in ("mousePressed", "mouseReleased"):
                self._mouse(what, x, y, button="left", clickCount=number)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Presses, moves and lets go."""
        self.point(*start)
        self._mouse("mousePressed", *start, button="left", clickCount=1)
        for part in (0.5, 1.0):
            x, y = (a + (b - a) * part for a, b in zip(start, end, strict=True))
            self._mouse("mouseMoved", x, y, button="left", buttons=1)
        self._mouse("mouseReleased", *end, button="left", clickCount=1)

    def wheel(self, x: float, y: float, by: float) -> None:
        """One notch; upwards (away from the person) is negative."""
        self._mouse("mouseWheel", x, y, deltaX=0, deltaY=by)

    def press(self, key: str) -> None:
        """A key, wherever the focus is."""
        code, number, text = KEYS[key]
        known = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        self._call("Input.dispatchKeyEvent", type="keyDown", **known, **({"text": text} if text else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", **known)

    def click_on(self, selector: str) -> None:
        """In the middle of what the selector finds."""
        box = self.box(selector)
        self.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    def box(self, selector: str) -> dict[str, float]:
        """Where it is on the screen."""
        return self.value(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")

    def screen(self, x: float, y: float, width: float, height: float) -> list[list[Pixel]]:
        """What stands there, row by row."""
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        told = self._call("Page.captureScreenshot", format="png", clip=clip)
        return pixels(base64.b64decode(told["data"]))

    def _mouse(self, what: str, x: float, y: float, **more: Any) -> None:
        self._call("Input.dispatchMouseEvent", type=what, x=x, y=y, **more)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        text = json.dumps(message | ({"sessionId": self._session} if self._session else {}))
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\0")
        self._process.stdin.flush()
        while True:
            answer = self._answer()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _answer(self) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        while b"\0" not in self._read:
            assert select.select([stream], [], [], PATIENCE_S)[0], "the browser does not answer"
            got = stream.read1(1 << 16)  # type: ignore[attr-defined]
            assert got, "the browser is gone"
            self._read += got
        text, self._read = self._read.split(b"\0", 1)
        return json.loads(text)


def pixels(png: bytes) -> list[list[Pixel]]:
    """Of a PNG with 8 bits for each of three or four colours, not interlaced (RFC 2083)."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert (depth, kind) in {(8, 2), (8, 6)}
    size = 3 if kind == 2 else 4
    data, at = b"", 8
    while at < len(png):
        length, name = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + length] if name == b"IDAT" else b""
        at += 12 + length
    raw, stride = zlib.decompress(data), width * size
    rows, before = [], bytes(stride)
    for row in range(height):
        start = row * (stride + 1)
        before = _unfiltered(raw[start], raw[start + 1 : start + 1 + stride], before, size)
        rows.append([(before[i], before[i + 1], before[i + 2]) for i in range(0, stride, size)])
    return rows


def _unfiltered(kind: int, line: bytes, above: bytes, size: int) -> bytes:
    done = bytearray(line)
    for i, byte in enumerate(line):
        left, up, corner = (done[i - size] if i >= size else 0), above[i], (above[i - size] if i >= size else 0)
        done[i] = (byte + (0, left, up, (left + up) // 2, _nearest(left, up, corner))[kind]) & 255
    return bytes(done)


def _nearest(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda one: abs(guess - one))


def rgb(text: str) -> Pixel:
    """Of `#4c8dc9` or `rgb(76, 141, 201)`."""
    if text.startswith("#"):
        return (int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16))
    red, green, blue = (int(part) for part in text[text.index("(") + 1 : -1].split(",")[:3])
    return (red, green, blue)


def contrast(one: Pixel, other: Pixel) -> float:
    """How much a text stands out; 4.5 is what a person needs to read it (WCAG 2.2, 1.4.3)."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: Sequence[int]) -> float:
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
