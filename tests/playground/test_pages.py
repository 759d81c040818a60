"""The explanations in Chromium: with a mouse, keys and a finger, on a wide page and on one of 390 pixels."""

import sys
from pathlib import Path

import pytest

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1] / "report")])
import chromium
import devtools

PAGES = Path(__file__).parents[2] / "docs" / "playground"
SCHEMES = ("centralized", "naive", "fixbn", "fbn")
CLOUD = '[data-scheme="centralized"] circle[data-cloud="2"]'
# What a card of the first explanation says: numbers, its bar's parts in pixels, their sum in words.
CARDS = """Object.fromEntries([...document.querySelectorAll("[data-scheme]")].map((card) => [
  card.dataset.scheme, {
  numbers: [...card.querySelectorAll("dd")].map((d) => parseFloat(d.textContent)),
  bar: card.querySelector(".fbn-bar").clientWidth,
  parts: Object.fromEntries([...card.querySelectorAll(".fbn-part")].map((p) =>
    [p.className.split("fbn-").pop(), p.getBoundingClientRect().width])),
  needed: parseFloat(card.querySelector(".fbn-needed").style.left) / 100,
  of: parseFloat(card.querySelector(".fbn-bar").getAttribute("aria-label").split(", of ")[1]),
  sum: card.querySelector(".fbn-sum").textContent,
  rulers: [...card.querySelectorAll("ellipse")].map((e) => e.getAttribute("cx") + "," + e.getAttribute("rx")),
  dots: [...card.querySelectorAll(".fbn-dots")].map((p) => p.getAttribute("d")).join(),
}]))"""
RUNS = """Object.fromEntries([...document.querySelectorAll("[data-run]")].map((card) => [card.dataset.run,
  [...card.querySelectorAll("dd")].map((d) => parseFloat(d.textContent))]))"""
