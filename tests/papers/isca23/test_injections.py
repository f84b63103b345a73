"""Published injection files: exact both ways, and every way to be wrong is told with its row and column."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.basics.errors import UsageError
from unsilent.papers.isca23 import injections
from unsilent.papers.isca23.injections import (
    KEYS,
    OPERANDS,
    PublishedInjection,
    injection_text,
    parse_injection,
    read_injection,
    write_injection,
)

GOOD = """model,resnet18
stage,bkwd_inject
fmodel,N16_RD
target_worker,2
target_layer,basicblock_3_basic_1_conv1_grad_in
target_epoch,41
target_step,7
inj_pos,5/0/1/16,5/0/1/17,5/0/1/18
inj_values,2.50e+17,-1.0000000000000001,+0.5
learning_rate,0.0010
seed,123
"""


def changed(key, line):
    """The sample with one row replaced (or left out)."""
    rows = [line if row.startswith(f"{key},") else row for row in GOOD.splitlines()]
    return "".join(f"{row}\n" for row in rows if row is not None)


def test_what_is_read():
    found = parse_injection(GOOD, "x.csv")
    assert (found.phase, found.layer, found.operand) == ("grad_in", "basicblock_3_basic_1_conv1", "out")
    assert found.positions.tolist() == [[5, 0, 1, 16], [5, 0, 1, 17], [5, 0, 1, 18]]
    assert found.value_words.view(np.float32).tolist() == [np.float32(2.5e17), -1.0, 0.5]
    assert found.file_position("inj_pos", 1) == "x.csv, row 8, column 3"


def test_numbers_keep_their_text(tmp_path):
    file, copy = tmp_path / "a.csv", tmp_path / "b.csv"
    file.write_bytes(GOOD.encode())
    write_injection(read_injection(file), copy)
    assert copy.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("end", ["\r\n", "\r", "\n\n"])
def test_line_endings_blank_lines_and_order_are_normalised(tmp_path, end):
    rows = GOOD.splitlines()
    file = tmp_path / "a.csv"
    file.write_bytes(("\ufeff" + end.join([rows[-1], *rows[:-1]])).encode())
    found = read_injection(file)
    assert injection_text(found) == GOOD
    assert found == parse_injection(GOOD, "y")
    assert found.file_position("seed") == "a.csv, row 1, column 2"


@given(
    st.dictionaries(
        st.tuples(*[st.integers(0, 999_999_999)] * 4),
        st.floats(width=32, allow_nan=True, allow_infinity=True),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(sorted(OPERANDS)),
    st.integers(0, 7),
    st.floats(1e-9, 1.0),
)
def test_any_injection_comes_back(victims, fmodel, worker, rate):
    values = tuple(repr(v) if fmodel in injections.FLIPS or np.isfinite(v) else "1.0" for v in victims.values())
    made = PublishedInjection(
        "densenet", "fwrd_inject", fmodel, worker, "conv_3", 1, 2, tuple(victims), values, repr(rate), 9
    )
    text = injection_text(made)
    assert parse_injection(text, "x") == made
    assert injection_text(parse_injection(text, "x")) == text


WRONG = {
    "unknown key": (
        GOOD.replace("fmodel", "fmodle"),
        "x.csv, row 3, column 1: unknown key 'fmodle'; did you mean 'fmodel'?",
    ),
    "doubled": (GOOD + "seed,1\n", "row 12, column 1: seed appears twice, first in row 11"),
    "missing": (changed("seed", None), "row 11, column 1: seed not found; expected model, stage"),
    "empty": ("", "row 1, column 1: model, stage"),
    "three parts": (
        changed("inj_pos", "inj_pos,5/0/1/16,5/0/1,1/1/1/1"),
        "row 8, column 3: index has 3 parts, expected 4",
    ),
    "no number": (
        changed("inj_pos", "inj_pos,5/0/a/16"),
        "row 8, column 2: inj_pos is '5/0/a/16'; expected whole numbers",
    ),
    "negative index": (
        changed("inj_pos", "inj_pos,5/0/-1/16"),
        "row 8, column 2: inj_pos is '5/0/-1/16'; expected no negative",
    ),
    "leading zero": (
        changed("inj_pos", "inj_pos,05/0/1/16"),
        "row 8, column 2: inj_pos is '05/0/1/16'; expected whole numbers",
    ),
    "other digits": (changed("inj_pos", "inj_pos,٣/0/1/16"), "row 8, column 2: inj_pos is '٣/0/1/16'"),
    "huge index": (changed("inj_pos", f"inj_pos,{10**30}/0/1/16"), "row 8, column 2: inj_pos is '1000"),
    "twice": (
        changed("inj_pos", "inj_pos,1/1/1/1,2/2/2/2,1/1/1/1"),
        "row 8, column 4: inj_pos is '1/1/1/1'; expected an element other",
    ),
    "no position": (changed("inj_pos", "inj_pos"), "row 8, column 2: inj_pos has no value"),
    "empty position": (changed("inj_pos", "inj_pos,"), "row 8, column 2: index has 1 parts, expected 4"),
    "too few values": (changed("inj_values", "inj_values,1,2"), "row 9, column 4: 2 values for 3 positions"),
    "too many values": (changed("inj_values", "inj_values,1,2,3,4"), "row 9, column 5: 4 values for 3 positions"),
    "not a value": (
        changed("inj_values", "inj_values,1,2,0x3"),
        "row 9, column 4: inj_values is '0x3'; expected a number",
    ),
    "underscore": (
        changed("inj_values", "inj_values,1,1_0,3"),
        "row 9, column 3: inj_values is '1_0'; expected a number",
    ),
    "not finite": (
        changed("inj_values", "inj_values,1,nan,3"),
        "row 9, column 3: nan is not finite; expected a finite value, because N16_RD",
    ),
    "beyond float32": (
        changed("inj_values", "inj_values,1,2,1e39"),
        "row 9, column 4: 1e39 is outside the range of float32",
    ),
    "long value": (changed("inj_values", "inj_values,1,2," + "1" * 300), "row 9, column 4: inj_values is '111"),
    "stage": (changed("stage", "stage,backward"), "row 2, column 2: unknown stage 'backward'"),
    "fault model": (changed("fmodel", "fmodel,RDX"), "row 3, column 2: unknown fault model 'RDX'; did you mean 'RD'?"),
    "model": (
        changed("model", "model,resnet50"),
        "row 1, column 2: unknown model 'resnet50'; did you mean 'resnet18'?",
    ),
    "worker": (
        changed("target_worker", "target_worker,8"),
        "row 4, column 2: target_worker is '8'; expected the number of a worker, 0 to 7",
    ),
    "negative": (
        changed("target_epoch", "target_epoch,-1"),
        "row 6, column 2: target_epoch is '-1'; expected no negative number",
    ),
    "not whole": (
        changed("target_step", "target_step,1.5"),
        "row 7, column 2: target_step is '1.5'; expected whole numbers",
    ),
    "surplus field": (changed("seed", "seed,1,2"), "row 11, column 3: seed is '2'; expected no second value"),
    "no value": (changed("seed", "seed"), "row 11, column 2: seed has no value"),
    "rate": (
        changed("learning_rate", "learning_rate,inf"),
        "row 10, column 2: learning_rate is 'inf'; expected a finite number",
    ),
    "rate of zero": (changed("learning_rate", "learning_rate,0.0"), "row 10, column 2: learning_rate is '0.0'"),
    "layer": (changed("target_layer", "target_layer,a b_grad_in"), "row 5, column 2: target_layer is 'a b_grad_in'"),
    "no gradient": (
        changed("target_layer", "target_layer,conv1"),
        "row 5, column 2: target_layer is 'conv1'; expected a name ending in",
    ),
    "gradient in forward": (changed("stage", "stage,fwrd_inject"), "row 5, column 2: target_layer is 'basic"),
    "quotes": (GOOD.replace("seed", '"seed"'), "row 11, column 1: unknown key '\"seed\"'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_row_and_column_in_one_line(name):
    text, message = WRONG[name]
    with pytest.raises(UsageError) as caught:
        parse_injection(text, "x.csv")
    assert message in str(caught.value)
    assert str(caught.value).startswith("x.csv, row ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_files_that_are_none(tmp_path, monkeypatch):
    file = tmp_path / "a.csv"
    with pytest.raises(UsageError, match="cannot read"):
        read_injection(file)
    with pytest.raises(UsageError, match="cannot read"):
        read_injection(tmp_path)
    file.write_bytes(b"model,\xff\xfe")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        read_injection(file)
    file.write_bytes(GOOD.encode())
    monkeypatch.setattr(injections, "MAX_FILE_BYTES", len(GOOD) - 1)
    with pytest.raises(UsageError, match="is larger than"):
        read_injection(file)
    monkeypatch.setattr(injections, "MAX_FILE_BYTES", len(GOOD))
    monkeypatch.setattr(injections, "MAX_ROW_FIELDS", 2)
    with pytest.raises(UsageError, match="row 8, column 4: more than 2 fields"):
        read_injection(file)


def read_or_refused(text):
    """What was read, None where it was refused; any other error is one of the test."""
    try:
        return parse_injection(text, "x")
    except UsageError as error:
        return None if "\n" not in str(error) else error


@given(st.text(max_size=400))
def test_no_text_is_more_than_refused(text):
    assert read_or_refused(text) is None


@given(st.integers(0, len(GOOD) - 1), st.text(max_size=3))
def test_a_damaged_file_is_read_or_refused(at, junk):
    found = read_or_refused(GOOD[:at] + junk + GOOD[at + 1 :])
    assert found is None or parse_injection(injection_text(found), "x") == found


def test_what_could_not_be_read_is_not_written(tmp_path):
    bad = replace(parse_injection(GOOD, "x"), target_worker=9)
    with pytest.raises(UsageError, match="row 4, column 2"):
        write_injection(bad, tmp_path / "a.csv")
    assert not (tmp_path / "a.csv").exists()
    with pytest.raises(UsageError, match="cannot write"):
        write_injection(parse_injection(GOOD, "x"), tmp_path / "no" / "a.csv")


def test_the_18_fault_models_and_what_they_corrupt():
    assert len(OPERANDS) == 18
    assert len(KEYS) == 11
    first = [name for name, operand in OPERANDS.items() if operand == "first"]
    assert sorted(first) == ["INPUT", "INPUT_16", "N64_INPUT", "N64_INPUT_16", "N64_INPUT_GLB"]
    second = [name for name, operand in OPERANDS.items() if operand == "second"]
    assert sorted(second) == ["N64_WT", "N64_WT_16", "N64_WT_GLB", "WT", "WT_16"]
    assert sorted(injections.FLIPS) == ["INPUT", "INPUT_16", "RBFLIP", "WT", "WT_16"]
