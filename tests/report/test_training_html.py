"""The page of faulty training runs: everything there, names only as text, figures that say what the records say."""

import json
import math
import re
from dataclasses import replace

import pytest

from report.conftest import HOSTILE
from report.test_report_html import BROWSER, Page, check_harmless, opened
from report.test_training_info import (
    CLASSES,
    CORNERS,
    MIXED,
    STEPS,
    classes,
    curve,
    group,
    guarded,
    parts,
    points,
    result,
)
from unsilent.outcomes.training import TrainingOutcome
from unsilent.render.pages import is_unsilent_page
from unsilent.render.report_page import figures_by_place as figures_of
from unsilent.render.report_page import report_html, write_report
from unsilent.studies.training.necessary_conditions import LEAST, MOST, conditions_figure, points_to_plot
from unsilent.studies.training.plots import (
    LOOKS,
    ROWS,
    THIN,
    classes_figure,
    log_axis_ticks,
    loss_figure,
    metric_figure,
    peaks,
    thinned,
    training_pvf_figure,
)
from unsilent.studies.training.records import ConditionPoint
from unsilent.studies.training.report import SHAPES, facts, key_numbers, report


def render_training_html(found):
    return report_html(report(found))


def figures(found):
    return figures_of(report(found))


EVERYTHING = replace(CORNERS["guard"], parts=parts())


def test_every_class_has_a_look_of_its_own():
    assert set(LOOKS) == set(TrainingOutcome)
    assert len(set(LOOKS.values())) == len({symbol for _, symbol in LOOKS.values()}) == len(CLASSES)
    assert {symbol for _, symbol in LOOKS.values()} == set(SHAPES)
    assert len(set(SHAPES.values())) == len(SHAPES)
    found = result(dict.fromkeys(CLASSES, 2))
    markers = classes_figure(found)["data"][0]["marker"]
    assert list(zip(markers["color"], markers["symbol"], strict=True)) == list(LOOKS.values())
    page = render_training_html(found)
    for name in CLASSES:
        colour, symbol = LOOKS[TrainingOutcome(name)]
        assert f'<span style="color: {colour}" aria-hidden="true">{SHAPES[symbol]}</span> {name}<' in page, name


def test_everything_is_there():
    page = Page(render_training_html(EVERYTHING))
    check_harmless(page)
    for wanted in (
        "has the highest training PVF", "Which values precede harm", "Training PVF", "Under the guard", "How to read this report",
        "c0ffee",
        "unsilent training train-toy", "torch 2.13.0", "a toy", "latent harm", "random/x/3: RD at op:conv", "grad_wt",
        "steps 20 to 99", "up to 1", "README of He et al.", "sharp_within",
        "seed of the faults",
    ):  # fmt: skip
        assert wanted in page.text or wanted.capitalize() in page.text, wanted
    names = set(figures(EVERYTHING))
    assert {"classes", "parts", "guard", "conditions", "group-0", "metric-low-test", "loss-low-test"} <= names
    assert "loss-immediate-nan" in names  # its steps before the lost one are finite
    placed = {
        value.removeprefix("figure-") for key, value in page.attributes if key == "id" and value.startswith("figure-")
    }
    assert placed - {"data"} == names


@pytest.mark.parametrize("name", CORNERS)
def test_corners_render(name):
    import plotly.graph_objects as go

    page = Page(render_training_html(CORNERS[name]))
    check_harmless(page)
    assert page.count("h1") == 1
    assert not re.search(r"\b(nan|inf)\b(?!-)", re.sub(r"-nan|not finite", "", page.text.replace("∞, NaN", "")))
    for figure in figures(CORNERS[name]).values():
        go.Figure(json.loads(json.dumps(figure, allow_nan=False)))


def test_hostile_names_are_only_text():
    text = render_training_html(CORNERS["hostile"])
    page = Page(text)
    check_harmless(page)
    for name in (*HOSTILE, "<b>x</b>"):
        visible = name.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
        assert visible in page.text
        if "<" in name:
            assert name not in text
    assert not page.count("b")
    drawn = json.dumps(figures(CORNERS["hostile"]), ensure_ascii=False)
    for bad in ("<script", "<img", "<a ", "<b>x", "template", "\u202e", "\x1b"):
        assert bad not in drawn, bad


def test_numbers_at_the_head():
    told = {term: (text, small) for term, text, small in key_numbers(result())}
    assert told["different"] == ("26 %", "[17, 36]")
    assert told["harmful"] == ("20 %", "[12, 30]")
    assert told["cost of a trial"] == ("40 %", "of a run's steps")
    assert {term: text for term, text, _ in key_numbers(CORNERS["parts"])}["largest training PVF"] == "4.5 %"
    assert ("latent", "< 53 %", "") in key_numbers(CORNERS["all nan"])