SCREENS = [pytest.param(1400, False, id="wide"), pytest.param(390, True, id="finger")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with devtools.tab(chromium, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def tab(browser):
    """A page that must stay silent, and ask for nothing but its own files."""
    yield browser
    assert not browser.console
    assert browser.asked
    assert not [address for address in browser.asked if not address.startswith(("file:", "data:"))]


def slide(tab, label, value):
    """Move the slider of this label, as its own events would."""
    tab.value(
        "(() => { const input = [...document.querySelectorAll('.fbn-slider')]"
        f".find((s) => s.textContent.startsWith({label!r})).querySelector('input');"
        f"input.value = {value}; input.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
    )
    tab.settle()


def press(tab, text):
    """Click the button of this text, by mouse."""
    tab.value(
        f"[...document.querySelectorAll('button')].find((b) => b.textContent === {text!r}).id = 'pressed'"
    )
    tab.click("#pressed")
    tab.value("document.getElementById('pressed').removeAttribute('id')")


@pytest.mark.parametrize(("width", "finger"), SCREENS)
def test_a_dragged_cloud_changes_all_four_schemes(tab, width, finger):
    tab.open(PAGES / "ring.html", width, touch=finger)
    before = tab.value(CARDS)
    assert tuple(before) == SCHEMES
    tab.drag(CLOUD, -25, -20, finger=finger)
    after = tab.value(CARDS)
    for name in SCHEMES:
        assert after[name]["dots"] != before[name]["dots"]
        assert after[name]["rulers"] != before[name]["rulers"]
    again = tab.value(f"document.querySelector({CLOUD!r}).getAttribute('aria-label')")
    press(tab, "Reset")
    assert tab.value(CARDS) == before
    assert tab.value(f"document.querySelector({CLOUD!r}).getAttribute('aria-label')") != again


def test_a_finger_that_drags_does_not_scroll_and_one_beside_does(tab):
    tab.open(PAGES / "ring.html", 390, height=700, touch=True)
    tab.center(CLOUD)
    top = tab.value("scrollY")
    tab.drag(CLOUD, 0, -60, finger=True)
    assert tab.value("scrollY") == top
    tab.drag(".fbn-title", 0, -60, finger=True)
    tab.wait_for(f"Math.abs(scrollY - {top}) > 20")


def test_keys_move_a_cloud(tab):
    tab.open(PAGES / "ring.html")
    before = tab.value(CARDS)
    tab.value(f"document.querySelector({CLOUD!r}).focus()")
    tab.press("ArrowRight", 3)
    assert tab.value(CARDS)["fbn"]["dots"] != before["fbn"]["dots"]


@pytest.mark.parametrize(("width", "finger"), SCREENS)
@pytest.mark.parametrize("mode", ["Training", "Evaluation"])
def test_the_parts_of_the_variance_add_up_in_words_and_pixels(tab, width, finger, mode):
    tab.open(PAGES / "ring.html", width, touch=finger)
    press(tab, mode)
    for share in (0, 0.5, 1):
        slide(tab, "How different", share)
        cards = tab.value(CARDS)
        for name, card in cards.items():
            left, _, total = card["sum"].partition(" = ")
            written = [float(part.split()[0]) for part in left.split(" + ")]
            assert float(total) == pytest.approx(sum(written), abs=0.11), name
            # All four bars have one scale: a part's pixels are its number.
            drawn = sum(card["parts"].values()) / (card["needed"] * card["bar"])
            assert drawn == pytest.approx(float(total) / card["of"], rel=0.05, abs=0.02), name
            if name == "naive":
                assert card["parts"]["between"] == 0


def test_classes_collapse_or_not(tab):
    tab.open(PAGES / "ring.html")
    apart = {name: card["numbers"][0] for name, card in tab.value(CARDS).items()}
    assert apart["centralized"] == apart["fbn"] == 100
    assert apart["naive"] < 30
    slide(tab, "How different", 0)
    spread = {name: card["numbers"][1] for name, card in tab.value(CARDS).items()}
    assert all(0.9 < value < 1.1 for value in spread.values())


def test_rounds_play_and_step(tab):
    tab.open(PAGES / "ring.html")
    slide(tab, "Round", 1)
    before = tab.value(CARDS)
    press(tab, "Step")
    assert tab.value(CARDS)["fbn"]["rulers"] != before["fbn"]["rulers"]
    press(tab, "Play")
    tab.wait_for("document.querySelector('.fbn-player .fbn-value').textContent.startsWith('6 ')")
    press(tab, "Pause")
    shown = tab.value("document.querySelector('.fbn-player .fbn-value').textContent")
    tab.value("new Promise((done) => setTimeout(done, 400))")
    assert tab.value("document.querySelector('.fbn-player .fbn-value').textContent") == shown


@pytest.mark.parametrize(("width", "finger"), SCREENS)
def test_the_share_is_a_slider(tab, width, finger):
    tab.open(PAGES / "scale.html", width, touch=finger)
    before = tab.value(RUNS)
    assert before["zero"][1] > before["chosen"][1] > before["one"][1]  # how long the weights are
    if finger:  # to the left end of the slider: FBN as published
        tab.value("document.querySelectorAll('.fbn-slider input')[1].id = 'share'")
        tab.drag("#share", -160, 0, finger=True)
    else:
        slide(tab, "Share", 0)
    after = tab.value(RUNS)
    assert after["chosen"] == after["zero"] == before["zero"]
    assert after["one"] == before["one"]


@pytest.mark.parametrize("name", ["ring", "scale"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "finger"), SCREENS)
def test_nothing_is_wider_than_the_page_or_outside_its_picture(tab, name, width, finger, dark):
    tab.open(PAGES / f"{name}.html", width, dark=dark, touch=finger)
    assert tab.value("document.documentElement.scrollWidth") <= width
    outside = tab.value(
        "[...document.querySelectorAll('svg text')].filter((t) => { const [a, b] ="
        "[t, t.ownerSVGElement].map((e) => e.getBoundingClientRect());"
        "return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1; })"
        ".map((t) => t.textContent)"
    )
    assert not outside
    ink, paper = tab.value(
        "['color', 'backgroundColor'].map((p) => getComputedStyle(p === 'color' ? "
        "document.querySelector('.fbn-play') : document.body)[p])"
    )
    assert (brightness(ink) > 150) == dark
    assert (paper == "rgba(0, 0, 0, 0)" or brightness(paper) > 150) != dark


def brightness(color):
    red, green, blue = (float(v) for v in color.split("(")[1].split(")")[0].split(",")[:3])
    return (red + green + blue) / 3
