"""Figures of a report as files for a paper: one renderer for dots, curves, heat maps and bars, the same bytes each time."""

import dataclasses
import re

import numpy as np
import pytest

from report.conftest import HOSTILE, make_comparison, make_demo, make_hostile, softer
from report.showing import report_of
from report.test_training_html import EVERYTHING
from unsilent.basics.errors import UsageError
from unsilent.render.figure_file import COLUMN_WIDTH, PAGE_WIDTH, draw_plot, write_figure
from unsilent.report.bars import Bar, stacked_shares_figure
from unsilent.report.curves import line_series
from unsilent.report.dots import Dots, shares_figure
from unsilent.report.model import Plot, Report, Section, SideBySide, Table
from unsilent.report.theme import MARKERS, figure
from unsilent.statistics import Interval
from unsilent.studies.training.report import report as training_report

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def demo_report():
    return report_of(make_demo())


def plot_of(data):
    return Plot("one", "a figure", data)


def dots(*rows, symbol="circle"):
    places = [(number, Interval(*row, 0.95, 100, "m"), "") for number, row in enumerate(rows)]
    return plot_of(shares_figure([Dots("", "#0072B2", symbol, places)], [f"row{n}" for n in range(len(rows))], "PVF"))


def texts(drawn):
    found = [text.get_text() for text in drawn.findobj(matplotlib.text.Text) if text.get_visible()]
    return [text for text in found if text]


