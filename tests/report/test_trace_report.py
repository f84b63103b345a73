"""A trace in terminal and page: what is folded, what is said, names only as text, figures that a browser draws."""

import io
import json
import random
from dataclasses import replace

import pytest
from rich.console import Console

from report.conftest import HOSTILE
from report.test_report_html import BROWSER, Page, check_harmless, opened
from unsilent.basics.fault_trace import (
    BEFORE_FIRST_ROW,
    PHASES,
    FaultTrace,
    OperationDivergence,
    OutputDifference,
    TracedFault,
    TraceRow,
)
from unsilent.render.pages import is_unsilent_page
from unsilent.render.report_page import figures_by_place as figures_of
from unsilent.render.report_page import report_html, write_report
from unsilent.render.report_terminal import render_report
from unsilent.studies.propagation_report import report
from unsilent.studies.propagation_report.plots import (
    PHASE_LOOKS,
    changed_share_figure,
    faults_by_row,
    phase_segments,
    relative_figure,
    share_text,
)
from unsilent.studies.propagation_report.report import (
    MOST,
    ROWS,
    OmittedRows,
    headline,
    rows_to_show,
    worst_change_sentences,
)


def row(name="fc#addmm.0", changed=0, phase="fwd", **more):
    fields = {
        "kernel": "",
        "micro_step": 0,
        "output": 0,
        "dtype": "float32",
        "shape": (4, 25),
        "elements": 100,
        "faulty_type": "",
    }
    numbers = {key: more.pop(key) for key in ("relative", "absolute", "from_zero", "nonfinite") if key in more}
    numbers = {"relative": 0.5, "absolute": 2.0, **numbers} if changed else numbers
    return TraceRow(name=name, phase=phase, change=OutputDifference(changed, **numbers), **fields | more)


def trace(*rows, fault=0, **more):
    return FaultTrace(
        tuple(rows), (TracedFault("op:fc#addmm.0/fwd/out", "op:fc#addmm.0/fwd/out xor 0x1", fault, 1),), runs=3, **more
    )


def step(forward=40, backward=80, update=20, first=10):
    """A training step whose fault spreads from row ``first``."""
    names = [("fwd", forward), ("bwd", backward), ("update", update)]
    rows = [row(f"m{i}#add.0", phase=phase) for phase, n in names for i in range(n)]
    for i in range(first, len(rows)):
        rows[i] = row(rows[i].name, 1 + i % 100, rows[i].phase, relative=10.0 ** (i % 9 - 4))
    return trace(*rows, fault=first)


HOSTILE_TRACE = FaultTrace(
    tuple(row(f"{name}#add.0", 5, PHASES[i % 5], kernel=name if i % 2 else "") for i, name in enumerate(HOSTILE)),
    tuple(TracedFault(f"op:{name}#add.0/fwd/out", name, i) for i, name in enumerate(HOSTILE)),
    OperationDivergence(len(HOSTILE), HOSTILE[0], HOSTILE[1], HOSTILE[2]),
    3,
    HOSTILE,
)
CORNERS = {
    "step": step(),
    "hostile": HOSTILE_TRACE,
    "nothing": trace(row(), row("act#relu.0")),
    "no rows": trace(fault=None, divergence=OperationDivergence(0, "fc#addmm.0", "", "IndexError: out of range")),
    "no fault": FaultTrace((row(),), (), None, 3),
    "before": trace(row(), row("a#b.0", 3), fault=BEFORE_FIRST_ROW),
    "integers": trace(row(changed=3, relative=None, absolute=None, dtype="int64")),
    "nan": trace(
        row(changed=100, relative=None, absolute=None, nonfinite=100), row("x#y.0", 1, from_zero=1, relative=None)
    ),
    "huge": trace(row(changed=1, relative=1.7976931348623157e308), row("x#y.0", 1, relative=5e-324)),
    "shape": trace(row(changed=100, faulty_type="float32[3]")),
}


def shown(found, width=100, plain=False):
    file = io.StringIO()
    render_report(
        report(found, "a step"), Console(file=file, width=width, force_terminal=True, color_system=None), plain
    )
    return file.getvalue()


# -- terminal ----------------------------------------------------------------------------------------------------------


def test_what_is_unchanged_is_folded():
    rows = [row("a#x.0"), row("b#x.0"), row("c#x.0", 7), row("d#x.0"), row("e#x.0", 9)]
    assert rows_to_show(trace(*rows, fault=2)) == [OmittedRows(2, 0), 2, OmittedRows(1, 0), 4]
    text = shown(trace(*rows, fault=2))
    assert "… 2 outputs unchanged" in text
    assert "… 1 output unchanged" in text
    assert "▶ c#x.0" in text
    assert "a#x.0" not in text


