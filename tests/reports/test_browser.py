"""The page of a report in a real browser:

Debian's Chromium. Elsewhere these tests say how to get it, and skip.
"""

import io
import re
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from made_up import make

browser = pytest.importorskip(
    "browser", reason="selenium is not installed: pip install feddkd[dev]"
)
if not browser.found():
    pytest.skip(browser.MISSING, allow_module_level=True)

from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from feddkd.cli.watch import server  # noqa: E402
from feddkd.reports.html.page import write  # noqa: E402
from feddkd.runs.record import find  # noqa: E402

CHARTS = ["metric", "gain", "theory", "clients", "partition", "confusion"]
CURVES = "return document.querySelectorAll('#{} .scatterlayer .js-line').length"
BLUE, RED, GREEN = "#0b6bcb", "#c8402f", "#1f8a4c"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("browser")
    make(out, methods=4, seeds=3, rounds=12)
    write(find(out), out / "report.html")
    return out / "report.html"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.chromium() as page:
        yield page


@pytest.fixture
def page(chromium: Any, report: Path) -> Iterator[Any]:
    """A page opened in the light theme; after the test its console has no message."""
    yield chromium.look().open(report)
    assert chromium.complaints == []


def seen(page: Any, selector: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pixels of an element."""
    element = page.driver.find_element(By.CSS_SELECTOR, selector)
    page.run("arguments[0].scrollIntoView({block: 'center'})", element)
    return np.array(Image.open(io.BytesIO(element.screenshot_as_png)).convert("RGB"))


def near(pixels: Any, colour: str, within: int = 24) -> int:
    """Return the number of pixels with about this colour."""
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])
    return int((np.abs(pixels.astype(int) - wanted).max(-1) <= within).sum())


def soon(page: Any, script: str) -> None:
    WebDriverWait(page.driver, 10).until(lambda _: page.run(f"return Boolean({script})"))


def test_every_chart_is_drawn_and_none_is_blank(page: Any) -> None:
    assert (
        page.run("return [...document.querySelectorAll('.chart')].map((chart) => chart.id)")
        == CHARTS
    )
    for chart in CHARTS:
        pixels = seen(page, f"#{chart}")
        assert len(np.unique(pixels.astype(int) @ [65536, 256, 1])) > 50, chart
        assert max(near(pixels, colour) for colour in (BLUE, RED, GREEN)) > 200, chart


def test_nothing_is_loaded_from_anywhere(page: Any) -> None:
    assert page.run("return performance.getEntriesByType('resource').length") == 0


def test_a_method_can_be_put_aside_and_taken_back(page: Any) -> None:
    assert page.run(CURVES.format("metric")) == 8  # a line and a band for each
    assert near(seen(page, "#metric"), RED) > 100
    second = page.driver.find_elements(By.CSS_SELECTOR, "#methods input")[1]
    second.click()
    assert page.run(CURVES.format("metric")) == 6
    assert near(seen(page, "#metric"), RED) == 0
    page.driver.find_element(By.ID, "none").click()
    assert page.run(CURVES.format("gain")) == 0
    page.driver.find_element(By.ID, "all").click()
    assert page.run(CURVES.format("metric")) == 8


def test_curves_are_drawn_against_whatever_is_chosen(page: Any) -> None:
    title = "return document.querySelector('#metric .xtitle').textContent"
    before = (
        page.run(title),
        page.run("return document.getElementById('metric').data.at(-1).x.at(-1)"),
    )
    options = page.driver.find_elements(By.CSS_SELECTOR, "#axis option")
    assert [option.text.split()[0] for option in options] == [
        "rounds",
        "communications",
        "local",
        "MB",
        "seconds",
    ]
    options[3].click()
    after = (
        page.run(title),
        page.run("return document.getElementById('metric').data.at(-1).x.at(-1)"),
    )
    assert before == ("rounds", 12)
    assert after == ("MB sent and received by all clients", 24)


def test_pointing_at_a_curve_tells_its_numbers(page: Any) -> None:
    plot = page.driver.find_element(By.CSS_SELECTOR, "#metric .nsewdrag")
    page.run("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(page.driver).move_to_element(plot).perform()
    soon(page, "document.querySelector('#metric .hoverlayer text')")
    told = page.run("return document.querySelector('#metric .hoverlayer').textContent")
    assert re.search(r"\d+(\.\d+)? % ± \d", told)
    assert "dkd" in told


def test_dragging_zooms_and_a_double_click_goes_back(page: Any) -> None:
    plot, span = (
        page.driver.find_element(By.CSS_SELECTOR, "#metric .nsewdrag"),
        "document.getElementById('metric').layout.xaxis.range",
    )
    page.run("arguments[0].scrollIntoView({block: 'center'})", plot)
    whole = page.run(f"return {span}")
    ActionChains(page.driver).move_to_element(plot).click_and_hold().move_by_offset(
        150, 60
    ).release().perform()
    soon(page, f"{span}[1] - {span}[0] < {0.5 * (whole[1] - whole[0])}")
    ActionChains(page.driver).double_click(plot).perform()
    soon(page, f"{span}[1] - {span}[0] > {0.9 * (whole[1] - whole[0])}")


def test_other_clients_partitions_and_matrices_can_be_chosen(page: Any) -> None:
    for select, chart in {
        "theory-of": "theory",
        "clients-of": "clients",
        "clients-run": "clients",
        "partition-of": "partition",
        "confusion-of": "confusion",
    }.items():
        state = (
            f"return JSON.stringify(document.getElementById('{chart}').data.map((trace) => trace.z"
            " || trace.y))"
        )
        before = page.run(state)
        page.driver.find_elements(By.CSS_SELECTOR, f"#{select} option")[-1].click()
        assert page.run(state) != before, select
    assert len(page.driver.find_elements(By.CSS_SELECTOR, "#partition-figures dd")) == 4


# --- light and dark, wide and narrow, paper


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(page: Any, front: str, back: str) -> float:
    values = sorted(luminance(page.run(f"return colour('{name}')")) for name in (front, back))
    return (values[1] + 0.05) / (values[0] + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_and_curves_stand_out_from_what_is_behind_them(page: Any, dark: bool) -> None:
    page.look(dark=dark)
    for back in ("paper", "card"):
        for text in ("ink", "soft", "accent"):
            assert contrast(page, text, back) >= 4.5, (text, back)  # WCAG 2.2, AA
        for curve in range(10):
            assert contrast(page, f"c{curve}", back) >= 3, (curve, back)


def test_the_page_is_dark_where_people_like_it_dark_or_ask_for_it(page: Any) -> None:
    assert seen(page, "body")[2, 2].mean() > 240
    page.look(dark=True)
    soon(page, "document.getElementById('theme').textContent === 'Light'")
    pixels = seen(page, "#metric")
    assert np.median(pixels) < 60
    assert near(pixels, "#5aa9ff") > 200  # curves in the colours of the dark
    page.driver.find_element(By.ID, "theme").send_keys(Keys.ENTER)
    soon(page, "document.getElementById('theme').textContent === 'Dark'")
    assert np.median(seen(page, "#metric")) > 240


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_no_screen_is_too_narrow(page: Any, width: int) -> None:
    page.look(width=width)
    soon(page, f"document.documentElement.scrollWidth <= {width}")
    for chart in CHARTS:
        soon(
            page,
            f"document.querySelector('#{chart} .main-svg').getBoundingClientRect().right <="
            f" {width}",
        )


def test_on_paper_it_is_light_and_whole_and_the_screen_is_as_before(page: Any) -> None:
    page.look(dark=True)
    assert page.printed().startswith(b"%PDF")
    soon(
        page,
        "document.getElementById('theme').textContent === 'Light' &&"
        " !document.documentElement.dataset.theme",
    )
    soon(page, "document.querySelector('#metric .main-svg').getBoundingClientRect().width > 900")


# --- keyboard, screen reader, print


def test_everything_that_can_be_worked_has_a_name_and_can_be_reached_by_keyboard(page: Any) -> None:
    unnamed = """return [...document.querySelectorAll("select, input, button, [role]")].filter(
        (one) =>
        !one.parentElement.closest(".chart") &&
        !(one.getAttribute("aria-label") || one.textContent.trim()
          || one.labels?.[0]?.textContent.trim())).length"""
    assert page.run(unnamed) == 0
    assert page.run("return document.documentElement.lang") == "en"
    levels = page.run(
        "return [...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    reached = set()
    for _ in range(60):  # among them what the charts themselves offer
        ActionChains(page.driver).send_keys(Keys.TAB).perform()
        reached.add(page.run("return document.activeElement.id || document.activeElement.type"))
    assert reached >= {
        "theme",
        "checkbox",
        "all",
        "none",
        "axis",
        "theory-of",
        "clients-run",
        "partition-of",
        "confusion-of",
    }


def test_methods_are_toggled_by_keyboard_too(page: Any) -> None:
    page.driver.find_elements(By.CSS_SELECTOR, "#methods input")[0].send_keys(Keys.SPACE)
    assert page.run(CURVES.format("metric")) == 6


def test_another_metric_can_be_chosen(chromium: Any, report: Path, tmp_path: Path) -> None:
    records = find(report.parent)
    for record in records:
        for row in record.history:
            row["test_auc"] = row["test_accuracy"] / 2
    write(records, tmp_path / "two.html")
    page = chromium.look().open(tmp_path / "two.html")
    title = "return document.querySelector('#metric .ytitle').textContent"
    last = "return document.getElementById('metric').data.at(-1).y.at(-1)"
    before = page.run(last)
    assert page.run(title) == "test accuracy in %"
    page.driver.find_elements(By.CSS_SELECTOR, "#metric-of option")[1].click()
    assert page.run(title) == "test AUC in %"
    assert page.run(last) == pytest.approx(before / 2, rel=1e-3)
    assert page.complaints == []


def test_a_page_that_is_watched_keeps_what_was_chosen_when_it_is_loaded_again(
    chromium: Any, report: Path
) -> None:
    with server(report.parent, 0, every=600) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        chromium.driver.get(f"http://127.0.0.1:{serving.server_address[1]}/")
        chromium.drawn().driver.find_elements(By.CSS_SELECTOR, "#axis option")[1].click()
        chromium.driver.find_elements(By.CSS_SELECTOR, "#methods input")[0].click()
        chromium.driver.refresh()
        chromium.drawn()
        serving.shutdown()
        thread.join()
    assert (
        chromium.run("return document.querySelector('#metric .xtitle').textContent")
        == "communications"
    )
    assert chromium.run(CURVES.format("metric")) == 6
    assert chromium.complaints == []
