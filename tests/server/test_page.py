"""The memory page in a real browser: what is seen, by keyboard too, in both colour schemes."""

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn

from engine.test_llm import demo
from quire import AsyncLLM
from quire.config import ServerConfig
from quire.server.app import make_app
from server.asking import Slowly

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the path")

SHORT_MS = 20_000
KEY, TENANTS_KEY = "sesame", "a-tenants"


@dataclass
class Seen:
    """A page, and what its browser has said and asked for."""

    page: Any
    url: str
    slowly: Slowly
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """The legend: how many cells are what."""
        counts: dict[str, int] = self.page.evaluate(
            "() => Object.fromEntries([...document.querySelectorAll('#legend tr')].map((row) => "
            "[row.dataset.state, Number(row.children[1].textContent.replace(/\\D/g, ''))]))"
        )
        return counts

    def until(self, what: str) -> None:
        """What JavaScript says becomes true; ``n(state)`` is how many cells are that."""
        self.page.wait_for_function(
            "() => { const n = (state) => Number(document.querySelector("
            "`#legend tr[data-state='${state}']`)?.children[1].textContent.replace(/\\D/g, ''));"
            f"return {what}; }}",
            timeout=SHORT_MS,
        )


@pytest.fixture(scope="module")
def slowly() -> Slowly:
    return Slowly(0.008)


@pytest.fixture(scope="module")
def server(slowly: Slowly) -> Iterator[str]:
    """With keys. At a port that was free."""
    llm = AsyncLLM(
        demo(),
        max_model_len=512,
        kv_cache_memory_bytes="24MB",
        max_num_seqs=8,
        kv_tier=("memory:?size=16MiB",),
        kv_tier_write="always",
        observe=slowly,
    )
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    app = make_app(llm, ServerConfig(api_key=(TENANTS_KEY,), admin_api_key=(KEY,)))
    own = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=lambda: asyncio.run(own.serve([listening])))
    thread.start()
    while not own.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    own.should_exit = True
    thread.join(30)
    llm.close()
    listening.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield own
        own.close()


@pytest.fixture
def seen(server: str, slowly: Slowly, browser: Any) -> Iterator[Seen]:
    """The page, let in with its key."""
    slowly.has_been_seen = False
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    found = Seen(context.new_page(), server, slowly)
    found.page.on("request", lambda request: found.asked.append(request.url))
    found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.page.on(
        "console",
        lambda said: found.complaints.append(said.text) if said.type == "error" else None,
    )
    found.page.goto(f"{server}/")
    found.page.wait_for_selector("#key:not([hidden])", timeout=SHORT_MS)
    assert all("401" in complaint for complaint in found.complaints)
    found.complaints.clear()
    found.page.keyboard.type(KEY)  # it has the focus
    found.page.keyboard.press("Enter")
    found.page.wait_for_selector(".link.live", timeout=SHORT_MS)
    found.until("n('.') > 0")
    yield found
    assert not found.complaints
    assert all(url.startswith(f"{server}/") for url in found.asked), "another host was asked"
    context.close()


def test_cells_appear_are_shared_and_go(seen: Seen) -> None:
    page = seen.page
    assert seen.counts()["h"] == 0
    page.fill("#max-tokens", "350")
    page.click("#two")
    seen.until("n('s') >= 5 && n('h') > n('s') / 2")
    assert page.locator("#rows tr[data-id]").count() == 2
    assert page.inner_text("#how-many") == "2 running, 0 waiting"
    page.wait_for_function(
        "() => document.querySelectorAll('.answer pre')[0].textContent.length > 20",
        timeout=SHORT_MS,
    )
    seen.slowly.has_been_seen = True
    seen.until("n('h') === 0 && n('s') === 0 && n('c') > 5")
    seen.slowly.has_been_seen = False
    assert page.inner_text("#rows").strip() == "Nothing runs."
    assert "found cached" in page.inner_text("#answers")
    page.fill("#max-tokens", "350")
    page.click("#one")
    seen.until("n('h') > 0")
    page.click("#stop")
    seen.until("n('h') === 0")
    assert "stopped" in page.inner_text("#answers")


def test_what_lies_where_is_in_a_table(seen: Seen) -> None:
    page = seen.page
    page.fill("#max-tokens", "40")
    page.click("#one")
    page.wait_for_function(
        "() => /^[1-9]/.test(document.querySelector('#places tr:nth-child(2)')?.children[2]"
        ".textContent ?? '')",
        timeout=SHORT_MS,
    )
    pool, memory = page.locator("#places tr").all()
    assert pool.inner_text().split()[:2] == ["Pool", "ok"]
    assert memory.inner_text().split()[:2] == ["memory", "ok"]
    assert "of 16.0 MiB" in memory.inner_text()
    page.click("#stop")


