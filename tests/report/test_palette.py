"""Pictures on a light page and on a dark one: one set of colors, which the page shares."""

import re
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fedbatchnorm import report
from fedbatchnorm.report import palette
from fedbatchnorm.report.charts import Chart, Mark, Panel
from fedbatchnorm.report.figures import draw, svg


def pairs(kind):
    css = (Path(report.__file__).parent / "page.css").read_text()
    found = re.findall(rf"--{kind}(\d): light-dark\((#\w+), (#\w+)\)", css)
    return [pair for _, *pair in sorted(found)]


@pytest.mark.parametrize(("kind", "colors"), [("c", palette.COLORS), ("k", palette.CLASSES)])
def test_the_page_has_the_same_colors(kind, colors):
    assert pairs(kind) == [[light, palette.dark(f": {light}").removeprefix(": ")] for light in colors]


def test_a_dark_picture_differs_in_its_colors_alone():
    marks = [Mark(f"scheme {i}", i, [1, 2, 3, 4], [i, i, i + 1, i]) for i in range(10)]
    light = svg(draw(Chart("name", "alt", [Panel("curves", "title", "x", "y", marks, -1, 11)])))
    dark = palette.dark(light)
    color = re.compile(r"(?<=: )(#[0-9a-f]{6}|none)\b")
    assert color.sub("", light) == color.sub("", dark)
    assert not set(color.findall(light)) & set(color.findall(dark)) - {"none"}


def test_a_color_without_a_dark_counterpart_is_named():
    with pytest.raises(ValueError, match="#123456"):
        palette.dark('<path style="fill: #123456"/>')


def test_long_names_beside_curves_are_not_cut():
    names = ["nearest-neighbor mixing, median", "W" * 30]
    marks = [Mark(name, i, [1, 2, 3], [10 * i, 20, 30 * i]) for i, name in enumerate(names)]
    figure = draw(Chart("name", "alt", [Panel("curves", "title", "x", "y", marks, 0, 100)] * 2))
    renderer = FigureCanvasAgg(figure).get_renderer()
    width = figure.bbox.width
    for axis in figure.axes:
        for text in axis.texts:
            assert text.get_window_extent(renderer).x1 <= width
