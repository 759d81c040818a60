"""The README for an index page: what links and pictures lead to is in the repository, not there."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


def for_index(readme: str, base: str | None = None) -> str:
    """The README with absolute links; without an address of the repository, links are text, and pictures go.

    Args:
        readme: Markdown with links and pictures relative to the repository.
        base: where its files are shown, such as https://host/owner/name/blob/v1.0, or None.
    """
    picture = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)
    link = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)]+)\)")
    if base is None:
        return link.sub(
            r"\1", re.sub(r"<!-- pictures -->.*<!-- /pictures -->\n*", "", readme, flags=re.DOTALL)
        )
    raw = base.replace("/blob/", "/raw/")
    images = picture.sub(lambda found: re.search(r"<img[^>]*>", found[0])[0] + "\n\n", readme)
    images = re.sub(r'src="(?!https?:)', f'src="{raw}/', images)
    return link.sub(rf"[\1]({base}/\2)", images)


class ReadmeHook(MetadataHookInterface):
    """Puts that README into the metadata of wheel and source distribution."""

    def update(self, metadata):
        """Set the field `readme`, which pyproject.toml declares as dynamic."""
        text = for_index(Path(self.root, "README.md").read_text(encoding="utf-8"), self.config.get("base"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
