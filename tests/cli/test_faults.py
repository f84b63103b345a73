"""``unsilent faults``: fault models, presets, and what follows from an accelerator."""

from __future__ import annotations

import json

import pytest

from conftest import in_process


def words(text):
    return " ".join(text.split())


def test_models_and_presets_are_listed():
    entries = {e["name"]: e for e in json.loads(in_process("faults", "--json").stdout)}
    assert entries["multibit"]["parameters"]["flips"] == "2"
    assert {"block", "cycles", "tile"} <= set(entries["uniform"]["parameters"])
    found = {k: v for k, v in entries.items() if v["kind"] == "preset"}
    assert len(found) == 18
    assert found["WT_16"]["operand"] == "second"
    assert found["WT_16"]["fault"] == "bitflip"
    assert found["WT_16"]["reach"] == "1 channel x 16 positions"
    assert "does not restrict" in found["WT_16"]["remark"]
    plain = in_process("faults").stdout
    assert all(name in plain for name in entries)


def test_an_accelerator_as_json():
    told = json.loads(in_process("faults", "--accelerator", "nvdla", "--json").stdout)
    assert round(told["fit"], 2) == 2.50
    assert told["no_fit"] == ""
    assert told["accelerator"]["array"]["evidence"]["reduction"] == "recalled"
    assert len(told["rows"]) == 18
    assert sum(row["weight"] for row in told["rows"]) == pytest.approx(1)
    row = next(r for r in told["rows"] if r["name"] == "INPUT_16")
    expected = {
        "group": "input_16", "operand": "first", "pattern": "one", "reach": "16 channels x 1 position", "values": "bitflip",
        "held": "float16", "share": 0.117, "activeness": 0.27, "unmasked_probability": 0.0026, "evidence": "read",
    }  # fmt: skip
    assert {k: row[k] for k in expected} == expected


def test_an_accelerator_as_a_table():
    told = words(in_process("faults", "--accelerator", "nvdla").stdout)
    assert "FIT: 2.50" in told
    assert "reduction 64 (recalled)" in told
    assert "flip-flops share active unmasked weight FIT evidence ──" in told  # no remark, so no column of remarks
    assert "Shares that the fault models of local_control have in its weight: not known, 1/3 each." in told
    told = words(in_process("faults", "--accelerator", "systolic").stdout)
    assert "FIT: not available, because raw_fit is not known." in told
    assert "flip-flops share active weight evidence remark ──" in told
    assert "other 0.0 (assumed)" in told
    assert "onward true (derived)" in told


def test_an_own_file(tmp_path):
    own = in_process("faults", "--accelerator", "nvdla", "--json")
    from importlib import resources

    text = (
        (resources.files("unsilent.faults.hardware") / "nvdla.toml")
        .read_text()
        .replace("raw_fit = 600.0", "raw_fit = 60")
    )
    (tmp_path / "mine.toml").write_text(text)
    told = json.loads(in_process("faults", "--accelerator", "mine.toml", "--json", cwd=tmp_path).stdout)
    assert told["fit"] == pytest.approx(json.loads(own.stdout)["fit"] / 10)


@pytest.mark.parametrize(
    ("which", "content", "message"),
    [
        ("nvdal", None, "unknown accelerator 'nvdal'; did you mean 'nvdla'?"),
        ("none.toml", None, "cannot read the accelerator 'none.toml': No such file or directory"),
        ("mine.toml", "nmae = 'x'", "mine.toml: unknown key 'nmae'; did you mean 'name'?"),
        ("mine.toml", "name = ", "cannot read mine.toml as TOML"),
    ],
)
def test_what_cannot_be_shown(which, content, message, tmp_path):
    if content is not None:
        (tmp_path / which).write_text(content)
    done = in_process("faults", "--accelerator", which, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