def test_facts_name_what_was_asked():
    spec = {"seed": 3, "init": 7, "faults": (("RD", 2.0), ("bitflip:bits=30", 1.0)), "phases": ("fwd",), "value": None}
    told = dict(facts(result(spec=spec)))
    assert told["faults"] == "2*RD, 1*bitflip:bits=30"
    assert told["seed of the training"] == "7"
    assert "value" not in told


def test_no_class_hides_behind_an_axis():
    found = figures(result({"masked-benign": 999, "low-test": 1}))["classes"]
    low = found["layout"]["xaxis"]["range"][0]
    shown, none = found["data"]
    assert min(shown["x"]) == 0.001
    assert all(math.log10(x) > low for x in (*shown["x"], *none["x"]))
    assert len(shown["x"]) + len(none["x"]) == len(CLASSES)


def test_groups_of_one_are_not_drawn_and_of_many_the_worst():
    assert sum(name.startswith("group-") for name in figures(result())) == 3
    many = figures(CORNERS["many"])["group-0"]
    assert many["layout"]["yaxis"]["ticktext"][0] == "layer59"
    assert len(many["layout"]["yaxis"]["ticktext"]) == ROWS
    assert "only the 24 most harmful are drawn" in Page(render_training_html(CORNERS["many"])).text


def test_a_curve_lies_at_its_steps():
    mine, golden = curve(step=50), curve(step=20)
    found = metric_figure([mine], golden, STEPS)
    broad, line = found["data"]
    assert (broad["x"][0], broad["x"][-1]) == (29, STEPS - 1)  # ten steps are averaged, drawn at the last of them
    assert (line["x"][0], line["x"][-1]) == (59, STEPS - 1)
    assert [shape["x0"] for shape in found["layout"]["shapes"]] == [50]
    short = curve("immediate-nan", STEPS - 1, 1)
    assert metric_figure([short], golden, STEPS)["data"][1]["x"] == [STEPS - 1]


def test_a_lost_loss_is_marked_above_the_others():
    lost = curve("short-term-nan", step=50, ran=4)
    line, cross = loss_figure([lost], STEPS)["data"]
    assert line["y"] == [1.0, 0.5, pytest.approx(1 / 3), None]
    assert cross["x"] == [53]
    assert cross["y"][0] > 1.0
    assert loss_figure([curve("immediate-nan", 50, 1)], STEPS) is None
    page = render_training_html(result(curves=(curve("immediate-nan", 50, 1),)))
    assert "No loss from the fault's step on is finite." in Page(page).text


def test_long_curves_are_thinned_without_losing_peaks_or_ends():
    count = 10 * THIN + 3
    xs, ys = thinned(range(count), [float(i) for i in range(count)])
    assert len(xs) <= THIN
    assert (xs[-1], ys[-1]) == (count - 1, count - 1)
    losses = [1.0] * count
    losses[777], losses[888] = 1e20, None
    xs, ys = peaks(5, losses)
    assert len(xs) <= THIN
    assert 1e20 in ys
    assert ys.count(None) == 1


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.2), (-2.0, 1.0), (-3.0, 37.0), (-300.0, 308.0)])
def test_decades_are_few_and_ascending(low, high):
    ticks = log_axis_ticks(low, high)
    assert len(ticks["tickvals"]) == len(ticks["ticktext"])
    assert ticks["tickvals"] == sorted(ticks["tickvals"])
    assert 1 <= sum(low <= math.log10(t) <= high for t in ticks["tickvals"]) <= 10


def test_conditions_stand_at_their_ratios_and_edges():
    some = (
        ConditionPoint("random/x/1", "low-test", (10.0, 1e4, 1e3)),
        ConditionPoint("random/x/2", "masked-benign", (0.0, None, 0.5)),
        ConditionPoint("random/x/3", "immediate-nan", (math.inf, 1.0, None)),
    )
    found = conditions_figure(some)
    at = {t["name"]: (t["x"][0], t["y"][0]) for t in found["data"]}
    assert at["low-test 1"] == (4.0, 3.0)  # the larger of both moments, in decades
    x, y = found["layout"]["xaxis"], found["layout"]["yaxis"]
    ends = dict(zip(x["ticktext"], x["tickvals"], strict=True))
    assert at["masked-benign 1"][0] == pytest.approx(ends["0, missing"], abs=0.2)
    assert at["immediate-nan 1"][0] == pytest.approx(ends["∞, NaN"], abs=0.2)
    assert at["immediate-nan 1"][1] < math.log10(0.5)
    assert "∞, NaN" not in y["ticktext"]
    dashed = [s for s in found["layout"]["shapes"] if s["line"]["dash"] == "dash"]
    assert [(s.get("x0"), s.get("y0")) for s in dashed] == [(2.0, 0), (0, 2.0)]
    for trace in found["data"]:
        assert x["range"][0] <= trace["x"][0] <= x["range"][1]
        assert y["range"][0] <= trace["y"][0] <= y["range"][1]
        colour, symbol = LOOKS[TrainingOutcome(trace["name"].split()[0])]
        assert (trace["marker"]["color"], trace["marker"]["symbol"]) == (colour, symbol)