@pytest.mark.parametrize("ending", ["svg", "pdf", "png"])
def test_each_format_has_the_same_bytes_each_time(demo_report, tmp_path, ending):
    for name in ("a", "b"):
        write_figure(demo_report, "curves", tmp_path / f"{name}.{ending}")
    first, second = ((tmp_path / f"{name}.{ending}").read_bytes() for name in ("a", "b"))
    assert first == second
    assert first.startswith({"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}[ending])
    assert not re.search(rb"<dc:date>|/CreationDate|20\d\d-\d\d-\d\d", first)


def test_fonts_of_a_pdf_are_embedded_as_outlines(demo_report, tmp_path):
    write_figure(demo_report, "curves", tmp_path / "a.pdf")
    content = (tmp_path / "a.pdf").read_bytes()
    assert b"/FontFile2" in content  # TrueType, embedded
    assert b"/Type3" not in content


def test_estimates_limits_and_upper_limits_are_those_of_the_report():
    drawn = draw_plot(dots((0.02, 0.01, 0.04), (0.0, 0.0, 0.003)))
    axes = drawn.axes[0]
    points = sorted(
        tuple(map(float, p)) for c in axes.collections if hasattr(c, "get_offsets") for p in c.get_offsets()
    )
    assert (0.02, 0.0) in points
    assert (0.003, 1.0) in points, "the upper limit of none"
    bars = [np.asarray(s) for c in axes.collections if hasattr(c, "get_segments") for s in c.get_segments()]
    assert any(np.allclose(bar, [[0.01, 0], [0.04, 0]]) for bar in bars)
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["row0", "row1"]
    assert axes.yaxis_inverted(), "the first row is on top"
    assert axes.get_xlabel() == "PVF"


def test_stacked_bars_add_up_to_the_whole():
    bars = [Bar("a", "1 flip", {"masked": 3, "sdc": 1, "due": 0}), Bar("b", "", {"masked": 1, "sdc": 0, "due": 1})]
    drawn = draw_plot(plot_of(stacked_shares_figure(bars, "share of samples")))
    patches = drawn.axes[0].patches
    ends = {}
    for patch in patches:
        row = round(patch.get_y() + patch.get_height() / 2)
        ends.setdefault(row, []).append((patch.get_x(), patch.get_x() + patch.get_width()))
    assert sorted(ends[0]) == [(0, 0.75), (0.75, 1), (1, 1)]
    assert sorted(ends[1]) == [(0, 0.5), (0.5, 0.5), (0.5, 1)]
    assert [t.get_text() for t in drawn.legends[0].get_texts()] == ["masked", "silent (SDC)", "detectable (DUE)"]


def test_a_heat_map_has_its_cells_gaps_and_scale(demo_report):
    plot = demo_report.plots["heat-0"]
    drawn = draw_plot(plot)
    mesh = drawn.axes[0].collections[0]
    told = np.array([[np.nan if v is None else v for v in row] for row in plot.figure["data"][0]["z"]])
    assert np.array_equal(np.ma.filled(mesh.get_array(), np.nan), told, equal_nan=True)
    assert mesh.norm.vmin == plot.figure["data"][0]["zmin"]
    assert {"sign", "exponent", "mantissa"} <= set(texts(drawn))
    scale = plot.figure["data"][0]["colorbar"]["ticktext"]
    assert set(scale) <= set(texts(drawn))


@pytest.mark.parametrize("open_", ["", "-open"])
@pytest.mark.parametrize("symbol", [*MARKERS, "triangle-up", "triangle-down", "triangle-left", "line-ns", "line-ew"])
def test_every_symbol_is_drawn(symbol, open_):
    drawn = draw_plot(dots((0.02, 0.01, 0.04), symbol=symbol + open_))
    assert any(len(c.get_offsets()) for c in drawn.axes[0].collections if hasattr(c, "get_offsets"))


def test_curves_have_a_gap_where_there_is_no_number():
    line = {"color": "#000000", "width": 2, "dash": "dot"}
    curve = line_series("a", [(0, 1.0), (1, None), (2, 3.0)], line)
    (line,) = draw_plot(plot_of(figure([curve], 300))).axes[0].lines
    assert np.array_equal(line.get_ydata(), [1, np.nan, 3], equal_nan=True)
    assert line.get_linestyle() == ":"


def test_text_of_a_page_is_plain_text_in_a_figure():
    axis = {"tickvals": [1, 2], "ticktext": ["10<sup>-3</sup>", "<i>R&amp;D</i>"], "title": {"text": "time"}}
    drawn = draw_plot(plot_of(figure([], 300, title={"text": "<b>a</b> &lt; $x_1$<br>b"}, xaxis=axis)))
    assert {"a < $x_1$\nb", "10⁻³", "R&D", "time"} <= set(texts(drawn))
    assert not any(text.get_parse_math() for text in drawn.findobj(matplotlib.text.Text) if "$" in text.get_text())


@pytest.mark.parametrize("make", [make_hostile, lambda: make_comparison(make_demo(), softer(make_demo()))])
def test_every_figure_can_be_drawn_whatever_its_names(make, tmp_path):
    report = report_of(make())
    assert report.plots
    for name in report.plots:
        write_figure(report, name, tmp_path / "x.svg")
        assert (tmp_path / "x.svg").stat().st_size > 1000


def test_names_are_not_lost_though_a_font_lacks_them(tmp_path, recwarn):
    data = shares_figure([Dots("_" + HOSTILE[5], "#0072B2", "circle", [(0, Interval(0.1, 0.05, 0.2, 0.95, 9, "m"), "")])],
                           [HOSTILE[5]], "PVF")  # fmt: skip
    drawn = draw_plot(plot_of(data))
    assert any(text.startswith("_überl") for text in texts(drawn)), (
        "also a name that begins as hidden ones of matplotlib do"
    )
    report = Report("s", "t", "t", "h", Table((), ()), sections=(Section("s", "", (plot_of(data),)),))
    recwarn.clear()
    write_figure(report, "one", tmp_path / "x.svg")
    assert not recwarn.list


def test_figures_of_trainings(tmp_path):
    report = training_report(EVERYTHING)
    assert {"classes", "parts", "conditions", "guard"} <= set(report.plots)
    for name in report.plots:
        write_figure(report, name, tmp_path / "x.svg")


def test_widths_are_those_of_a_column_or_of_a_page(demo_report):
    assert draw_plot(dots((0.02, 0.01, 0.04))).get_figwidth() == COLUMN_WIDTH == 3.3
    assert draw_plot(demo_report.plots["heat-0"]).get_figwidth() == PAGE_WIDTH == 6.9


@pytest.mark.parametrize("name", ["curves", "outcomes", "due", "heat-0", "lookups"])
def test_nothing_is_cut_off_and_text_has_eight_points(demo_report, name):
    drawn = draw_plot(demo_report.plots[name])
    drawn.draw_without_rendering()
    whole = drawn.bbox
    for text in drawn.findobj(matplotlib.text.Text):
        if not text.get_text() or not text.get_visible():
            continue
        assert text.get_fontsize() == 8
        box = text.get_window_extent()
        assert box.x0 >= -1, text
        assert box.x1 <= whole.width + 1, text
        assert box.y0 >= -1, text
        assert box.y1 <= whole.height + 1, text


def test_an_unknown_name_is_refused_with_those_there_are(demo_report, tmp_path):
    with pytest.raises(
        UsageError, match="unknown figure 'curve'; did you mean 'curves'.*Known: curves, due, heat-0, lookups"
    ):
        write_figure(demo_report, "curve", tmp_path / "x.svg")
    empty = dataclasses.replace(demo_report, sections=())
    with pytest.raises(UsageError, match="this report has no figures"):
        write_figure(empty, "curves", tmp_path / "x.svg")
    with pytest.raises(UsageError, match=r"x\.jpg.*expected a name that ends in \.svg, \.pdf or \.png"):
        write_figure(demo_report, "curves", tmp_path / "x.jpg")


def test_figures_side_by_side_have_names_as_well():
    plot = dots((0.02, 0.01, 0.04))
    report = Report("s", "t", "t", "h", Table((), ()), sections=(Section("s", "", (SideBySide((plot,)),)),))
    assert report.plots == {"one": plot}


def test_a_file_says_what_it_shows(demo_report, tmp_path):
    """Its alternative text, for those who do not see it."""
    write_figure(demo_report, "curves", tmp_path / "x.svg")
    assert demo_report.plots["curves"].alt_text in (tmp_path / "x.svg").read_text()
    write_figure(demo_report, "curves", tmp_path / "x.pdf")
    assert b"/Title" in (tmp_path / "x.pdf").read_bytes()


def test_boxes_without_a_fill_have_none():
    box = {"type": "rect", "x0": 0, "x1": 1, "y0": 0, "y1": 1, "line": {"color": "#000000", "width": 1}}
    shapes = [{**box, "fillcolor": "rgba(0,0,0,0)", "opacity": 1}, {**box, "fillcolor": "#ff0000", "opacity": 0.35}]
    drawn = draw_plot(plot_of(figure([], 300, shapes=shapes)))
    faces = [patch.get_facecolor() for patch in drawn.axes[0].patches]
    assert faces == [(0, 0, 0, 0), (1, 0, 0, 0.35)]


@pytest.mark.parametrize(("ends", "most"), [([0, 1.02], 0.75), ([20, -0.5], 3)])
def test_axes_of_numbers_are_wider_than_high_and_those_of_rows_as_high_as_their_names_need(ends, most):
    drawn = draw_plot(plot_of(figure([], 560, yaxis={"range": ends})))
    assert drawn.get_figheight() == pytest.approx(min(most * COLUMN_WIDTH, 560 * 8 / 13 / 72))


def test_steps_are_drawn_as_steps():
    line = {"color": "#0072B2", "width": 2}
    points = [(1, 0.2), (2, 0.4)]
    drawn = draw_plot(
        plot_of(figure([line_series("a", points, {**line, "shape": "hv"}), line_series("b", points, line)], 300))
    )
    lines = [one for one in drawn.axes[0].lines if len(one.get_xdata())]
    assert [one.get_drawstyle() for one in lines] == ["steps-post", "default"]