def test_a_row_that_a_fault_corrupts_is_shown_golden_or_not():
    assert rows_to_show(trace(row("a#x.0"), row("b#x.0"), row("c#x.0", 1), fault=0)) == [0, OmittedRows(1, 0), 2]


@pytest.mark.parametrize("changed", [0.02, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 59, 60, 61, 150, 3000])
def test_never_more_lines_than_fit(count, changed):
    chance = random.Random(count)
    rows = [row(f"m{i}#x.0", int(chance.random() < changed)) for i in range(count)]
    found = trace(*rows, fault=count // 2)
    lines = rows_to_show(found)
    assert len(lines) <= MOST
    assert count // 2 in lines
    covered = [line.rows if isinstance(line, OmittedRows) else 1 for line in lines]
    assert sum(covered) == count
    seen = sum(line.changed if isinstance(line, OmittedRows) else rows[line].change.changed > 0 for line in lines)
    assert seen == sum(r.change.changed > 0 for r in rows)
    differing = [i for i, r in enumerate(rows) if r.change.changed]
    if differing:
        assert {differing[0], differing[-1]} <= set(lines)
    if len(differing) == len(rows) == 61:
        assert len(lines) == MOST  # no line is wasted


def test_many_faults_do_not_fill_the_table():
    rows = [row(f"m{i}#x.0", i % 2) for i in range(400)]
    found = FaultTrace(tuple(rows), tuple(TracedFault("op:a", "a", i) for i in range(0, 400, 3)), runs=3)
    assert len(rows_to_show(found)) <= MOST
    assert "and 130 faults more" in shown(found)


def test_plain_has_every_row_and_one_word_a_column():
    found = step()
    lines = [line.split() for line in shown(found, plain=True).splitlines() if not line.startswith("#")]
    assert len(lines) == 1 + len(found.rows)
    assert {len(line) for line in lines} == {len(lines[0])}
    head = lines[0]
    for line, one in zip(lines[1:], found.rows, strict=True):
        told = dict(zip(head, line, strict=True))
        assert (told["operation"], told["phase"]) == (one.name, one.phase)
        assert (int(told["changed"]), int(told["elements"])) == (one.change.changed, one.elements)
    assert [line[0] for line in lines[1:] if line[-1] == "x"] == ["10"]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("name", CORNERS)
def test_nothing_is_too_wide(name, width):
    text = shown(CORNERS[name], width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text


def test_headlines():
    assert (
        headline(CORNERS["nothing"])
        == "the fault changed nothing: 2 outputs of operations, all identical to the golden run"
    )
    assert headline(CORNERS["before"]) == "the fault changed 1 of 2 outputs of operations: at a#b.0"
    assert headline(step()) == "the fault changed 130 of 140 outputs of operations: first m10#add.0, last m19#add.0"
    assert headline(CORNERS["no rows"]) == "nothing could be compared: the runs diverge before the first output"
    assert headline(CORNERS["no fault"]) == "no fault was injected, and none of 1 output differs from the golden run"
    assert list(worst_change_sentences(CORNERS["no rows"])) == [
        "the faulty run raised IndexError: out of range, before fc#addmm.0"
    ]
    assert list(worst_change_sentences(CORNERS["nan"])) == [
        "NaN or infinity first appears at fc#addmm.0, in 100 of 100 elements"
    ]


@pytest.mark.parametrize(
    ("changed", "elements", "text"),
    [(0, 10, "0"), (10, 10, "100"), (1, 10**6, "1.0e-04"), (999_999, 10**6, "99.9"), (1, 8, "12"), (5, 1000, "0.5")],
)
def test_a_share_is_never_rounded_to_nothing_or_all(changed, elements, text):
    assert share_text(replace(row(changed=changed), elements=elements)) == text


# -- figures -----------------------------------------------------------------------------------------------------------


def points(figure, name):
    return next(t for t in figure["data"] if t["name"] == name)


def test_every_row_is_one_point():
    found = step()
    drawn = changed_share_figure(found)
    seen = sorted(x for t in drawn["data"] for x in t["x"] if x is not None)
    assert seen == list(range(len(found.rows)))
    for phase in ("fwd", "bwd", "update"):
        name, colour, _ = PHASE_LOOKS[phase]
        mine = points(drawn, name)
        assert mine["marker"]["color"] == colour
        assert [found.rows[x].share for x in mine["x"]] == mine["y"]
        assert all(found.rows[x].phase == phase for x in mine["x"])
    assert points(drawn, "unchanged")["x"] == list(range(10))
    ratios = relative_figure(found)
    assert [found.rows[x].change.relative for x in points(ratios, "backward")["x"]] == points(ratios, "backward")["y"]


def test_phases_are_divided_and_the_fault_is_marked():
    found = step()
    assert [(s.phase, s.first, s.last) for s in phase_segments(found.rows)] == [
        ("fwd", 0, 39),
        ("bwd", 40, 119),
        ("update", 120, 139),
    ]
    lines = [s for s in changed_share_figure(found)["layout"]["shapes"] if s["type"] == "line"]
    assert [s["x0"] for s in lines] == [39.5, 119.5, 10.0]
    assert lines[-1]["line"]["dash"] == "dot"
    (word,) = changed_share_figure(found)["layout"]["annotations"]
    assert (word["text"].strip(), word["x"]) == ("fault", 10.0)
    before = changed_share_figure(CORNERS["before"])["layout"]["shapes"]
    assert [s["x0"] for s in before] == [-0.5]


def test_a_place_that_is_not_known_is_the_first_change():
    assert list(faults_by_row(trace(row(), row("a#b.0", 1), fault=None))) == [1]
    assert list(faults_by_row(trace(row(), fault=None))) == [BEFORE_FIRST_ROW]


@pytest.mark.parametrize("name", CORNERS)
def test_everything_lies_within_its_axis(name):
    import math

    import plotly.graph_objects as go

    for drawn in figures_of(report(CORNERS[name], "x")).values():
        go.Figure(json.loads(json.dumps(drawn, allow_nan=False)))
        low, high = drawn["layout"]["yaxis"]["range"]
        left, right = drawn["layout"]["xaxis"]["range"]
        for points in drawn["data"]:
            for x, y in zip(points["x"], points["y"], strict=True):
                assert x is None or (left < x < right and low <= math.log10(y) <= high)
        assert all(low <= math.log10(t) <= high for t in drawn["layout"]["yaxis"]["tickvals"])


def test_what_has_no_ratio_lies_above():
    drawn = relative_figure(CORNERS["nan"])
    assert points(drawn, "NaN or infinity")["x"] == [0]
    assert points(drawn, "only changes from 0")["x"] == [1]
    assert relative_figure(CORNERS["integers"]) is None
    assert relative_figure(CORNERS["nothing"]) is None


# -- page --------------------------------------------------------------------------------------------------------------


def test_hostile_names_are_only_text():
    text = report_html(report(HOSTILE_TRACE, HOSTILE[0], (("workload", HOSTILE[1]),)))
    page = Page(text)
    check_harmless(page)
    for name in HOSTILE:
        assert name.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e") in page.text
        if "<" in name:
            assert name not in text
    assert "template" not in json.dumps(figures_of(report(HOSTILE_TRACE, "x")))


@pytest.mark.parametrize("name", CORNERS)
def test_every_corner_renders(name, tmp_path):
    info = (CORNERS[name], "a step", (("workload", "tiny"),))
    path = write_report(report(*info), tmp_path / "t.html")
    assert is_unsilent_page(path)
    page = Page(path.read_text())
    check_harmless(page)
    for one in [r for r in info[0].rows if r.change.changed][:50]:
        assert one.label.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e") in page.text


def test_a_long_trace_has_its_first_rows_and_says_so():
    rows = [row(f"m{i}#x.0", 1) for i in range(ROWS + 5)]
    page = Page(report_html(report(trace(*rows), "x")))
    assert "5 more outputs that differ are only in the figures" in " ".join(page.text.split())
    assert page.count("tr") == ROWS + 2 + 1


def test_json_is_plain():
    told = json.loads(json.dumps(HOSTILE_TRACE.to_json(), allow_nan=False))
    assert [r["name"] for r in told["rows"]] == [r.name for r in HOSTILE_TRACE.rows]
    assert (told["rows"][0]["changed"], told["rows"][0]["share"], told["rows"][0]["shape"]) == (5, 0.05, [4, 25])
    assert told["parting"]["text"] == HOSTILE_TRACE.divergence.text


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("name", ["step", "hostile", "nan"])
@pytest.mark.slow
def test_a_browser_draws_it_without_a_word(name, tmp_path):
    info = (CORNERS[name], "a step")
    text, console = opened(write_report(report(*info), tmp_path / "t.html"), tmp_path / "profile")
    assert console == []
    for figure in figures_of(report(*info)):
        start = text.index(f'id="figure-{figure}"')
        assert 'class="main-svg"' in text[start : start + 3000], figure
    assert not Page(text).count("img")
