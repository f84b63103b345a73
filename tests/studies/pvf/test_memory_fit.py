"""Failure rates of an accelerator's memories: against rates known by hand, with and without protection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.faults.hardware.event_shares import DRAWS
from unsilent.report.model import Plot, Table
from unsilent.statistics import clopper_pearson
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.memory_fit import _through
from unsilent.studies.pvf.memory_records import NOTHING_TRIED, MemoryPart
from unsilent.studies.pvf.memory_report import BY_DESCRIPTION
from unsilent.studies.pvf.records import Gate

BATCH, WIDTH = 3, 4
DRAM = {"fit_per_mbit": 2.0**20, "bandwidth": "1B", "reload": 1e6, "holds": ["param:*"]}
SRAM = {"fit_per_mbit": 4 * 2.0**20, "bandwidth": "1B", "holds": ["op:*", "input:*"]}
SINGLE = {"single": ("bitflip", 1.0)}


def description(tmp_path: Path, **memories) -> str:
    lines = ['name = "mine"', 'description = "memories"', "sources = []"]
    for name, (facts, patterns) in memories.items():
        facts = {"size": "1MB", "evidence": "assumed", **facts}
        lines += [f"[memories.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in facts.items())]
        for pattern, (model, share) in patterns.items():
            lines += [f"[memories.{name}.patterns.{pattern}]", f'model = "{model}"', f"share = {share}"]
            lines.append('evidence = "assumed"')
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(lines))
    return str(path)


class Joined(nn.Module):
    """``2 x`` beside ``w``: every flip that is read changes the output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(BATCH, WIDTH))

    def forward(self, x):
        return torch.cat([x * 2, self.w], 1)


def differs(golden, output, batch):
    return (golden.view(torch.int32) != output.view(torch.int32)).any(1)


def workload():
    return unsilent.Workload(Joined(), [torch.rand(BATCH, WIDTH) + 1], judge=differs, name="joined")


def rates(result, level, name):
    (row,) = [r for r in result.memory_fit if (r.level, r.name) == (level, name)]
    return row


def failures(row):
    return row.silent.estimate + row.detectable.estimate


def test_rates_where_every_event_that_is_read_is_a_failure(tmp_path):
    """The product reads x and writes y; the second operation reads y and w and writes both, with which the call ends."""
    path = description(tmp_path, dram=(DRAM, SINGLE), sram=(SRAM, SINGLE))
    result = unsilent.pvf(workload(), accelerator=path, trials=300)
    x = y = w = 4 * BATCH * WIDTH
    call = (x + y) + 2 * (y + w)
    dram, sram = rates(result, "memory", "dram"), rates(result, "memory", "sram")
    assert dram.raw == pytest.approx(8 * w)
    assert failures(dram) == pytest.approx(8 * w)
    read = 8 * x * (x + y) / call + 8 * y * 2 * (y + w) / call
    assert sram.live_bits == pytest.approx(read)
    assert sram.raw == pytest.approx(4 * read)
    assert failures(sram) == pytest.approx(sram.raw)
    # While the product runs, x and y are there; then y and what it is joined to make the output, which is as large as both.
    assert [facts.held for facts in result.memories] == [w, y + 2 * w]
    model = rates(result, "model", "model")
    assert model.raw == pytest.approx(dram.raw + sram.raw)
    assert model.silent.low <= model.silent.estimate <= model.silent.high
    # A fault of a parameter stays for half of the time to a reload on average.
    assert dram.wrong_calls.estimate == pytest.approx(dram.silent.estimate * 5e5 / call)
    assert sram.wrong_calls.estimate == pytest.approx(sram.silent.estimate)


def test_protection_moves_silent_faults_to_detectable_ones(tmp_path):
    patterns = {"single": ("bitflip", 0.5), "double": ("burst:length=2", 0.3), "triple": ("multibit:flips=3", 0.2)}
    plain = unsilent.pvf(workload(), accelerator=description(tmp_path, dram=(DRAM, patterns)), trials=200)
    ecc = {**DRAM, "protection": "sec-ded", "code_word": 64}
    coded = unsilent.pvf(workload(), accelerator=description(tmp_path, dram=(ecc, patterns)), trials=200)
    bare, row = rates(plain, "memory", "dram"), rates(coded, "memory", "dram")
    raw = 8 * 4 * BATCH * WIDTH
    assert bare.raw == row.raw == pytest.approx(raw)
    assert (bare.corrected, bare.detected) == (0, 0)
    assert failures(bare) == pytest.approx(raw)
    assert row.corrected == pytest.approx(0.5 * raw)
    assert row.detected > 0.3 * raw
    assert failures(row) == pytest.approx(0.5 * raw)
    assert row.silent.estimate < 0.2 * raw < bare.silent.estimate
    single = rates(coded, "pattern", "dram/single")
    assert (failures(single), single.silent.n) == (0, 0)


