"""Descriptions of accelerators: what follows from them, and every way that a file can be wrong."""

import subprocess
import sys
import textwrap
from collections import Counter
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from unsilent.basics.errors import UsageError
from unsilent.faults.hardware import SHIPPED
from unsilent.faults.hardware.description import GRADES
from unsilent.faults.hardware.description_file import MOST_BYTES, load_accelerator, parse_accelerator
from unsilent.faults.hardware.output_window import OutputWindow
from unsilent.faults.hardware.presets import PRESETS

NVDLA = (resources.files("unsilent.faults.hardware") / "nvdla.toml").read_text()

OWN = """
name = "mine"
description = "a lane of vectors with a load unit"
sources = []
raw_fit = 100
other = 0.25
evidence = "assumed"

[array]
outputs = 4
reduction = 4
weight_hold = "all"
input_hold = 2
fastest = "positions"
evidence = "measured"

[dtypes]
input = "float8_e4m3fn"
weight = "bfloat16"
accumulator = "float32"
output = "float16"
evidence = "read"

[groups.load_unit]
share = 0.25
activeness = 0.5
unmasked = 0.1
evidence = { share = "measured", activeness = "measured", unmasked = "assumed" }
[[groups.load_unit.faults]]
name = "LINE"
operand = "second"
model = "random:block=8"
channels = 2
tail = true
part = 3
intent = "a line of the buffer is wrong"
[[groups.load_unit.faults]]
operand = "out"
model = "zero:tile=2x2"
part = 1

[groups.sums]
kind = "output"
stage = "accumulator"
share = 0.5
activeness = 0.5
unmasked = 0.2
evidence = "measured"
"""


def test_the_fit_of_the_sample():
    """600 * share * activeness * unmasked, added up by hand: datapath, local control, global control."""
    found = load_accelerator("nvdla")
    datapath = ("input", "weight", "input_16", "weight_16", "neuron")
    assert sum(found.fit_rate_of(name) for name in datapath) == pytest.approx(1.286, abs=5e-4)
    assert found.fit_rate_of("local_control") == pytest.approx(0.080, abs=5e-4)
    assert found.fit_rate_of("global_control") == pytest.approx(1.132, abs=5e-4)
    assert found.fit_rate == pytest.approx(2.50, abs=5e-3)
    assert found.why_no_fit_rate == ""


def test_nvdla_gives_the_published_presets():
    found = {e.preset.name: e for e in load_accelerator("nvdla").weighted_presets}
    assert set(found) == set(PRESETS)
    for name, published in PRESETS.items():
        one = found[name].preset
        assert (one.operand, one.fault_model_text, one.window) == (
            published.operand,
            published.fault_model_text,
            published.window,
        )
        assert found[name].held == "float16"


def test_weights_are_share_times_activeness():
    table = {
        "input": 0.018 * 0.31, "weight": 0.035 * 0.42, "input_16": 0.117 * 0.27, "weight_16": 0.156 * 0.27,
        "neuron": 0.272 * 0.27, "local_control": 0.041 * 0.27, "global_control": 0.081 * 0.32,
    }  # fmt: skip
    found = Counter()
    for entry in load_accelerator("nvdla").weighted_presets:
        found[entry.group] += entry.weight
    for name, weight in table.items():
        assert found[name] == pytest.approx(weight / sum(table.values()))
    parts = Counter(round(found[e.group] / e.weight) for e in load_accelerator("nvdla").weighted_presets)
    assert parts == {1: 5, 3: 3, 10: 10}  # equal parts


@pytest.mark.parametrize("name", SHIPPED[:3])
def test_what_comes_with_the_package(name):
    found = load_accelerator(name)
    about = found.description
    assert about.name == name
    assert about.sources
    assert sum(g.share for g in about.groups.values()) + about.other == pytest.approx(1)
    assert sum(e.weight for e in found.weighted_presets) == pytest.approx(1)
    assert (found.fit_rate is None) == bool(found.why_no_fit_rate) == (name != "nvdla")
    if name != "nvdla":  # nothing about flip-flops is published, and nothing claims that it is
        graded = {g.evidence_grade(fact) for g in about.groups.values() for fact in ("share", "activeness")}
        assert graded == {"derived", "assumed"}
    for row in found.table():
        assert set(row.evidence.replace(",", "").split()) <= {*GRADES, "share", "activeness", "unmasked"}
    for entry in found.weighted_presets:
        for phase in ("fwd", "grad_in", "grad_wt"):
            draw = entry.fault_at_operation("op:conv1#convolution.0", phase=phase, seed=1)
            assert draw.site.endswith(f"/{phase}/{entry.preset.operand}")
            for fault in draw.resolve_for_tensor("float32", (2, 128, 8, 8), axes=(0, 2, 3, 1)):
                assert fault.held == (None if entry.held == "float32" else entry.held)


