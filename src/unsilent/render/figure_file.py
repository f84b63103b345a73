"""Writing of a report's figure to a file for a paper: svg, pdf or png, drawn by matplotlib.

The data are the same as on the page, where plotly draws them. Fonts and widths are those of a page with two columns. The same
figure always gives the same bytes. Needs the extra ``figures``.
"""

from __future__ import annotations

import html
import io
import math
import os
import re
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.render.figure_traces import POINTS, colour, draw_trace, line_look, thinned
from unsilent.render.pages import write_file
from unsilent.report.model import Plot, Report
from unsilent.report.text import escape_unprintable
from unsilent.report.theme import GREY, GRID, INK, Figure

COLUMN_WIDTH, PAGE_WIDTH, MOST_HEIGHT = 3.3, 6.9, 9.0
"""Sizes in inches."""
FONT_SIZE = 8
METADATA: dict[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
"""Metadata to leave out, by format, so that the same figure has the same bytes."""
LOOK = {
    "font.size": FONT_SIZE, "axes.labelsize": FONT_SIZE, "axes.titlesize": FONT_SIZE, "legend.fontsize": FONT_SIZE,
    "font.family": ["DejaVu Sans"], "text.color": INK, "axes.labelcolor": INK, "axes.linewidth": 0.6, "axes.edgecolor": GREY,
    "grid.color": GRID, "grid.linewidth": 0.6, "pdf.fonttype": 42, "svg.hashsalt": "unsilent", "savefig.dpi": 300,
}  # fmt: skip
_LETTER = 4.5
"""Average width of a letter in points."""
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def write_figure(report: Report, name: str, path: str | os.PathLike[str]) -> Path:
    """Write one figure of a report and return the path.

    Raises ``UsageError`` for an unknown figure name, a file name that does not end in .svg, .pdf or .png, a file that cannot be
    written, or if matplotlib is missing.
    """
    ending = Path(path).suffix.lower().removeprefix(".")
    if ending not in METADATA:
        raise UsageError(f"the figure is to be written to {path}; expected a name that ends in .svg, .pdf or .png")
    drawn, content = draw_figure(report, name), io.BytesIO()
    title = {"Title": escape_unprintable(report.plots[name].alt_text)}
    with _matplotlib().rc_context(LOOK), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)  # the figure shows a box instead
        drawn.savefig(content, format=ending, metadata=METADATA[ending] | title)
    return write_file(content.getvalue(), path, "the figure")


def draw_figure(report: Report, name: str) -> Any:
    """A figure of a report, by its name, as a matplotlib figure; raises ``UsageError``."""
    if not report.plots:
        raise UsageError("this report has no figures; see its tables")
    if name not in report.plots:
        raise unknown_name_error("figure", name, report.plots)
    return draw_plot(report.plots[name])


def draw_plot(plot: Plot) -> Any:
    """A plot as a matplotlib figure."""
    data, layout = plot.figure["data"], plot.figure["layout"]
    with _matplotlib().rc_context(LOOK):
        from matplotlib.figure import Figure as Drawn

        named = [trace for trace in data if trace.get("name") and trace.get("showlegend", True)]
        if not layout.get("showlegend", len(data) > 1 or any(trace.get("showlegend") for trace in named)):
            named = []
        width = PAGE_WIDTH if _is_wide(data, layout) else COLUMN_WIDTH
        longest = max((len(plain_text(trace["name"])) for trace in named), default=0)
        columns = max(1, int(72 * width / (_LETTER * longest + 32)))
        height = _height(layout, width) + 0.16 * math.ceil(len(named) / columns)
        drawn = Drawn(figsize=(width, min(height, MOST_HEIGHT)), layout="constrained")
        axes = drawn.subplots()
        axes.set_facecolor(colour(layout.get("plot_bgcolor", "white")))
        ends: dict[float, float] = {}
        handles = {id(trace): draw_trace(axes, trace, ends) for trace in data}
        for along, size in (("x", width), ("y", height)):
            _axis(axes, along, layout[f"{along}axis"], 72 * size)
        for shape in layout.get("shapes", ()):
            _shape(axes, shape)
        for note in layout.get("annotations", ()):
            sides = {"ha": note["xanchor"], "va": "center" if note["yanchor"] == "middle" else note["yanchor"]}
            look = {"color": note["font"]["color"], "transform": _place(axes, note), "parse_math": False}
            axes.text(note["x"], note["y"], plain_text(note["text"]), **sides, **look)
        _title_and_scale(drawn, axes, layout, [(trace, handles[id(trace)]) for trace in data])
        if named:
            texts = [plain_text(trace["name"]) for trace in named]
            more = {"ncols": columns, "frameon": False, "borderaxespad": 0, "handletextpad": 0.4, "columnspacing": 1.2}
            legend = drawn.legend([handles[id(trace)] for trace in named], texts, loc="outside upper left", **more)
            for text in legend.get_texts():
                text.set_parse_math(False)
    return drawn


