"""The terminal table: golden text, limits of length, and names that try to be markup."""

import io

import pytest
from rich.console import Console

from unsilent.errors import UsageError
from unsilent.report.terminal import TOP, render


def text_of(result, plain=False, width=120, **more):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    render(result, console, plain, **more)
    return console.file.getvalue()


def test_plain_is_stable(result, row, no_trial):
    rows = [
        row("emb", estimate=0.0, low=0.0, high=0.003827, n=1000),
        row("top mlp", estimate=0.0031, low=0.0018, high=0.0046, n=1000, units=100000, sdc=248, due=62),
        no_trial("none"),
        row("model", "model", estimate=0.002, low=0.001, high=0.003, n=2000, units=1000, sdc=1, due=1),
    ]
    assert text_of(result(rows, notes=("mind this",)), plain=True, width=60).splitlines() == [
        "# dlrm: parameter vulnerability factor (PVF), bitflip at param:*",
        "# 6,000 trials on 2,048 samples in 2 batches, AUC 0.7931; unit sample, judge top1(), law per-element, seed 7",
        "# A random single-bit flip in `top mlp` makes an output wrong with probability 0.31 % [0.18, 0.46]; "
        "the intervals of the components overlap: ranking them needs more trials.",
        "level      target   parent  flips  pvf%      low%  high%  n     sdc  due  silent",
        "component  emb      -       1      <0.39     0     0.39   1000  0    0    –",
        "component  top_mlp  -       1      0.31      0.18  0.46   1000  248  62   80%",
        "component  none     -       1      no_trial  0     100    0     0    0    –",
        "model      model    -       1      0.20      0.10  0.30   2000  1    1    50%",
        "# note: mind this",
        "# 95 % intervals, n counts faults; 93.4 s (3 min CPU) on cpu, float32",
    ]


def test_columns_of_a_pipe_never_shift(hostile, demo, corners):
    for study in (hostile, demo, *corners.values()):
        lines = [line for line in text_of(study, plain=True, fit_per_bit=1e-4).splitlines() if line[0] != "#"]
        assert {len(line.split()) for line in lines} in ({11}, {14})


def test_rich_table(demo):
    text = text_of(demo, fit_per_bit=1e-4)
    assert "top_mlp" in text
    assert "interval %" in text
    assert "< 0.77" in text
    assert "FIT" in text
    assert text.count("model  ") >= 3
    assert all(note in text for note in demo.notes)
    assert "FIT" not in text_of(demo).replace("FIT-", "")


def test_many_layers_stay_readable(corners):
    for plain in (False, True):
        text = text_of(corners["deep"], plain)
        assert text.count("encoder.layers") == TOP
        assert "… and 180 more rows of layers and bits: --json and the HTML report have them all." in text


def test_names_are_not_markup(hostile):
    for plain in (False, True):
        text = text_of(hostile, plain, width=200)
        assert "[red]x[/red]" in text
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_no_colour_when_plain(demo):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor")
    render(demo, console, True)
    assert "\x1b" not in console.file.getvalue()
    assert not set("─│┃━╭") & set(console.file.getvalue())


def test_corners(corners):
    for name, study in corners.items():
        for plain in (False, True):
            assert study.workload in text_of(study, plain), name
    assert "500 trials of 6,000 planned" in text_of(corners["no trial"])
    assert "note: no FIT: FIT needs" in text_of(corners["rate"], fit_per_bit=1e-4)


def test_a_wrong_rate_is_refused(demo):
    with pytest.raises(UsageError):
        text_of(demo, fit_per_bit=-1)
