"""The memory page of a fleet's door, in a real browser: its replicas, as they come to be."""

import asyncio
import shutil
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn

from fleet.replicas import Fleet, RoundRobin, door, fleet_of
from quire.config import ServerConfig

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the path")

SHORT_MS = 20_000
KEY, TENANTS_KEY = "sesame", "a-tenants"
ENGINES = ("memory", "sequences", "tiers", "time", "budget")  # sections of one engine's page


@pytest.fixture
def served() -> Iterator[tuple[str, Fleet]]:
    """A door with keys, at a port that was free, in a thread with its event loop."""
    listening, is_up = socket.create_server(("127.0.0.1", 0)), threading.Event()
    there: list[tuple[Fleet, uvicorn.Server]] = []

    async def serve() -> None:
        config = ServerConfig(api_key=(TENANTS_KEY,), admin_api_key=(KEY,))
        async with fleet_of("a", "b", placement=RoundRobin()) as fleet, door(fleet, config) as own:
            options = uvicorn.Config(own.app, log_config=None, timeout_graceful_shutdown=2)
            server = uvicorn.Server(options)
            there.append((fleet, server))
            is_up.set()
            await server.serve([listening])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_up.wait(60)
    fleet, server = there[0]
    yield f"http://127.0.0.1:{listening.getsockname()[1]}", fleet
    server.should_exit = True
    thread.join(60)
    listening.close()


def test_the_replicas_are_seen(served: tuple[str, Fleet]) -> None:
    from playwright.sync_api import sync_playwright

    url, fleet = served
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{url}/")

        def until(what: str) -> None:
            page.wait_for_function(f"() => {{ {TABLE} return {what}; }}", timeout=SHORT_MS)

        def enter(key: str) -> None:
            page.wait_for_selector("#key:not([hidden])", timeout=SHORT_MS)
            page.fill("#key-text", key)
            page.keyboard.press("Enter")

        enter(TENANTS_KEY)
        page.wait_for_function(
            "() => document.querySelector('#link').textContent.includes('admin')", timeout=SHORT_MS
        )
        enter(KEY)
        page.wait_for_selector(".link.live", timeout=SHORT_MS)
        until("rows.length === 2 && rows.every((row) => row[1] === 'up' && row[2] === '0')")
        assert page.inner_text("#fleet-words").startswith("2 of 2 replicas up")
        assert page.inner_text("#about") == "demo"
        for section in ENGINES:
            assert not page.is_visible(f"#{section}"), section
        page.fill("#max-tokens", "12")
        for _ in range(4):  # the second two find what the first two have left
            page.click("#one")
            page.wait_for_function(
                "() => document.querySelector('#stop').disabled", timeout=SHORT_MS
            )
        until("rows.every((row) => count(row[8]) > 0 && count(row[9]) > 0)")
        fleet.replicas[1].mode = "dead"
        until("rows[1][1] === 'lost: replica b was killed' && rows[0][1] === 'up'")
        fleet.replicas[1].mode = "works"
        until("rows[1][1] === 'up'")
        page.set_viewport_size({"width": 390, "height": 800})
        wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not page.evaluate(wide), "the page is wider than a phone"
        assert not errors
        browser.close()


TABLE = """
const count = (text) => Number(text.split(" / ")[0].replace(/\\D/g, ""));
const rows = [...document.querySelectorAll("#replicas tr")]
  .map((row) => [...row.children].map((cell) => cell.textContent));
"""
