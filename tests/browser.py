"""A headless Chromium that tests drive by its debugging protocol, and what every page has to hold."""

from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp

from conftest import need
from pictures import find_chromium

CHROMIUM = find_chromium()
PHONE, DESK = 390, 1200
"""Widths of windows in pixels."""

WIDE = """(() => {
  const room = document.documentElement.clientWidth;
  const scrolls = one => {
    for (; one && one !== document.body; one = one.parentElement)
      if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(one).overflowX)) return true;
    return false;
  };
  if (document.documentElement.scrollWidth <= room) return [];
  return [...document.body.querySelectorAll("*")]
    .filter(one => one.getBoundingClientRect().right > room + 1 && !scrolls(one.parentElement))
    .map(one => one.tagName + "." + one.className + ": " + (one.textContent || "").trim().slice(0, 60)).slice(0, 5)
    .concat(["the page is " + document.documentElement.scrollWidth + " wide"]);
})()"""
"""Script that returns what sticks out of the window, if the page can be scrolled sideways."""
AXE = """axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations
  .filter(one => ["serious", "critical"].includes(one.impact))
  .map(one => one.id + ": " + one.nodes.length + " times, as " + one.nodes[0].html.slice(0, 120) + " " +
    one.nodes[0].any.concat(one.nodes[0].all).map(check => check.message).join("; ").slice(0, 160)))"""
"""Script that returns the serious faults that axe-core finds."""


class Browser:
    """A headless Chromium that shows one page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._count = socket, 0
        self._axe = (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._count:
                assert "result" in message, message
                return message["result"]  # type: ignore[no-any-return]

    async def evaluate(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait_for(self, expression: str) -> None:
        for _ in range(300):
            if await self.evaluate(expression):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true: {expression}")

    async def set_window(self, width: int, scheme: str = "light", height: int = 900) -> None:
        """Set the width of the window in pixels, and whether the reader prefers light or dark."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def show(self, address: str) -> None:
        """Show a page, and wait until it is loaded."""
        await self.call("Page.navigate", url="about:blank")
        await self.call("Page.navigate", url=address)
        await self.wait_for(f"document.readyState === 'complete' && location.href === {address!r}")

    async def find_faults(self) -> list[str]:
        """Return what sticks out of the window, and the serious faults that axe-core finds."""
        await self.evaluate(self._axe + "; 0")
        return [*await self.evaluate(WIDE), *await self.evaluate(AXE)]

    async def take_picture(self, path: Path) -> None:
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def open_browser(folder: Path) -> AsyncIterator[Browser]:
    """Start a Chromium that has its files in a folder, and end it behind the body."""
    if CHROMIUM is None:
        need("chromium", "no Chromium is installed")
    profile = folder / "profile"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic",
               "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ready = profile / "DevToolsActivePort"
        for _ in range(600):
            if ready.exists() and ready.read_text().count("\n"):
                break
            await asyncio.sleep(0.1)
        port = ready.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                page = next(item for item in await response.json() if item["type"] == "page")
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Browser(socket)
    finally:
        process.kill()
        process.wait()