def fit_table(report):
    (section,) = [section for section in report.sections if section.title == "Failure rate of memories"]
    return next(part for part in section.parts if isinstance(part, Table))


def perfect(tmp_path, **more):
    ecc = {**DRAM, "protection": "sec-ded", "code_word": 64}
    patterns = {"single": ("bitflip", 0.75), "double": ("burst:length=2", 0.25)}
    return description(tmp_path, dram=(ecc, patterns), **more)


@pytest.mark.parametrize("more", [{"trials": 10}, {"rel": "20%"}])
def test_perfect_protection_ends_in_a_report_without_trials(tmp_path, more):
    result = unsilent.pvf(workload(), accelerator=perfect(tmp_path), store=tmp_path / "s.sqlite", **more)
    row, raw = rates(result, "model", "model"), 8 * 4 * BATCH * WIDTH
    assert (result.trials_done, result.trials_planned, result.rows) == (0, 0, ())
    assert row.silent == Interval(0.0, 0.0, 0.0, 0.95, 0, NOTHING_TRIED)
    assert (row.detectable.estimate, row.detectable.low, row.detectable.high) == (0.25 * raw,) * 3
    assert rates(result, "pattern", "dram/single").detectable.high == 0
    report = result.report()
    assert report.headline.startswith(
        "No trial was run, because no fault reaches the model. By the description of the accelerator (not measured), silent "
        "FIT is 0; detectable FIT, which counts events that a memory detects but does not correct, is 96"
    )
    assert [section.title for section in report.sections] == ["Failure rate of memories"]
    text = "\n".join((*report.findings, *report.notes, report.method, report.headline))
    assert "every fault" not in text
    assert "all faults" not in text
    assert {row.cells[5].text for row in fit_table(report).rows} == {BY_DESCRIPTION}
    with PvfStore(tmp_path / "s.sqlite") as store:  # read again, as by ``unsilent report``
        assert store.analyse().memory_fit == result.memory_fit


def test_a_memory_that_lets_nothing_through_stays_a_row(tmp_path):
    path = perfect(tmp_path, sram=(SRAM, SINGLE))
    result = unsilent.pvf(workload(), accelerator=path, trials=20)
    dram, sram = rates(result, "memory", "dram"), rates(result, "memory", "sram")
    assert (dram.silent.estimate, dram.silent.high, dram.silent.method) == (0, 0, NOTHING_TRIED)
    assert failures(sram) == pytest.approx(sram.raw)
    whole = rates(result, "model", "model")
    assert failures(whole) == pytest.approx(sram.raw + dram.detected)
    limits = {row.cells[1]: row.cells[5].text for row in fit_table(result.report()).rows}
    assert limits["dram"] == BY_DESCRIPTION != limits["sram"]


def test_memories_without_events_have_rates_of_nothing(tmp_path):
    result = unsilent.pvf(workload(), accelerator=description(tmp_path, dram=({**DRAM, "fit_per_mbit": 0}, SINGLE)))
    assert failures(rates(result, "model", "model")) == 0
    assert "because the memories have no events at all" in result.report().headline


def figure_of(report):
    (plot,) = [part for section in report.sections for part in section.parts if getattr(part, "name", "") == "fit"]
    return plot.figure


def test_the_figure_of_fit_has_the_rates_of_the_rows(tmp_path):
    result = unsilent.pvf(workload(), accelerator=perfect(tmp_path, sram=(SRAM, SINGLE)), trials=20)
    drawn = figure_of(result.report())
    names = drawn["layout"]["yaxis"]["ticktext"]
    assert names[:2] == ["dram (memory)", "sram (memory)"]
    assert names[-1] == "model"
    whole = rates(result, "model", "model")
    for kind in ("silent", "detectable"):
        rate = getattr(whole, kind)
        (dots,) = [series for series in drawn["data"] if series.get("name") == kind]
        place = max(range(len(dots["y"])), key=lambda n: dots["y"][n])
        assert dots["x"][place] == rate.estimate
        assert dots["error_x"]["array"][place] == rate.high - rate.estimate
        first, last = drawn["layout"]["xaxis"]["range"]
        assert 10**first < rate.estimate <= rate.high < 10**last
    silent = next(series for series in drawn["data"] if series.get("name") == "silent")
    assert min(silent["y"]) > 0.5  # silent FIT of the first row is exactly 0 and has no mark


