"""The HTML page of a comparison: offline, escaped, complete; its forest plot is right; opened in a browser where there is one."""

import json

import pytest

from report.showing import figures, render_html, write_html
from report.test_report_html import BROWSER, Page, check_harmless, opened
from unsilent.basics.errors import UsageError
from unsilent.render.pages import is_unsilent_page
from unsilent.studies.pvf.comparison_report import LOOKS, forest
from unsilent.studies.pvf.report import BARS

HIGHER, LOWER, SAME = (colour for _, colour in LOOKS.values())


def test_hostile_names_are_only_text(comparisons, hostile_names):
    text = render_html(comparisons["hostile"])
    page = Page(text)
    check_harmless(page)
    for name in hostile_names:
        assert name.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e") in page.text
        if "<" in name:
            assert name not in text
    assert "template" not in json.dumps(figures(comparisons["hostile"]))  # hovertemplate would read %{x} in a name


def test_everything_is_there(comparisons):
    demo = comparisons["demo"]
    page = Page(render_html(demo))
    check_harmless(page)
    told = " ".join(page.text.split())
    for wanted in (
        *(row.target for row in demo.rows),
        *(side.store for side in (demo.a, demo.b)),
        *(side.campaign for side in (demo.a, demo.b)),
        *(side.command for side in (demo.a, demo.b)),
        demo.command,
        "bfloat16",
        "Zou and Donner",
        "Holm",
        "at most 5 %",
        "is paired" if not any(r.is_paired for r in demo.rows) else "rows are paired",
    ):
        assert wanted in told, wanted
    assert len([t for t, _ in page.tags if t == "tr"]) > len(demo.rows)


def test_all_render_and_figures_are_valid_plotly(comparisons):
    import plotly.graph_objects as go

    for name, found in comparisons.items():
        check_harmless(Page(render_html(found)))
        for drawn in figures(found).values():
            go.Figure(json.loads(json.dumps(drawn, allow_nan=False)))
        assert bool(figures(found)) == any(r.difference.estimate is not None for r in found.rows), name


def test_the_forest_shows_each_difference_once_with_its_limits(comparison, compared, result, row):
    a = [row(n, estimate=0.10, low=0.05, high=0.2) for n in ("same", "up", "down")]
    b = [
        row("same", estimate=0.11, low=0.05, high=0.2),
        row("up", estimate=0.5, low=0.4, high=0.6),
        row("down", estimate=0.01, low=0.0, high=0.03),
    ]
    rows = [
        compared(x, y, p, paired)
        for x, y, p, paired in zip(a, b, (0.9, 0.001, 0.02), (False, True, False), strict=True)
    ]
    drawn = forest(rows)
    seen = {}
    for trace in drawn["data"]:
        for i, place in enumerate(trace["y"]):
            low = trace["x"][i] - trace["error_x"]["arrayminus"][i]
            high = trace["x"][i] + trace["error_x"]["array"][i]
            seen[place] = (trace["x"][i], low, high, trace["marker"]["color"], trace["marker"]["symbol"][i])
    for i, (one, colour, symbol) in enumerate(
        zip(rows, (SAME, HIGHER, LOWER), ("circle", "diamond", "circle"), strict=True)
    ):
        limits = (one.difference.estimate, one.difference.low, one.difference.high)
        assert seen[i][:3] == pytest.approx([100 * x for x in limits])
        assert seen[i][3:] == (colour, symbol)
    assert drawn["layout"]["yaxis"]["ticktext"] == ["same", "up", "down"]
    start, end = drawn["layout"]["xaxis"]["range"]
    assert start < min(s[1] for s in seen.values()) < 0 < max(s[2] for s in seen.values()) < end
    zero = drawn["layout"]["shapes"][0]
    assert (zero["x0"], zero["x1"]) == (0, 0)


def test_every_number_of_flips_has_its_own_scale(comparisons):
    drawn = figures(comparisons["demo"])
    assert {"forest-0", "forest-1", "forest-2", "layers"} == set(drawn)
    assert drawn["forest-0"]["layout"]["yaxis"]["ticktext"][-1] == "model"


def test_many_rows_leave_the_most_surprising(comparison, compared, result, row):
    many = [row(f"t{i}", "tensor") for i in range(60)]
    rows = [compared(r, r, p=1 - i / 100) for i, r in enumerate(many)]
    found = comparison(result(many), result(many), rows)
    names = figures(found)["forest-0"]["layout"]["yaxis"]["ticktext"]
    assert names == [f"t{i}" for i in range(20, 60)]
    assert len(names) == BARS
    assert f"The {BARS} rows with the smallest p values are drawn" in Page(render_html(found)).text


def test_it_is_written_like_a_report(comparisons, tmp_path):
    path = write_html(comparisons["demo"], tmp_path / "c.html")
    assert is_unsilent_page(path)
    with pytest.raises(UsageError, match="choose another path"):
        write_html(comparisons["demo"], tmp_path / "no" / "c.html")


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
@pytest.mark.parametrize("name", ["demo", "hostile", "nothing", "same"])
@pytest.mark.slow
def test_browser_draws_it_without_a_word(name, comparisons, tmp_path):
    path = write_html(comparisons[name], tmp_path / "c.html")
    text, console = opened(path, tmp_path / "profile")
    assert console == []
    assert text.count("main-svg") >= len(figures(comparisons[name]))