def _height(layout: Figure, width: float) -> float:
    """The height of the figure in inches, without its legend.

    Axes of numbers are wider than high; axes of named rows keep their height.
    """
    height: float = max(layout["height"] * POINTS / 72, 1.2)
    ends = layout["yaxis"].get("range", (0, 1))
    return height if ends[0] > ends[1] else min(height, 0.75 * width)


def plain_text(text: str) -> str:
    """A plotly text without HTML tags and escapes."""
    raised = re.sub(r"<sup>(.*?)</sup>", lambda match: match[1].translate(_SUPERSCRIPT), text)
    return html.unescape(re.sub(r"<[^>]*>", "", raised.replace("<br>", "\n"))).strip(" ")


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        install = "pip install 'unsilent[figures]'"
        raise UsageError(f"a figure as a file needs an optional package; install it with: {install}") from None
    return matplotlib


def _is_wide(data: Sequence[Figure], layout: Figure) -> bool:
    """Whether the figure is too wide for one column of a paper."""
    cells = max((len(trace["z"][0]) for trace in data if trace["type"] == "heatmap" and trace["z"]), default=0)
    names = max((len(plain_text(name)) for name in layout["yaxis"].get("ticktext", ())), default=0)
    return cells > 16 or names > 24 or len(layout.get("annotations", ())) > 6


def _axis(axes: Any, along: str, options: Figure, size: float) -> None:
    """Set scale, limits, ticks and title of one axis.

    ``size``: the length of the axis in points.
    """
    axis, set_ends = getattr(axes, f"{along}axis"), getattr(axes, f"set_{along}lim")
    is_log = options.get("type") == "log"
    if is_log:
        getattr(axes, f"set_{along}scale")("log")
    if "range" in options:
        set_ends(*(10.0**end if is_log else end for end in options["range"]))
    elif options.get("autorange") == "reversed":
        axis.set_inverted(True)
    elif options.get("rangemode") == "tozero":
        set_ends(0)
    if "tickvals" in options:
        names = [plain_text(name) for name in options["ticktext"]]
        ticks, texts = thinned(options["tickvals"], names, 0.7 * size) if along == "x" else (options["tickvals"], names)
        axis.set_ticks(ticks, labels=texts, parse_math=False)
        axis.set_ticks([], minor=True)
    axes.tick_params(along, which="both", labelsize=FONT_SIZE, length=0, labelcolor=INK)
    axes.grid(options.get("showgrid", True), axis=along)
    axes.set_axisbelow(True)
    axis.set_visible(options.get("visible", True))
    for side in ("top", "right") if options.get("visible", True) else axes.spines:
        axes.spines[side].set_visible(False)
    title = textwrap.fill(plain_text(options.get("title", {}).get("text", "")), max(8, int(0.85 * size / _LETTER)))
    getattr(axes, f"set_{along}label")(title, parse_math=False)


def _title_and_scale(drawn: Any, axes: Any, layout: Figure, series: Sequence[tuple[Figure, Any]]) -> None:
    """Draw the title, with a colour scale if there is a heat map."""
    title = plain_text(layout.get("title", {}).get("text", ""))
    for trace, mesh in series:
        if trace["type"] == "heatmap":
            scale = trace["colorbar"]
            bar = drawn.colorbar(mesh, ax=axes, location="top", aspect=40, shrink=0.6, anchor=(0, 0))
            bar.set_label(title or plain_text(scale.get("title", {}).get("text", "")), parse_math=False)
            bar.outline.set_visible(False)
            bar.ax.tick_params(labelsize=FONT_SIZE, length=0, labelcolor=INK)
            if "tickvals" in scale:
                bar.set_ticks(scale["tickvals"], labels=[plain_text(text) for text in scale["ticktext"]])
            return
    axes.set_title(title, parse_math=False)


def _place(axes: Any, options: Figure) -> Any:
    """The transformation for coordinates of a shape: data, or shares of the axes."""
    from matplotlib.transforms import blended_transform_factory

    sides = (axes.transAxes if options.get(f"{along}ref") == "paper" else axes.transData for along in ("x", "y"))
    return blended_transform_factory(*sides)


def _shape(axes: Any, shape: Figure) -> None:
    """Draw a line or a rectangle without changing the limits of the axes."""
    from matplotlib.colors import to_rgba
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    order = {"zorder": 0.5 if shape.get("layer") == "below" else 2.5, "transform": _place(axes, shape)}
    x0, x1, y0, y1 = (shape[end] for end in ("x0", "x1", "y0", "y1"))
    if shape["type"] == "line":
        axes.add_artist(Line2D([x0, x1], [y0, y1], **line_look(shape["line"]), **order))
        return
    edge = shape["line"]
    look = {"edgecolor": colour(edge.get("color", INK)), "linewidth": edge.get("width", 1) * POINTS}
    red, green, blue, fill = to_rgba(colour(shape["fillcolor"]))
    look["facecolor"] = (red, green, blue, fill * shape.get("opacity", 1))
    axes.add_artist(Rectangle((x0, y0), x1 - x0, y1 - y0, **look, **order))
