"""The page in a real browser: what is drawn, on a desktop and on a phone, and no error.

Nothing is fetched: the browser is offline, and each request is noted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from tests.marks import chromium
from tests.runs import Runs
from zinf.cli.plan import plan_config
from zinf.core.plan import Link
from zinf.observe import read_trace
from zinf.observe.page import run_page, write_page

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LANES = [str(link) for link in Link if not link.only_frees]

pytestmark = pytest.mark.browser


@dataclass
class Opened:
    """A page, with the requests that it made and the errors that it logged."""

    page: Page
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium(), args=FLAGS, headless=True
        )
        yield browser
        browser.close()


def opened(browser: Browser, path: Path, width: int, *, is_phone: bool) -> Opened:
    context = browser.new_context(
        viewport={"width": width, "height": 844},
        has_touch=is_phone,
        is_mobile=is_phone,
        offline=True,
    )
    found = Opened(context.new_page())
    found.page.on("request", lambda request: found.requests.append(request.url))
    found.page.on("pageerror", lambda error: found.errors.append(str(error)))
    found.page.on("console", lambda message: found.errors.append(message.text))
    found.page.goto(path.as_uri())
    found.page.wait_for_function("document.querySelector('#held .main-svg')")
    return found


@pytest.fixture(scope="module")
def run_file(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(run_page(runs.nvme.output), path)
    return path


@pytest.fixture(scope="module", params=[1280, 390], ids=["desktop", "phone"])
def shown(request, browser: Browser, run_file: Path) -> Iterator[Opened]:
    found = opened(browser, run_file, request.param, is_phone=request.param == 390)
    yield found
    found.page.context.close()


def texts(page: Page, selector: str) -> list[str]:
    return [text or "" for text in page.locator(selector).all_text_contents()]


def test_every_curve_is_drawn(shown):
    for name in ("loss", "learning rate", "gradient norm"):
        assert any(name in t for t in texts(shown.page, "#training .annotation-text"))
    # The path of a line has a point for each of the 8 steps.
    lines = shown.page.locator("#training .scatterlayer path.js-line")
    assert lines.count() == 3
    for index in range(3):
        drawn = lines.nth(index).get_attribute("d") or ""
        assert drawn.count("L") + drawn.count("H") + drawn.count("V") >= 4
    assert shown.page.locator("#training .scatterlayer path.point").count() == 2
    assert shown.page.locator("#speed .scatterlayer path.js-line").count() == 2
    assert shown.page.locator("#held .scatterlayer path.js-line").count() == 3


def test_every_lane_and_every_instruction_is_drawn(shown, runs):
    for axis in ("y", "y2"):
        found = texts(shown.page, f"#timeline .{axis}tick text")
        assert sorted(found) == sorted(LANES)
    step = read_trace(runs.nvme.output / "trace.json")[-1]
    spans = [s for s in (*step.measured, *step.predicted) if s.kind != "free"]
    bars = shown.page.locator("#timeline .barlayer .point path")
    assert bars.count() == len(spans)
    kinds = {span.kind for span in spans}
    assert set(texts(shown.page, ".legend li")) == kinds


def cut_off(page: Page) -> list[str]:
    """Texts that reach over an edge of the screen."""
    width = page.evaluate("innerWidth")
    boxes = page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot svg text, h1, h2, dd, li')]"
        ".filter(e => e.textContent.trim())"
        ".map(e => [e.textContent, e.getBoundingClientRect().x,"
        " e.getBoundingClientRect().right])"
    )
    assert boxes
    return [text for text, left, right in boxes if left < 0 or right > width]


def test_nothing_is_fetched_and_no_text_is_cut_off(shown, run_file):
    assert shown.errors == []
    assert shown.requests == [run_file.as_uri()]
    width = shown.page.evaluate("innerWidth")
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    assert cut_off(shown.page) == []


def test_pointing_at_an_instruction_says_what_it_is(browser, run_file):
    found = opened(browser, run_file, 1280, is_phone=False)
    desktop = found.page
    # The longest that is planned: it is the same in each run, and has parameters.
    bars = desktop.locator("#timeline .x2y2 .point path")
    widths = [bar["width"] for bar in map(Locator.bounding_box, bars.all()) if bar]
    bar = bars.nth(widths.index(max(widths)))
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    assert box
    desktop.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    hover = desktop.locator("#timeline .hovertext")
    hover.wait_for()
    text = hover.text_content() or ""
    for words in (" on ", "measured ", "predicted ", "param/"):
        assert words in text
    assert found.errors == []
    desktop.context.close()


def test_a_plan_of_little_room_is_drawn_on_a_phone(browser, runs, tmp_path):
    path = tmp_path / "plan.html"
    # Just enough for the 424 KiB that it needs, so that the budget is drawn too.
    given = ("memory.device=480KiB",)
    assert plan_config(runs.nvme.config, given, False, None, path, False) == 0
    found = opened(browser, path, 390, is_phone=True)
    assert found.errors == []
    assert found.requests == [path.as_uri()]
    assert sorted(texts(found.page, "#timeline .ytick text")) == sorted(LANES)
    assert any("budget" in text for text in texts(found.page, "#held text"))
    assert found.page.locator("#held .shapelayer path").count() == 1
    assert cut_off(found.page) == []
    found.page.context.close()