def test_the_table_of_a_systolic_array():
    rows = {r.name: r for r in load_accelerator("systolic").table()}
    assert rows["INPUT_128"].reach == "128 channels onward x 1 position"
    assert rows["WT_ALL"].reach == "1 channel x all positions from the fault on"
    assert rows["N128_RD"].pattern == "block=128"
    assert (rows["RBFLIP"].held, rows["INPUT_128"].held) == ("float32", "bfloat16")
    assert (rows["RD"].weight_split_reason, rows["INPUT_128"].weight_split_reason) == ("not known, 1/3 each", "")
    assert rows["WT_ALL"].weight == rows["INPUT_128"].weight == rows["RBFLIP"].weight / 2  # 16, 16 and 32 bits


def test_the_table_of_a_tensor_core():
    rows = {r.name: r for r in load_accelerator("tensor-core").table()}
    assert rows["INPUT_8"].reach == "8 channels x 1 position"
    assert rows["WT_16"].reach == "1 channel x 16 positions"
    assert {r.pattern for r in rows.values() if r.group == "global_control"} == {"tile=16x8"}
    assert rows["INPUT_8"].weight == pytest.approx(2 * rows["WT_16"].weight)  # 4096 and 2048 bits


def test_entries_are_sampled_by_weight():
    found, rng, n = load_accelerator("nvdla"), np.random.default_rng(0), 4000
    counts = Counter(found.draw_weighted_preset(rng).preset.name for _ in range(n))
    expected = [n * e.weight for e in found.weighted_presets]
    assert stats.chisquare([counts[e.preset.name] for e in found.weighted_presets], expected).pvalue > 1e-4


def test_an_own_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(OWN)
    found = load_accelerator(str(file))
    line, tile, sums = found.weighted_presets
    assert [e.weight for e in found.weighted_presets] == pytest.approx([0.25, 1 / 12, 2 / 3])
    assert (line.preset.name, line.preset.window, line.held) == ("LINE", OutputWindow(2, None, tail=True), "bfloat16")
    assert (tile.preset.name, tile.preset.fault_model_text, tile.held) == ("load_unit.1", "zero:tile=2x2", "float16")
    assert (sums.preset.name, sums.held) == ("RBFLIP", "float32")
    assert (line.fastest, tile.fastest) == ("channels", "positions")
    assert found.table()[0].weight_split_reason == "as described"
    assert found.table()[1].pattern == "tile=2x2 along positions"
    assert found.fit_rate == pytest.approx(100 * (0.25 * 0.5 * 0.1 + 0.5 * 0.5 * 0.2))
    assert sums.fault_at_operation("op:fc#addmm.0", held=None).held is None


