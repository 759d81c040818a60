"""The built site: links, anchors, what it asks for and says in a browser. `make test-docs` builds it."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import fedbatchnorm as fbn

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from chromium import FLAGS, browser, visit

ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
PAGES = sorted(p for p in SITE.rglob("*.html") if p.name != "404.html")
NAMES = [str(p.relative_to(SITE)) for p in PAGES]
LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href"), ("source", "srcset")}
pytestmark = pytest.mark.site


class Page(HTMLParser):
    """Anchors, links, and what the browser loads by itself."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        for key in ("href", "src", "srcset"):
            if attrs.get(key) is not None:
                loads = (tag, key) in LOADS and attrs.get("rel") not in ("canonical", "prev", "next")
                (self.loaded if loads else self.links).append(attrs[key])


def broken(pages, site):
    """(page, address) of every link inside the site that leads nowhere."""
    parsed = {page.resolve(): Page(page.read_text(encoding="utf-8")) for page in pages}
    for page, content in parsed.items():
        for address in [*content.links, *content.loaded]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            inside = target.is_file() and target.is_relative_to(site.resolve())
            anchor = unquote(parts.fragment)
            if not inside or (anchor and target in parsed and anchor not in parsed[target].anchors):
                yield page.name, address


def test_the_site_is_built_and_whole():
    assert (SITE / "index.html").is_file(), "run `make docs` first"
    sources = {p.relative_to(ROOT / "docs").with_suffix(".html") for p in (ROOT / "docs").rglob("*.md")}
    assert sources <= {p.relative_to(SITE) for p in PAGES}
    newest = max(p.stat().st_mtime for p in (ROOT / "docs").rglob("*.md"))
    assert (SITE / "index.html").stat().st_mtime >= newest, (
        "the site is older than its pages: run `make docs`"
    )


def test_every_link_and_anchor_leads_somewhere():
    assert not list(broken(PAGES, SITE))


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there"></a><a href="b.html#not"></a><img src="no.png">')
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="../outside.html"></a>')
    found = list(broken(sorted(tmp_path.glob("*.html")), tmp_path))
    assert found == [("a.html", "b.html#not"), ("a.html", "no.png"), ("b.html", "../outside.html")]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_loads_nothing_from_elsewhere(name):
    loaded = Page((SITE / name).read_text(encoding="utf-8")).loaded
    assert loaded
    assert not [address for address in loaded if urlsplit(address).netloc]


@pytest.mark.parametrize("name", NAMES)
def test_every_picture_has_a_light_and_a_dark_edition(name):
    loaded = Page((SITE / name).read_text(encoding="utf-8")).loaded
    light, dark = (
        sorted(address.removesuffix(end) for address in loaded if address.endswith(end))
        for end in (".svg#only-light", "-dark.svg#only-dark")
    )
    assert light == dark
    assert len(light) + len(dark) == sum(".svg" in address for address in loaded)


def test_style_sheets_load_nothing_from_elsewhere():
    sheets = list(SITE.rglob("*.css"))
    assert len(sheets) > 2
    for sheet in sheets:
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_silent_and_asks_for_nothing(name, tmp_path):
    document, console, addresses, _ = visit(SITE / name, tmp_path)
    assert "md-content" in document or "playground" in name
    assert not console
    assert not addresses


@pytest.mark.parametrize(
    ("words", "page"), [("calibrated start", "guide.html"), ("next_gradient", "library")]
)
def test_search_works_from_a_file(words, page, tmp_path):
    address = f"{(SITE / 'index.html').as_uri()}?q={words.replace(' ', '+')}"
    command = [
        browser(),
        *FLAGS,
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=20000",
        "--dump-dom",
        address,
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.findall(
        r'class="md-search-result__link"[^>]*href="([^"]*)"|href="([^"]*)"[^>]*md-search-result__link', shown
    )
    assert any(page in "".join(link) for link in found), found


def test_the_api_reference_has_everything_public():
    anchors = Page((SITE / "api" / "library.html").read_text(encoding="utf-8")).anchors
    missing = [
        name for name in fbn.__all__ if f"fedbatchnorm.{name}" not in anchors and name != "__version__"
    ]
    assert not missing


def test_examples_are_set_as_code():
    text = (SITE / "api" / "library.html").read_text(encoding="utf-8")
    assert text.count("&gt;&gt;&gt; ") > 30
    assert "<p>Example:" not in text
    assert "<blockquote>" not in text


def test_a_browser_is_there():
    assert shutil.which(browser() or "")
