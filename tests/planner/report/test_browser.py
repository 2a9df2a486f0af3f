"""The report in a real browser: no complaint, room on a phone, and words where one points."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.reports import report
from quire.planner.report import render

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the path")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(report()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield own
        own.close()


@pytest.fixture
def open_page(browser: Any, file: Path) -> Iterator[Any]:
    """A function that opens the file; nothing may be complained of or fetched meanwhile."""
    complaints: list[str] = []
    asked: list[str] = []
    contexts = []

    def opened(width: int = 1240, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda said: complaints.append(said.text) if said.type != "log" else None,
        )
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints
    assert asked == [file.as_uri()] * len(contexts)


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1240, 390])
def test_it_fits(open_page: Any, scheme: str, width: int) -> None:
    page = open_page(width, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide = page.evaluate(
        "() => [...document.querySelectorAll('svg text')].filter((each) => { "
        "const box = each.getBoundingClientRect(); "
        "return box.left < -1 || box.right > innerWidth + 1 }).map((each) => each.textContent)"
    )
    assert wide == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_color_can_be_read(open_page: Any, scheme: str) -> None:
    """4.5 to 1, for texts as for lines."""
    page = open_page(color_scheme=scheme)
    poor = page.evaluate("""() => {
      const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
      const luminance = (text) => {
        const [r, g, b] = text.match(/[\\d.]+/g).map((part) => linear(part / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const probe = document.body.appendChild(document.createElement("i"));
      const paper = luminance(getComputedStyle(document.body).backgroundColor);
      return ["ink", "muted", "v0", "v1", "v2", "v3", "other"].filter((name) => {
        probe.style.color = `var(--${name})`;
        const own = luminance(getComputedStyle(probe).color);
        return (Math.max(own, paper) + 0.05) / (Math.min(own, paper) + 0.05) < 4.5;
      });
    }""")
    assert poor == []


def test_a_plot_says_what_is_pointed_at(open_page: Any) -> None:
    page = open_page()
    plot = page.locator("figure[data-hover] .drawings").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    says = page.locator("figure[data-hover] .says").first
    assert says.inner_text().startswith("at ")
    assert "committed" in says.inner_text()
    page.mouse.move(0, 0)
    assert says.inner_text() == ""


@pytest.mark.full
def test_without_scripts_nothing_is_lost(open_page: Any) -> None:
    page = open_page(java_script_enabled=False)
    assert page.locator("svg").count() == 14
    page.locator("summary").first.click()
    assert page.locator("details").first.locator("table").is_visible()
