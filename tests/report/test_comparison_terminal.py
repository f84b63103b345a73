"""A comparison in the terminal: golden text, widths, and names that try to be markup."""

import re
from dataclasses import replace

from report.showing import render_html, text_of
from report.test_report_html import Page
from unsilent.basics.interval import Interval
from unsilent.report.text import p_value_text, ratio_text, signed
from unsilent.studies.pvf.comparison_report import difference_counts_text, paired_rows_text


def test_plain_is_stable(comparison, compared, result, row, no_trial):
    a = [row("emb", estimate=0.02, low=0.01, high=0.03), no_trial("none"), row("model", "model", estimate=0.015)]
    b = [row("emb", estimate=0.06, low=0.05, high=0.08), no_trial("none"), row("model", "model", estimate=0.016)]
    rows = [compared(x, y, p) for x, y, p in zip(a, b, (0.0004, 0.9, 0.7), strict=True)]
    found = comparison(
        result(a), result(b, store="b.sqlite"), rows, notes=("mind this",), only_b=(row("new", "layer"),)
    )
    assert text_of(found, plain=True, width=60).splitlines() == [
        "# No difference is shown in PVF of the whole model at 1 flip: A 1.5 %, B 1.6 %, difference +0.1 points [-1.2, +1.3].",
        "# parameter vulnerability factor (PVF), bitflip: B (b.sqlite, dlrm) against A (pvf.sqlite, dlrm)",
        "# After correction for multiple comparisons, a difference is shown in 1 of 1 component row (points): `emb` x1 +4.0.",
        "# only in B: new (layer x1)",
        "# mind this",
        "level      target  parent  flips  a      a_n  b      b_n  estimate  low        high       n    ratio"
        "    ratio_low  ratio_high  p       b_is    paired",
        "component  emb     -       1      0.02   500  0.06   500  0.04      0.0258579  0.0623607  500  3    "
        "    1.91833    6.3094      0.0004  higher  no",
        "component  none    -       1      -      0    -      0    -         -1         1          0    -    "
        "    0          inf         -       -       no",
        "model      model   -       1      0.015  500  0.016  500  0.001     -0.012     0.0127047  500  1.066"
        "67  0.261917   4.04486     0.7     -       no",
        "# judge top1 counts wrong samples; faults drawn per-element; one target per component",
        "# A and B also differ in: dtype (A float32, B bfloat16), weights (A 3f3f3f3f, B a0a0a0a0)",
        "# rows in which a difference is shown: component 1 of 1, model 0 of 1 (p after Holm's correction for the rows of a "
        "level)",
        "# 95 % intervals, B - A in percentage points; no row is paired: A and B have different faults",
    ]


def test_columns_of_a_pipe_never_shift(comparisons):
    for name, found in comparisons.items():
        lines = [line for line in text_of(found, plain=True).splitlines() if line[0] != "#"]
        assert {len(line.split()) for line in lines} == {18}, name


def test_lines_fit_and_every_verdict_stays(comparisons):
    for name, found in comparisons.items():
        for width in (80, 100, 200):
            text = text_of(found, width=width)
            assert max(len(line.rstrip()) for line in text.splitlines()) <= width, (name, width)
            main = [r for r in found.rows if r.level in ("component", "model")]
            told = text.split("Layers")[0].split("The 20 layers")[0]
            assert told.count(" higher ") + told.count(" lower ") >= sum(r.differs for r in main), (name, width)


def test_columns_that_have_no_room_are_told(comparisons):
    for width, room in ((80, False), (200, True)):
        text = text_of(comparisons["demo"], width=width)
        assert ("B / A" in text.split("B - A")[1].splitlines()[0]) == room
        assert ("columns that do not fit: B / A, its interval; widen the terminal, or use --plain\n" in text) != room


def test_exact_rows_and_bounds_are_no_intervals(comparison, compared, result, row):
    """Of whole lists, and of lists that were run in part."""

    def of(method, spread):
        values = ((0.02, 0.06), (0.01, 0.015))
        pairs = [
            [row(n, lv, estimate=x, low=x - spread, high=x + spread, method=method) for x in xs]
            for (n, lv), xs in zip((("emb", "component"), ("model", "model")), values, strict=True)
        ]
        rows = [replace(compared(a, b, 0.001, True), method=method) for a, b in pairs]
        return comparison(result(a for a, _ in pairs), result(b for _, b in pairs), rows)

    exact, part = of("whole list", 0.0), of("difference (Zou & Donner), part of a list", 0.005)
    for told in (" ".join(text_of(exact).split()), Page(render_html(exact)).text):
        assert "ll rows are exact, because every fault was tried" in told
        assert "% intervals" not in told
        assert "exact" in told
        assert "[+4" not in told
    assert "1.5 % against 1 % in A, difference +0.5 points.\n" in text_of(exact, width=300)
    for told in (" ".join(text_of(part).split()), Page(render_html(part)).text):
        assert "or partly run fault lists, bounds that allow any outcome of the remaining faults" in told
        assert "% intervals" not in told


def test_names_are_not_markup(comparisons):
    for plain in (False, True):
        text = text_of(comparisons["hostile"], plain, width=200)
        assert "[red]x[/red]" in text
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_itself(comparisons):
    text = text_of(comparisons["same"])
    assert "A and B have the same trials with the same outcomes, so every difference is 0." in text
    assert "every row is paired" in text
    assert "higher" not in text
    assert "not the same" not in text


def test_layers_least_like_chance_come_first(comparisons, comparison, compared, result, row):
    layers = [row(f"l{i:02}", "layer", "enc") for i in range(50)]
    rows = [compared(r, r, p=(i + 1) / 60) for i, r in enumerate(layers)]
    text = text_of(comparison(result(layers), result(layers), rows[::-1]))
    named = [
        line.split()[0]
        for line in text[text.index("with the smallest p values") :].splitlines()
        if re.match(r" *l[0-9]", line)
    ]
    assert named == [f"l{i:02}" for i in range(20)]
    assert "and 30 more in the report" in text
    assert (
        difference_counts_text(comparison(result(layers), result(layers), rows))
        == "rows in which a difference is shown: layer 2 of 50"
    )


def test_pairing_is_told(comparisons):
    demo = comparisons["demo"]
    paired = sum(r.is_paired for r in demo.rows)
    assert paired_rows_text(demo).startswith(f"{paired} of {len(demo.rows)} rows are paired")
    assert text_of(demo).count(" yes") >= sum(r.is_paired for r in demo.rows if r.level in ("component", "model"))


def test_numbers_as_text():
    def interval(estimate, low, high):
        return Interval(estimate, low, high, 0.95, 100, "")

    assert signed(interval(0.5, -0.5, 1.0)).limits == "[-50, +100]"
    assert signed(interval(None, -1, 1)).estimate == "no trial"
    assert signed(interval(0.02, 0.02, 0.02)).limits == "exact"
    assert ratio_text(interval(2.004, 1.002, 4.009)).limits == "[1.0, 4.1]"
    assert ratio_text(interval(None, 0.0, float("inf"))).estimate == "–"
    assert [p_value_text(p) for p in (None, 1.0, 0.0123, 0.5, 1e-9)] == ["–", "1", "0.013", "0.50", "<0.0001"]
