"""For the API pages: what our docstrings call `Example:` is `Examples:` for Griffe, and shown as code."""

import re

import griffe


class Examples(griffe.Extension):
    """Rename the section in every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called by Griffe for each object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