def test_the_figure_of_fit_without_trials_has_detectable_rates_alone(tmp_path):
    result = unsilent.pvf(workload(), accelerator=perfect(tmp_path), trials=20)
    (series,) = figure_of(result.report())["data"]
    assert series["name"] == "detectable"
    assert series["x"] == [96.0] * 3  # of the memory, its component and the model
    corrected = unsilent.pvf(
        workload(),
        accelerator=description(tmp_path, dram=({**DRAM, "protection": "sec-ded", "code_word": 64}, SINGLE)),
    )
    assert not any(isinstance(part, Plot) for part in corrected.report().sections[0].parts)


def test_the_figure_of_fit_at_a_rate_per_bit():
    result = unsilent.pvf(workload(), trials=30)
    drawn = figure_of(result.report(fit_per_bit=0.5))
    (dots,) = drawn["data"]
    assert dots["x"] == [0.5 * 32 * BATCH * WIDTH * row.estimate for row in (result.rows[0], result.rows[-1])]
    assert drawn["layout"]["yaxis"]["ticktext"] == ["other", "model"]


def test_an_assertion_is_refused_where_nothing_reaches_the_model(tmp_path):
    unsilent.pvf(workload(), accelerator=perfect(tmp_path), store=tmp_path / "s.sqlite", trials=10)
    refused = pytest.raises(UsageError, match="but there is no trial, because nothing or too little does; omit")
    with PvfStore(tmp_path / "s.sqlite") as store, refused:
        Gate.parse("model<=1%").check(store.spec, store.baseline)


def test_uncertain_shares_of_a_code_are_in_the_limits(tmp_path):
    """Pairs of flips anywhere are drawn; parity reports those in two words and misses those in one."""
    coded = {**DRAM, "protection": "parity", "code_word": 32}
    path = description(tmp_path, dram=(coded, {"pair": ("bitflip:count=2", 1.0)}))
    result = unsilent.pvf(workload(), accelerator=path, trials=60)
    row, bits = rates(result, "model", "model"), 32 * BATCH * WIDTH
    missed = row.raw * 31 / (bits - 1)  # exactly
    assert row.incorrect.low < missed < row.incorrect.high
    assert row.incorrect.estimate != missed
    share = clopper_pearson(round(row.incorrect.estimate / row.raw * DRAWS), DRAWS, 0.975)
    assert row.incorrect.high >= row.raw * share.high
    assert row.incorrect.low <= row.raw * share.low
    assert row.detectable.low < row.raw - missed < row.detectable.high <= row.raw
    assert any(
        f"Which events of dram/pair the code corrects or reports was counted in up to {DRAWS:,}" in note
        for note in result.notes
    )


def part(name, raw, altered, draws=0):
    return MemoryPart(name, "m", "p", name, name, "", 1.0, raw, 0.0, raw - altered, altered, draws)


def test_a_small_uncertain_part_does_not_widen_the_limits_of_the_whole():
    """Its rate is known to a factor of 6 alone, but it is small beside the other part."""
    parts = [part("large", 100.0, 100.0), part("small", 1.0, 2 / DRAWS, DRAWS)]
    share = clopper_pearson(2, DRAWS)
    low, high = _through(parts, {"large", "small"}, 0.95).limits(0.1, 0.2)
    assert 0.2 * 100 < high == pytest.approx(0.2 * (100 + 2 / DRAWS) + share.high - 2 / DRAWS)
    assert 0.1 * 100 > low == pytest.approx(0.1 * (100 + 2 / DRAWS) + share.low - 2 / DRAWS)
    alone = _through(parts, {"small"}, 0.95)  # the other one is not tried: all of it may be incorrect
    assert alone.limits(0.1, 0.2) == pytest.approx((0.1 * share.low, 0.2 * share.high + 100))


def test_what_no_drawn_event_shows_has_an_upper_limit(tmp_path):
    coded = {**DRAM, "protection": "sec-ded", "code_word": 8}
    path = description(tmp_path, dram=(coded, {"pair": ("bitflip:count=2", 1.0)}))
    result = unsilent.pvf(workload(), accelerator=path, trials=10)
    row = rates(result, "model", "model")
    assert (result.trials_done, row.silent.estimate) == (0, 0)
    assert row.silent.high == pytest.approx(row.raw * clopper_pearson(0, DRAWS, 1 - 0.05 / 4).high)
    assert "too few faults come through to be tried" in result.report().headline


