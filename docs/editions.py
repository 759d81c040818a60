"""For the site: every picture in its colors for a light page and for a dark one, and some for a phone."""

import re
from pathlib import Path

from mkdocs.structure.files import File

from fedbatchnorm.report.palette import dark

PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s#]+)\.svg\)")


def on_files(files, config, **_):
    """Add the dark edition of every SVG that has none beside it. Called by MkDocs."""
    for file in [file for file in files if file.src_uri.endswith(".svg")]:
        name = file.src_uri.removesuffix(".svg") + "-dark.svg"
        if not file.src_uri.endswith("-dark.svg") and files.get_file_from_path(name) is None:
            text = Path(file.abs_src_path).read_text(encoding="utf-8")
            files.append(File.generated(config, name, content=dark(text)))
    return files


def on_page_markdown(markdown, page, **_):
    """Put every edition of a picture in its place; style sheets hide all but one. Called by MkDocs."""
    folder = Path(page.file.abs_src_path).parent

    def editions(found):
        text, name = found.groups()
        if (folder / f"{name}-narrow.svg").exists():
            return both(text, name, "{ .wide }") + both(text, f"{name}-narrow", "{ .narrow }")
        return both(text, name)

    return PICTURE.sub(editions, markdown)


def both(text, name, attributes=""):
    """A picture for a light page and one for a dark page."""
    light, dark = f"{name}.svg#only-light", f"{name}-dark.svg#only-dark"
    return f"![{text}]({light}){attributes}![{text}]({dark}){attributes}"
