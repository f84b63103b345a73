"""The terminal table: golden text, limits of length, and names that try to be markup."""

from dataclasses import replace

import pytest

from report.showing import render_html, report_of, text_of
from report.test_report_html import Page
from unsilent.basics.errors import UsageError
from unsilent.render.report_terminal import report_as_preformatted_html
from unsilent.studies.pvf.analysis import MIXED_WIDTHS_REASON
from unsilent.studies.pvf.records import MOST_LAYERS_SHOWN


def test_plain_is_stable(result, row, no_trial):
    rows = [
        row("emb", estimate=0.0, low=0.0, high=0.003827, n=1000),
        row(
            "top mlp",
            estimate=0.0031,
            low=0.0018,
            high=0.0046,
            n=1000,
            units=10**5,
            sdc=248,
            due=62,
            incorrect_trials=7,
        ),
        no_trial("none"),
        row("model", "model", estimate=0.002, low=0.001, high=0.003, n=2000, units=1000, sdc=1, due=1),
    ]
    assert text_of(result(rows, notes=("mind this",)), plain=True, width=60).splitlines() == [
        "# A random single-bit flip in `top mlp` makes an output wrong with probability 0.31 % [0.18, 0.46]; "
        "the order of the components is not established (joint intervals overlap): run more trials.",
        "# dlrm: parameter vulnerability factor (PVF), bitflip at param:*",
        "# mind this",
        "level      target   parent  flips  estimate  low     high      n     sdc  due  silent  deciding",
        "component  emb      -       1      0         0       0.003827  1000  0    0    -       0",
        "component  top_mlp  -       1      0.0031    0.0018  0.0046    1000  248  62   0.8     7",
        "component  none     -       1      -         0       1         0     0    0    -       0",
        "model      model    -       1      0.002     0.001   0.003     2000  1    1    0.5     0",
        "# 6,000 trials on 2,048 samples in 2 batches, AUC 0.7931; judge top1 counts wrong samples; "
        "faults drawn per-element, seed 7",
        "# 95 % intervals; n counts faults; joint intervals, which hold for all targets at once, decide comparisons",
        "# silent %: of the wrong samples, those with finite outputs; due %: of all, those with NaN, infinity or an error",
        "# rows of several targets, like model, add up counts and weight percentages by how likely a fault is in each target",
        "# 93.4 s (3 min CPU) on cpu, float32",
    ]


def test_limits_are_named_for_what_they_are(result, row):
    """In the terminal and on the page: none where rows are exact, bounds of a list that was run in part, else intervals."""
    drawn = row("a", estimate=0.3, low=0.2, high=0.4)
    exact = row("b", estimate=0.01766, low=0.01766, high=0.01766, method="exhaustive")
    part = row("c", estimate=0.1, low=0.05, high=0.6, method="part of a list")
    cases = {
        "all rows are exact, because every fault was tried; n counts": [exact],
        "; rows are exact where every fault was tried; n counts": [exact, drawn],
        "for partly run fault lists, bounds that allow any outcome of the remaining faults; n counts": [part],
        "for partly run fault lists, bounds that allow any outcome of the remaining faults; rows are exact where every": [
            part,
            exact,
        ],
        "95 % intervals; n counts faults; joint intervals, which hold": [drawn],
    }
    for said, rows in cases.items():
        told, page = text_of(result(rows), width=300), Page(render_html(result(rows))).text
        assert said in told
        assert said.partition("; n counts")[0].lstrip("a;") in page
        assert ("intervals" in told) == (drawn in rows)
        for text in (told, page):
            assert ("95 %" in text) == (drawn in rows)
        if exact in rows:
            assert "1.766" in told
            assert "[1.766" not in told + page
            (line,) = (line for line in told.splitlines() if line.split()[:1] == ["b"])
            assert line.split()[:5] == ["b", "1", "1.766", "exact", "500"]
    told = [line.split() for line in text_of(result([exact]), plain=True).splitlines() if line[0] != "#"]
    assert [line[4:7] for line in told] == [["estimate", "low", "high"], ["0.01766"] * 3], (
        "numbers stay numbers in a pipe"
    )


def test_heat_maps_of_all_faults_do_not_rest_on_few(demo):
    def lead(found):
        return Page(render_html(found)).text.partition("Palest colour: trials, but no wrong output.")[2][:50]

    rows = tuple(replace(r, low=r.estimate, high=r.estimate) for r in demo.rows)
    assert "Each cell rests on few trials" in lead(demo)
    assert "few trials" not in lead(replace(demo, rows=rows))


def test_columns_of_a_pipe_never_shift(hostile, demo, corners):
    for study in (hostile, demo, *corners.values()):
        lines = [line for line in text_of(study, plain=True, fit_per_bit=1e-4).splitlines() if line[0] != "#"]
        assert {len(line.split()) for line in lines} in ({12}, {15})


def test_rich_table(demo):
    text = text_of(demo, fit_per_bit=1e-4)
    assert "top_mlp" in text
    assert "interval %" in text
    assert "< 0.74" in text
    assert "FIT" in text
    assert text.count("model  ") >= 3
    assert all(note in text for note in demo.notes)
    assert "FIT" not in text_of(demo).replace("FIT-", "")


