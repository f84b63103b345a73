"""Failure rates of an accelerator's memories: against rates known by hand, with and without protection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.studies.pvf.kind import PvfStore

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


def test_nothing_is_measured_where_protection_lets_nothing_through(tmp_path):
    ecc = {**DRAM, "protection": "sec-ded", "code_word": 64}
    with pytest.raises(
        UsageError,
        match="so there is nothing to measure: 0 FIT are detected; patterns that come",
    ):
        unsilent.pvf(workload(), accelerator=description(tmp_path, dram=(ecc, SINGLE)), trials=10)


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
    (section,) = [section for section in report.sections if section.title == "Failure rate of memories"]
    assert [row.cells[:2] for row in section.parts[0].rows] == [
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
