"""A headless Chromium (Debian's package), driven over the Chrome DevTools Protocol."""

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.waiting import PATIENCE_S, until

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")


class Tab:
    """One page of a browser; `problems` are errors and warnings of its console."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self.problems: list[str] = []

    async def listen(self) -> None:
        """Reads what the browser sends until it closes the connection."""
        async for message in self._socket:
            content = message.json()
            if "id" in content:
                self._replies.pop(content["id"]).set_result(content)
            parameters = content.get("params", {})
            match content.get("method"):
                case "Runtime.exceptionThrown":
                    self.problems.append(str(parameters["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                    self.problems.append(str(parameters["args"]))
                case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                    self.problems.append(str(parameters["entry"]))

    async def send(self, method: str, **parameters: Any) -> Any:
        """The result of a command of the protocol."""
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_S):
            content = await reply
        assert "error" not in content, content
        return content["result"]

    async def open(self, url: str) -> None:
        """Loads a page and waits until its document is complete."""
        for domain in ("Runtime", "Log", "Page"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)
        await self.shows(f"document.readyState === 'complete' && location.href.startsWith('{url}')")

    async def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def shows(self, expression: str) -> None:
        """Waits until an expression is true."""

        async def is_true() -> bool:
            return bool(await self.value(expression))

        await until(is_true)

    async def press(self, key: str, *, control: bool = False) -> None:
        """Presses and releases a key such as Tab or Enter."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        fields: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        fields["modifiers"] = 2 if control else 0
        await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def write(self, text: str) -> None:
        """Types a text where the focus is."""
        await self.send("Input.insertText", text=text)

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Changes the size in CSS pixels, and the color scheme."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, file: Path) -> None:
        """Writes a screenshot of the whole page (PNG)."""
        shot = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def running_browser(profile: Path) -> AsyncIterator[Tab]:
    """An empty page of a new browser with its profile in a folder."""
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *options,
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    port_file = profile / "DevToolsActivePort"
    try:
        await until(lambda: port_file.exists() and len(port_file.read_text().splitlines()) == 2)
        base = f"http://127.0.0.1:{port_file.read_text().split()[0]}"
        async with aiohttp.ClientSession() as client:

            async def pages() -> list[Any]:
                async with client.get(base + "/json") as response:
                    return [page for page in await response.json() if page["type"] == "page"]

            await until(pages)
            [page] = await pages()
            async with client.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                yield tab
                listening.cancel()
    finally:
        process.terminate()
        await process.wait()