def test_the_file_of_the_documentation():
    page = Path(__file__).parents[3] / "docs" / "howto" / "describe-accelerator.md"
    block = page.read_text().partition('```toml title="mine.toml"\n')[2].partition("```")[0]
    found = parse_accelerator(textwrap.dedent(block).encode(), "mine.toml")
    assert {e.group for e in found.weighted_presets} == {"operands", "load_unit"}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [("raw_fit = 100\n", "", "raw_fit is not known"),
     ("unmasked = 0.2\n", "", "the probability that a fault in sums is not masked is unknown")],
)  # fmt: skip
def test_why_there_is_no_fit(old, new, why):
    found = parse_accelerator(OWN.replace(old, new).encode(), "mine.toml")
    assert found.fit_rate is None
    assert found.why_no_fit_rate == why


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("share = 0.018", "share = 0.118", "the shares of all groups plus other add up to 1.1; expected 1"),
        ("share = 0.018", "share = 0.018002", "add up to 1.000002; expected 1"),
        ("other = 0.28", "other = 0", "add up to 0.72; expected 1"),
        ("share = 0.018", "shrae = 0.018", "groups.input: unknown key 'shrae'; did you mean 'share'?"),
        ("share = 0.018", "", "groups.input.share is missing"),
        ("share = 0.018", "share = 1.5", "groups.input.share is 1.5: Input should be less than or equal to 1"),
        ("share = 0.018", "share = -0.1", "groups.input.share is -0.1: Input should be greater than or equal to 0"),
        ("share = 0.018", "share = nan", "groups.input.share is nan: Input should be a finite number"),
        ("share = 0.018", 'share = "a\\nb"', "groups.input.share is 'a\\nb': Input should be a valid number"),
        ("share = 0.018", "share = true", "groups.input.share is True"),
        ('kind = "input"\n', 'kind = "inptu"\n', "groups.input.kind is 'inptu': Input should be 'input', 'weight'"),
        ('kind = "input"\n', "", "groups.input: expected either kind or faults, not both"),
        ('kind = "input"\n', 'kind = "input"\nstage = "out"\n', "groups.input.stage is 'out'"),
        ('kind = "input"\n', "faults = []\n", "groups.input.faults is []"),
        ('kind = "input"\n', 'faults = [{operand = "first", model = "bitfilp"}]\n', "faults.0.model is 'bitfilp': unknown"),
        ('kind = "input"\n', 'faults = [{operand = "frist", model = "bitflip"}]\n', "faults.0.operand is 'frist'"),
        ('kind = "input"\n', 'faults = [{operand = "out", model = "zero", tail = true}]\n', "a fault in an output affects"),
        (
            'kind = "input"\n',
            'faults = [{operand = "out", model = "zero", part = 1}, {operand = "out", model = "zero"}]\n',
            "part is given for only some faults of a group; give part for all of them or for none",
        ),
        ("weight_hold = 16", 'weight_hold = "some"', "array.weight_hold is 'some': expected a number of cycles"),
        ("weight_hold = 16", "weight_hold = 0", "array.weight_hold is 0: expected a number of cycles"),
        ("outputs = 16", "outputs = 0", "array.outputs is 0"),
        ("outputs = 16", "outputs = 16.5", "array.outputs is 16.5"),
        ('fastest = "channels"', 'fastest = "rows"', "array.fastest is 'rows': Input should be 'channels' or 'positions'"),
        ('fastest = "channels"', 'fastest = "channels"\ntile = "16*8"', "array.tile is '16*8': tile='16*8'; expected ROWS"),
        ('input = "float16"', 'input = "int8"', "dtypes.input is 'int8': 'int8' needs a scale"),
        ('input = "float16"', 'input = "flaot16"', "unknown dtype 'flaot16'; did you mean 'float16'?"),
        ('outputs = "read"', 'outputs = "raed"', "unknown grade of 'outputs' 'raed'; did you mean 'read'?"),
        ('outputs = "read"', "", "array: evidence for outputs is missing; expected one of read, measured"),
        ('outputs = "read"', 'outputs = "read"\nrows = "read"', "array: evidence is given for 'rows', which has no value"),
        ('evidence = "read"', "", "groups.input: evidence for share is missing"),
        ('evidence = "read"', 'evidence = "raed"', "groups.input.evidence is 'raed': unknown grade 'raed'; did you mean 'read'?"),
        ("raw_fit = 600.0", "raw_fit = -1", "raw_fit is -1: Input should be greater than 0"),
        ("raw_fit = 600.0", "", "evidence is given for 'raw_fit', which has no value; expected other"),
        ("[array]", "[arary]", "unknown key 'arary'; did you mean 'array'?"),
        ('name = "nvdla"', "", "name is missing"),
        ('name = "nvdla"', "name = nvdla", "as TOML: Invalid value"),
        ('description = "NVDLA', 'description = "\\u001b[31mNVDLA', "expected printable text in one line"),
        ("[groups.input]", '[groups."in\\nput"]', "should match pattern"),
    ],
)  # fmt: skip
def test_a_wrong_file(old, new, message):
    assert old in NVDLA
    with pytest.raises(UsageError) as caught:
        parse_accelerator(NVDLA.replace(old, new, 1).encode(), "mine.toml")
    assert message in str(caught.value)
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_that_can_be_corrupted():
    text = OWN.replace("activeness = 0.5", "activeness = 0")
    with pytest.raises(UsageError, match="share \\* activeness is 0 for every group"):
        parse_accelerator(text.encode(), "mine.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe", "it is not UTF-8 text"), (b"", "is missing"), (b"x = " + b"[" * 5000, "as TOML"),
     (b"#" * (MOST_BYTES + 1), "is larger than 1 MiB")],
    ids=["not text", "empty", "deep", "large"],
)  # fmt: skip
def test_a_file_that_is_none(content, message, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_accelerator(str(file))
    assert "\n" not in str(caught.value)


def test_what_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="unknown accelerator 'nvdal'; did you mean 'nvdla'"):
        load_accelerator("nvdal")
    with pytest.raises(UsageError, match="cannot read the accelerator .*No such file"):
        load_accelerator(str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match="cannot read the accelerator|not a regular file"):
        load_accelerator(f"{tmp_path}/")
    with pytest.raises(UsageError, match="cannot read the accelerator"):
        load_accelerator("a\0b.toml")


def test_it_runs_without_torch():
    code = (
        "import sys, unsilent.faults.hardware.description_file as r; r.load_accelerator('nvdla').table(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