def test_events_that_come_through_too_rarely_are_in_upper_limits_alone(tmp_path, monkeypatch):
    """Blocks of seven flip seven bits of a word, which parity reports, and four at the end of 1,600 elements."""
    monkeypatch.setattr("unsilent.studies.pvf.memory_faults.RAREST", 0.2)
    coded = {**DRAM, "protection": "parity", "code_word": 224}
    path = description(tmp_path, dram=(coded, {"blocks": ("bitflip:block=7", 1.0)}))
    result = unsilent.pvf(uneven(2), accelerator=path, trials=10, per="tensor")
    body = rates(result, "layer", "body")
    assert (body.silent.estimate, body.silent.n) == (0, 0)
    assert body.silent.high == pytest.approx(32 * 1600 / 229)
    assert rates(result, "model", "model").silent.n == 10  # two elements are even in each block
    assert any("they are not injected, and only upper limits include them" in note for note in result.notes)


def test_what_is_loaded_for_one_use_is_there_while_it_is_read(tmp_path):
    loaded = {key: value for key, value in DRAM.items() if key != "reload"}
    path = description(tmp_path, buffer=(loaded, SINGLE), sram=(SRAM, SINGLE))
    result = unsilent.pvf(workload(), accelerator=path, trials=50)
    size = 4 * BATCH * WIDTH
    buffer = rates(result, "memory", "buffer")
    assert buffer.raw == pytest.approx(8 * size * 4 / (2 + 4))  # the product moves two of this size, the other one four
    assert failures(buffer) == pytest.approx(buffer.raw)


def test_the_report_says_what_memories_do_not_hold(tmp_path):
    path = description(tmp_path, dram=({**DRAM, "holds": ["param:*", "kv:*"], "size": "4B"}, SINGLE))
    result = unsilent.pvf(workload(), accelerator=path, trials=20)
    notes = "\n".join(result.notes)
    assert "Memory dram holds nothing else of this workload: there is nothing at kv:*." in notes
    assert "Memory dram has 4 B, but what it is said to hold takes 48 B." in notes
    assert "No memory holds 2 outputs of operations: op:(root)#cat.0/fwd/out, op:(root)#mul.0/fwd/out." in notes
    assert "No memory holds 1 inputs: input:0." in notes
    assert "size assumed, fit_per_mbit assumed, bandwidth assumed, reload assumed" in notes
    report = result.report()
    first, second = report.estimates.rows[:2]
    assert first.cells[:4] == ("memory", "dram", "silent FIT", result.memory_fit[0].silent)
    assert second.cells[:4] == ("memory", "dram", "detectable FIT", result.memory_fit[0].detectable)
    assert "silently incorrect at" in report.headline
    assert [row.cells[:2] for row in fit_table(report).rows] == [
        ("memory", "dram"), ("pattern", "dram/single"), ("component", "other"), ("model", "model"),
    ]  # fmt: skip