@pytest.mark.parametrize(("name", "title"), [("no moving", "gradient history"), ("moving alone", "moving statistic")])
def test_one_kind_alone_is_drawn_by_class(name, title):
    found = conditions_figure(CORNERS[name].points)
    assert title in found["layout"]["xaxis"]["title"]["text"]
    names = found["layout"]["yaxis"]["ticktext"]
    assert names == [outcome for outcome in CLASSES if MIXED.get(outcome)]
    for row, trace in enumerate(found["data"]):
        assert all(abs(y - row) < 0.5 for y in trace["y"])
    assert conditions_figure(CORNERS["nothing watched"].points) is None
    assert "Which values precede harm" not in Page(render_training_html(CORNERS["nothing watched"])).text


def test_of_many_masked_trials_some_are_drawn_of_others_all():
    counts = {"masked-benign": 2 * MOST + 1, "low-test": 300}
    many = points(counts, (0.5, LEAST / 10, 0.2))
    kept = points_to_plot(many)
    assert sum(p.outcome == "low-test" for p in kept) == 300
    assert MOST / 2 < sum(p.outcome == "masked-benign" for p in kept) <= MOST
    names = [t["name"] for t in conditions_figure(many)["data"]]
    assert names == [f"masked-benign {2 * MOST + 1:,}", "low-test 300"]  # the legend counts all
    assert f"At most {MOST} of the masked trials are drawn" in Page(render_training_html(result(points=many))).text


def test_parts_have_a_row_each_and_a_series_for_each_kind():
    found = training_pvf_figure(parts())
    assert found["layout"]["yaxis"]["ticktext"] == ["stem", "head"]
    params, optim, none = found["data"]
    assert (params["name"], params["x"]) == ("param", [0.045])
    assert (optim["name"], optim["x"], optim["marker"]["symbol"]) == ("optim", [None], "square")  # for the legend
    assert none["x"] == [pytest.approx(0.01828, abs=1e-4)]
    assert none["marker"]["color"] == optim["marker"]["color"]


def test_guarded_sizes_without_a_fault_are_not_drawn():
    found = figures(CORNERS["guard"])["guard"]
    assert found["layout"]["yaxis"]["ticktext"] == ["1 to 100 (5)", "above 100 (15)"]
    assert found["data"][0]["x"] == [0.2, 1.0]
    empty = replace(guarded(), sizes=())
    assert "guard" not in figures(result(guard=empty))


def test_the_table_of_groups_has_a_column_for_each_class_seen():
    found = result({"masked-benign": 3, "low-test": 1}, classes=classes({"masked-benign": 3, "low-test": 1}))
    text = render_training_html(
        replace(found, groups={"layer": (group("a", {"low-test": 1}), group("b", {"masked-benign": 3}))})
    )
    table = text[text.index("<h2>Where faults do harm") : text.index("<h2>Which values precede harm")]
    heads = re.findall(r'<button type="button">([^<]+)</button>', table)
    assert heads == ["layer", "trials", "different, %", "harmful, %", "latent, %", "low-test", "masked-benign"]
    row = re.search(r'<tr[^>]*><td class="text">a</td>(.*?)</tr>', table)[1]
    assert re.findall(r">([^<]+)</td>", row) == ["1", *["100 [2, 100]"] * 3, "1", "0"]


def test_the_page_is_written_whole(tmp_path):
    path = write_report(report(EVERYTHING), tmp_path / "t.html")
    assert is_unsilent_page(path)
    assert path.stat().st_size < 6_000_000


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("name", ["everything", "hostile", "extremes"])
@pytest.mark.slow
def test_a_browser_draws_it_without_a_word(name, tmp_path):
    found = {"everything": EVERYTHING, **CORNERS}[name]
    text, console = opened(write_report(report(found), tmp_path / "t.html"), tmp_path / "profile")
    assert console == []
    for figure in figures(found):
        start = text.index(f'id="figure-{figure}"')
        assert 'class="main-svg"' in text[start : start + 3000], figure
    assert not Page(text).count("img")