@pytest.mark.full
def test_all_of_it_works_with_the_keyboard(seen: Seen) -> None:
    page = seen.page
    page.focus("#prompt")
    page.keyboard.press("Tab")  # the number of tokens
    page.keyboard.type("350")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    seen.until("n('h') > 3")
    page.focus("#picture")
    page.keyboard.press("Home")
    assert page.inner_text("#cell").startswith("Cell 0, ")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#cell").startswith("Cell 1, ")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert page.inner_text("#cell").startswith("Cell 1, ")
    for _ in range(200):
        if "held, sequence A" in page.inner_text("#cell"):
            break
        page.keyboard.press("ArrowRight")
    assert "sequence A" in page.inner_text("#cell")
    page.keyboard.press("Enter")
    assert page.get_attribute("#rows button", "aria-pressed") == "true"
    page.keyboard.press("Escape")
    assert page.get_attribute("#rows button", "aria-pressed") == "false"
    page.click("#stop")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert page.input_value("#theme") == ""
    page.focus("#theme")
    page.keyboard.type("dark")
    assert page.get_attribute("html", "data-theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


CONTRASTS = """() => {
  const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const channel = (value) => linear(value / 255);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const contrast = (one, two) => {
    const [low, high] = [luminance(one), luminance(two)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = parse(getComputedStyle(each).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color.slice(0, 3);
    }
    throw new Error("nothing is behind it");
  };
  const poor = [];
  let count = 0;
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
    const text = own.some((node) => node.textContent.trim());
    if (!text || element.closest("noscript, [hidden], .skip, select")) continue;
    count += 1;
    const found = contrast(parse(getComputedStyle(element).color), behind(element));
    if (found < 4.5) poor.push([element.tagName, element.textContent.trim(), found]);
  }
  const probe = document.createElement("i");
  document.body.append(probe);
  const panel = behind(document.getElementById("memory"));
  const hues = Array.from({ length: 26 }, (_, i) => `s${i}`);
  const set = getComputedStyle(probe);
  const different = new Set(hues.map((name) => set.getPropertyValue(`--${name}`)));
  if (different.size < 26) poor.push("two sequences of 26 have one colour");
  for (const name of ["cached", "none", "focus", ...hues]) {
    probe.style.color = `var(--${name})`;
    const found = contrast(parse(getComputedStyle(probe).color), panel);
    if (found < 3) poor.push(`--${name} ${found.toFixed(2)}`);
  }
  return [count, poor];
}"""

# Texts that do not fit into what they are in, or reach beyond the window.
CUT_OFF = """() => [...document.querySelectorAll("body *")].filter((element) => {
  if (element.closest(".hidden, .skip, noscript, textarea, pre, [hidden]")) return false;
  const box = element.getBoundingClientRect();
  const hides = getComputedStyle(element).overflowX !== "visible";
  return box.right > document.documentElement.clientWidth + 1
    || (hides && element.scrollWidth > element.clientWidth + 1);
}).map((element) => element.outerHTML.slice(0, 80))"""


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_can_be_read_in_both_schemes_and_on_a_phone(seen: Seen, scheme: str, width: int) -> None:
    page = seen.page
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    page.fill("#max-tokens", "200")
    page.click("#one")
    seen.until("n('h') > 0")
    count, poor = page.evaluate(CONTRASTS)
    assert count > 40
    assert not poor
    assert not page.evaluate(CUT_OFF)
    assert page.inner_text("#scale").startswith("A cell is room for the keys and values of 16 tok")
    assert page.locator("#legend td:last-child").first.is_visible()
    assert "--max-num-seqs 8" in page.inner_text("#about")
    charts = page.locator(".chart")
    assert charts.first.inner_text().split("\n")[0].startswith("Hit rate, 5 s")
    assert charts.nth(2).locator(".most").inner_text().startswith("most ")
    axis = charts.nth(2).locator(".axis span").all_inner_texts()
    assert axis == ["2 min ago", "1 min", "now"]
    page.click("#stop")


def test_a_tenant_sees_its_own_cells(seen: Seen) -> None:
    page = seen.page
    page.evaluate("(key) => sessionStorage.setItem('quire-api-key', key)", TENANTS_KEY)
    page.reload()
    page.wait_for_selector(".link.live", timeout=SHORT_MS)
    page.fill("#max-tokens", "350")
    page.click("#one")
    seen.until("n('h') > 3")
    assert "others hold about 0 %" in page.inner_text("#how-many")
    assert "for this key" in page.inner_text("#of-ceiling")
    assert page.locator("#legend tr:visible").count() == 3
    assert not page.is_visible("#time")
    assert not page.is_visible("#tiers")
    page.click("#stop")


@pytest.mark.full
def test_who_does_not_look_is_no_viewer(seen: Seen) -> None:
    """A page in the background leaves the feed, and comes back to it."""
    page = seen.page
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    num_asked = len(seen.asked)
    with page.expect_response("**/memory/feed", timeout=SHORT_MS):
        page.evaluate(hide, False)
    assert len(seen.asked) == num_asked + 1