class Blocks(nn.Module):
    """Convolutions with a residual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x):
        y = self.stem(x).relu()
        y = (self.inner(y) + y).relu()
        return self.head(y.flatten(1))


@pytest.mark.slow
def test_parameters_and_values_in_one_campaign_end_alike_with_and_without_shortcuts(tmp_path):
    patterns = {"single": ("bitflip", 0.8), "row": ("bitflip:run=4", 0.2)}
    path = description(tmp_path, dram=(DRAM, patterns), sram=(SRAM, patterns))
    batches = list(torch.randn(6, 1, 6, 6, generator=torch.Generator().manual_seed(2)).split(3))
    rows = {}
    for engine in ("plain", "auto"):
        store = tmp_path / f"{engine}.sqlite"
        made = unsilent.Workload(Blocks(), batches, judge="top1", name="blocks")
        unsilent.pvf(made, accelerator=path, trials=25, per="layer", engine=engine, store=store)
        with PvfStore(store) as opened:
            rows[engine] = [(r.trial, r.faults, r.outcome_codes) for r in opened.rows()]
    assert rows["plain"] == rows["auto"]
    assert len(rows["plain"]) > 300
    sites = {fault["site"].partition(":")[0] for _, faults, _ in rows["auto"] for fault in json.loads(faults)}
    assert sites == {"param", "op", "input"}
    assert any("/fwd/second" in faults for _, faults, _ in rows["auto"])  # the residual, after the convolution read it


class Narrow(nn.Module):
    """Two products in the model itself, of different sizes, that are needed for different times."""

    def forward(self, x):
        wide = x * 2
        narrow = wide.sum(1, keepdim=True)
        return narrow + wide


def test_faults_are_drawn_by_bits_and_time(tmp_path):
    """Operations: mul (x to wide), sum (wide to narrow), add (both to the output)."""
    path = description(tmp_path, sram=({**SRAM, "holds": ["op:*"]}, SINGLE))
    made = unsilent.Workload(Narrow(), [torch.rand(BATCH, WIDTH)], judge=differs, name="narrow")
    store = tmp_path / "s.sqlite"
    result = unsilent.pvf(made, accelerator=path, trials=3000, store=store)
    wide, narrow = 4 * BATCH * WIDTH, 4 * BATCH
    summing, adding = wide + narrow, 2 * wide + narrow  # the input is in no memory
    bits = {
        "mul.0/fwd/out": wide * summing,
        "add.0/fwd/second": wide * adding,  # the sum has read it by then
        "sum.0/fwd/out": narrow * adding,
    }
    assert rates(result, "memory", "sram").live_bits == pytest.approx(
        8 * sum(bits.values()) / (summing + adding + wide)
    )
    with PvfStore(store) as opened:
        sites = [json.loads(row.faults)[0]["site"].removeprefix("op:(root)#") for row in opened.rows()]
    for site, size in bits.items():
        share = size / sum(bits.values())
        assert abs(sites.count(site) / 3000 - share) < 5 * (share * (1 - share) / 3000) ** 0.5
    assert len(sites) == 3000 == sum(map(sites.count, bits))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"fault": "zero"}, "describes the faults and what they corrupt: leave out fault="),
        ({"at": "param:w"}, "leave out at="),
        ({"per": "bit"}, "splits flips by bit"),
    ],
)
def test_options_that_an_accelerator_replaces(tmp_path, more, message):
    path = description(tmp_path, dram=(DRAM, SINGLE))
    with pytest.raises(UsageError) as raised:
        unsilent.pvf(workload(), accelerator=path, trials=5, **more)
    assert message in str(raised.value)


def test_a_pattern_that_does_not_fit_a_dtype_is_named(tmp_path):
    path = description(tmp_path, sram=(SRAM, {"wide": ("burst:length=40", 1.0)}))
    with pytest.raises(UsageError, match=r"pattern wide of memory sram \(burst:length=40\) cannot corrupt op:"):
        unsilent.pvf(workload(), accelerator=path, trials=5)


def test_an_accelerator_without_memories_is_refused():
    with pytest.raises(UsageError, match=r"describes no memories; add a table \[memories.NAME\]"):
        unsilent.pvf(workload(), accelerator="nvdla", trials=5)


class Uneven(nn.Module):
    """A large weight, and a gain of one or two elements."""

    def __init__(self, gains: int) -> None:
        super().__init__()
        self.gain, self.body = nn.ParameterDict({"a": torch.ones(gains)}), nn.Linear(40, 40)

    def forward(self, x):
        return torch.cat([self.body(x), self.gain["a"].expand(len(x), -1)], 1)


def uneven(gains):
    return unsilent.Workload(Uneven(gains).eval(), [torch.rand(BATCH, 40)], judge=differs, name="uneven")


def test_a_part_from_which_no_event_comes_through_has_no_trials(tmp_path):
    """Runs of three are one flip in a tensor of one element, which the code corrects."""
    coded = {**DRAM, "protection": "sec-ded", "code_word": 128}
    path = description(tmp_path, dram=(coded, {"runs": ("bitflip:run=3", 1.0)}))
    result = unsilent.pvf(uneven(1), accelerator=path, trials=20)
    assert rates(result, "component", "gain").raw > 0
    assert failures(rates(result, "component", "gain")) == 0
    assert failures(rates(result, "component", "body")) > 0


def test_each_part_has_its_own_share_of_what_comes_through(tmp_path):
    """Runs of two begin at a code word of two elements in a tensor of two, and at every other element of a large one."""
    coded = {**DRAM, "protection": "parity", "code_word": 64}
    path = description(tmp_path, dram=(coded, {"runs": ("bitflip:run=2", 1.0)}))
    result = unsilent.pvf(uneven(2), accelerator=path, trials=40)
    gain, body = (rates(result, "component", name) for name in ("gain", "body"))
    assert failures(gain) == pytest.approx(gain.raw)
    assert gain.detected == 0
    assert body.detected / body.raw == pytest.approx(0.5, abs=0.05)
