"""The colors of all pictures, on a light page and on a dark one."""

import re

# (on white, on nearly black); page.css has the same. They can be read as text. Dashes and markers help the
# color-blind to tell them apart.
_SERIES = (
    ("#1b1f24", "#e6edf3"),
    ("#0062a8", "#5ab0f5"),
    ("#8a5f00", "#dfab34"),
    ("#c2341d", "#ff8066"),
    ("#00755a", "#41cd9f"),
    ("#9b2f83", "#e18fd2"),
    ("#5b3fa8", "#b7a6f7"),
    ("#7b4a2a", "#d9a37e"),
    ("#5d6b16", "#bccb5e"),
    ("#6b7280", "#9aa4b0"),
)
_CLASSES = (
    ("#332288", "#9d8ff0"),
    ("#3f8fc4", "#88ccee"),
    ("#2f9485", "#5cc9b8"),
    ("#117733", "#4fbf73"),
    ("#85852a", "#c0c05c"),
    ("#b08a1f", "#e3cc7a"),
    ("#c25468", "#e88a9b"),
    ("#882255", "#d977ab"),
    ("#a33f93", "#d78ccb"),
    ("#6d6d6d", "#b5b5b5"),
)
COLORS = tuple(light for light, _ in _SERIES)
CLASSES = tuple(light for light, _ in _CLASSES)
INK, SOFT, EDGE, GRID, BACK = COLORS[0], "#424a53", "#8c959f", "#d8dee4", "#ffffff"
_DARK = dict(_SERIES + _CLASSES) | {SOFT: "#a5b0bc", EDGE: "#6e7883", GRID: "#343c46", BACK: "none"}


def dark(picture: str) -> str:
    """The same SVG for a dark page: each color has a counterpart, and the background is left out.

    Args:
        picture: SVG text, drawn in the colors of this module.

    Example:
        >>> dark('<path style="fill: #ffffff; stroke: #1b1f24"/>')
        '<path style="fill: none; stroke: #e6edf3"/>'
    """
    unknown = set(re.findall(r": (#[0-9a-f]{6})\b", picture)) - _DARK.keys()
    if unknown:
        raise ValueError(f"no dark counterpart for {', '.join(sorted(unknown))}: add it to report/palette.py")
    return re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda color: _DARK[color[0]], picture)