def test_many_layers_stay_readable(corners):
    text = text_of(corners["deep"])
    assert text.count("encoder.layers") == MOST_LAYERS_SHOWN
    assert "and 180 more in the report" in text
    assert text_of(corners["deep"], plain=True).count("encoder.layers") == 200


def test_names_are_not_markup(hostile):
    for plain in (False, True):
        text = text_of(hostile, plain, width=200)
        assert "[red]x[/red]" in text
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_no_colour_when_plain(demo):
    text = text_of(demo, True, force=True)
    assert "\x1b" not in text
    assert not set("─│┃━╭") & set(text)


def test_corners(corners):
    for name, study in corners.items():
        for plain in (False, True):
            assert study.workload in text_of(study, plain), name
    assert "500 of 6,000 planned trials have been run" in text_of(corners["no trial"])
    assert "no FIT: FIT needs" in text_of(corners["rate"], fit_per_bit=1e-4)


def test_a_wrong_rate_is_refused(demo):
    with pytest.raises(UsageError):
        text_of(demo, fit_per_bit=-1)


def test_no_fit_for_mixed_widths(result, row):
    study = result(
        [row("a"), row("quantised", widest_share_of_bits=0.7), row("model", "model", widest_share_of_bits=0.9)]
    )
    text = text_of(study, fit_per_bit=1e-4, width=80)
    assert "no FIT for quantised, model: mixed element widths" in text
    table = text[text.index("Failures per") :]
    assert [line.split()[4:] for line in table.splitlines() if "– " in line] == [
        ["–", *MIXED_WIDTHS_REASON.split()]
    ] * 2
    lines = text_of(study, plain=True, fit_per_bit=1e-4).splitlines()
    assert [line.split()[-3:] for line in lines if line.startswith("model")] == [["-"] * 3]
    assert all(line.startswith(("# ", "level ", "component ", "model ")) for line in lines)


def test_due_is_the_weighted_share(result, row):
    """The model row pools counts of parts that were not sampled in proportion: only shares may be multiplied."""
    model = row("model", "model", estimate=0.02, low=0.01, high=0.03, sdc=1, due=999, silent_share=0.75)
    all_silent = row("a", estimate=0.02, low=0.01, high=0.03, silent_share=1.0)
    lines = text_of(result([all_silent, row("b", estimate=0.0, low=0.0), model])).splitlines()
    dues = {line.split()[0]: line.split()[-1] for line in lines if line.split()[:1] in (["a"], ["b"], ["model"])}
    assert dues == {"a": "0", "b": "–", "model": "0.5"}
    assert "999" not in text_of(result([model]))
    assert "999" in text_of(result([model]), plain=True)


def test_a_component_of_one_layer_is_said_once(result, row):
    rows = [
        row("head"),
        row("head", "layer", "head"),
        row("body"),
        row("body.0", "layer", "body"),
        row("model", "model"),
    ]
    text = text_of(result(rows))
    assert text[text.index("Layers") :].count("head") == 0
    assert "body.0" in text
    assert text_of(result(rows), plain=True).count(" head ") == 3
    other = text_of(result([row("head"), row("head", "layer", "head", n=7), row("model", "model")]))
    assert other[other.index("Layers") :].count("head") == 2
    many = [row(f"l{i}", "layer", "body", estimate=0.01 + i / 1000) for i in range(MOST_LAYERS_SHOWN + 1)]
    assert "and 1 more in the report" in text_of(result([row("body"), *many]))


def test_operations_of_a_component_itself_are_named_so(result, row):
    rows = [row("block"), row("block", "layer", "block", n=70), row("block.conv", "layer", "block"), row("m", "model")]
    text = text_of(result(rows))
    layers = text[text.index("Layers") :]
    named = [line.split("  ")[0].strip() or line.strip().split("  ")[0] for line in layers.splitlines()]
    assert [name for name in named if "block" in name] == ["block (itself)", "block.conv"]
    assert "itself" not in text[: text.index("Layers")]
    assert "itself" not in text_of(result(rows), plain=True)


def test_says_which_dtypes_were_corrupted(corners, demo):
    assert "on cpu, float32 and int64 corrupted" in " ".join(text_of(corners["mixed"]).split())
    assert text_of(demo).rstrip().endswith("on cpu, float32")


def test_eighty_columns_fold_names_where_they_part(result, row):
    name = "encoder.layers.10.self_attention.conv/v1"
    wide = {"estimate": 0.12345, "low": 0.12301, "high": 0.12391, "n": 1_000_000, "flips": 128}
    text = text_of(result([row(name, **wide), row("model", "model", **wide)]), width=80)
    assert max(map(len, text_of(result([row(name, **wide)]), width=80).splitlines())) <= 80
    assert "conv/v1" in text
    assert "self_attention." in text
    assert "[12.30, 12.40]" in text


def test_names_are_escaped_in_a_notebook(hostile, result, row):
    for found in (hostile, result([row("<script>alert(1)</script>"), row("<img src=x>")])):
        shown = report_as_preformatted_html(report_of(found))
        assert shown.startswith("<pre ")
        assert not any(mark in shown for mark in ("<script", "<img", "<a "))
        assert "&lt;script&gt;" in shown
