"""The page in Chromium: figures answer to the mouse, in light and dark, on wide and narrow screens."""

import json
import sys
from pathlib import Path

import pytest

from fedbatchnorm.report.page import write_report

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "playground"))
import chromium
import devtools
import made_up

pytestmark = pytest.mark.skipif(chromium.browser() is None, reason="Chromium is not installed")
FIGURE3 = '[data-chart="fig3-cifar10-tf32"]'
CURVES, DIFFERENCE = f"{FIGURE3} .panel:nth-child(2)", f"{FIGURE3} .panel:nth-child(3)"
SCREENS = [(1400, False), (1400, True), (390, False), (390, True)]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    results = made_up.figures("fig3", "fig4", seeds=2) + made_up.ring(folder)
    return write_report(folder, out=folder / "report", found=(results, []))


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with devtools.tab(chromium, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def count(tab, selector):
    return tab.value(f"document.querySelectorAll({json.dumps(selector)}).length")


def text(tab, selector):
    return tab.value(f"document.querySelector({json.dumps(selector)}).textContent")


def ratio(one, other):
    """How far two colors, such as rgb(1, 2, 3), are apart for a reader (WCAG)."""

    def light(color):
        parts = [int(x) / 255 for x in color[color.index("(") + 1 : -1].split(",")[:3]]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_every_screen_shows_all_of_it_without_a_word_or_a_request(tab, page, width, dark):
    tab.open(page, width, dark=dark, touch=width < 500)
    assert count(tab, "figure[data-chart]") == count(tab, "figure .panels") == 4
    assert count(tab, "figure .panel svg path, figure .panel svg circle") > 50
    assert tab.value("document.documentElement.scrollWidth") <= width
    back = tab.value("getComputedStyle(document.body).backgroundColor")
    assert (ratio(back, "rgb(0, 0, 0)") < 2) == dark
    colors = tab.value(
        "[...document.querySelectorAll('p, h1, h2, h4, td, th, button, .end, .panel text')]"
        ".filter((e) => !e.closest('[aria-pressed=true]'))"
        ".map((e) => getComputedStyle(e)[e.namespaceURI.endsWith('svg') ? 'fill' : 'color'])"
    )
    assert min(ratio(back, color) for color in colors) >= 4.5
    sizes = tab.value(
        "[...document.querySelectorAll('main *')].filter((e) => !['SCRIPT', 'NOSCRIPT'].includes(e.tagName))"
        ".filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()))"
        ".map((e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12
    tab.settle()
    assert tab.console == []
    assert [address for address in tab.asked if not address.startswith("file:")] == []


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_pointing_at_a_curve_shows_the_values_there(tab, page, width, dark):
    tab.open(page, width, dark=dark, touch=width < 500)
    assert tab.value(f"document.querySelector('{CURVES} .tip').hidden")
    if width < 500:
        x, y = tab.center(f"{CURVES} .catch")
        tab.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        tab.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    else:
        x, y = tab.center(f"{CURVES} .catch")
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tab.settle()
    assert not tab.value(f"document.querySelector('{CURVES} .tip').hidden")
    assert text(tab, f"{CURVES} .tip strong") == "round 1500"
    cells = "(row) => [...row.children].map((cell) => cell.textContent)"
    rows = tab.value(f"[...document.querySelectorAll('{CURVES} .tip tr')].map({cells})")
    assert rows == [
        ["Centralized", "70.0"],
        ["FBN", "70.0"],
        ["FixBN", "60.0"],
        ["Naive BN", "17.0"],
    ]
    box = tab.value(
        f"(b => [b.left, b.right])(document.querySelector('{CURVES} .tip').getBoundingClientRect())"
    )
    assert box[0] >= 0
    assert box[1] <= width
    assert tab.console == []


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_schemes_levels_and_axes_are_switched(tab, page, width, dark):
    tab.open(page, width, dark=dark, touch=width < 500)
    naive = f'{FIGURE3} .legend [data-key="Naive BN"]'
    shown = count(tab, f'{CURVES} svg [data-key="Naive BN"] .series')
    tab.click(naive)
    assert (shown, count(tab, f'{CURVES} svg [data-key="Naive BN"] .series')) == (1, 0)
    assert tab.value(f"document.querySelector('{naive}').getAttribute('aria-pressed')") == "false"
    tab.click(naive)
    assert count(tab, f'{CURVES} svg [data-key="Naive BN"] .series') == 1

    assert text(tab, f"{CURVES} h4") == "gamma 0"
    tab.click(f"{FIGURE3} .choices button:first-child")
    assert text(tab, f"{CURVES} h4") == "gamma 1"
    ends = tab.value(f"[...document.querySelectorAll('{CURVES} .tick text')].map((t) => t.textContent)")
    assert "100" in ends
    tab.click(f"{FIGURE3} .fit")
    ends = tab.value(f"[...document.querySelectorAll('{CURVES} .tick text')].map((t) => t.textContent)")
    assert "100" not in ends
    assert tab.console == []


def test_dragging_zooms_and_a_button_goes_back(tab, page):
    tab.open(page)
    ticks = f"[...document.querySelectorAll('{CURVES} .tick text')].map((t) => t.textContent)"
    before = tab.value(ticks)
    tab.drag(f"{CURVES} .catch", 60, 40)
    assert tab.value(ticks) != before
    tab.click(f"{FIGURE3} .reset")
    assert tab.value(ticks) == before
    assert tab.value(f"document.querySelector('{FIGURE3} .reset').hidden")


def test_keys_move_through_the_rounds(tab, page):
    tab.open(page)
    tab.value(f"document.querySelector('{CURVES} svg').focus()")
    tab.press("ArrowRight")
    assert text(tab, f"{CURVES} .tip strong") == "round 1000"
    tab.press("ArrowRight", 2)
    assert text(tab, f"{CURVES} .tip strong") == "round 3000"


@pytest.mark.parametrize("dark", [False, True])
def test_the_button_turns_light_into_dark_and_back(tab, page, dark):
    tab.open(page, dark=dark)
    color = "getComputedStyle(document.body).backgroundColor"
    before = tab.value(color)
    assert text(tab, ".theme") == ("Light" if dark else "Dark")
    tab.click(".theme")
    assert tab.value(color) != before
    tab.click(".theme")
    assert tab.value(color) == before


def test_curves_that_lie_on_each_other_have_a_panel_of_differences(tab, page):
    tab.open(page)
    assert text(tab, f"{DIFFERENCE} h4") == "gamma 0: difference from Centralized"
    assert "Too far off for this scale: FixBN, Naive BN." in text(tab, DIFFERENCE)
    assert count(tab, f"{DIFFERENCE} .series") == 1


def test_smoothing_takes_the_mean_of_neighbors(tab, tmp_path):
    results = [r for r in made_up.figures("fig3") if r.config.gamma == 0]
    rounds, curve = tuple(range(100, 1300, 100)), (0.0, 0.6) * 6
    results = [made_up.result(r.config, curve, rounds) for r in results]
    page = write_report(tmp_path, out=tmp_path / "report", found=(results, []))
    tab.open(page)

    def second_value():
        tab.value("document.querySelector('.panel svg').focus()")
        tab.press("Home")
        tab.press("ArrowRight")
        return text(tab, ".panel .tip td:last-child")

    assert second_value() == "60.0"
    slider = "document.querySelector('input[type=range]')"
    tab.value(f"{slider}.value = 1; {slider}.dispatchEvent(new Event('input'))")
    assert text(tab, "output") == "mean of 3"
    assert second_value() == "20.0"


def test_what_a_figure_shows_is_said_in_words_and_can_be_selected(tab, page):
    tab.open(page)
    said = tab.value(f"document.querySelector('{CURVES} svg').getAttribute('aria-label')")
    assert said.startswith("gamma 0. test accuracy (%), at the end: Centralized 80.0; FBN 80.0; ")
    assert tab.value("[...document.querySelectorAll('figure')].every((f) => f.getAttribute('aria-label'))")
    tab.value(f"getSelection().selectAllChildren(document.querySelector('{CURVES} svg'))")
    assert "Naive BN" in tab.value("getSelection().toString()")


def test_contents_lead_to_every_section(tab, page):
    tab.open(page)
    assert tab.value("[...document.querySelectorAll('nav a')].every((a) => document.querySelector(a.hash))")
    assert count(tab, "nav a") == count(tab, "main > section")
