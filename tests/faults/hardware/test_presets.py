"""The 18 published presets, one row each, as the list of published injection types has them."""

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.faults import fault_model
from unsilent.faults.hardware.output_window import OutputWindow
from unsilent.faults.hardware.presets import CORRUPTED_PHASES, PRESETS, ArraySizes, preset, presets_for_array

INPUT16, WEIGHT16 = OutputWindow(16, 1), OutputWindow(1, 16)

# name: (operand, fault model, window, elements corrupted in a large tensor (None: a multiple of the block), deviates)
TABLE = {
    "INPUT": ("first", "bitflip", None, 1, False),
    "INPUT_16": ("first", "bitflip", INPUT16, 1, True),
    "WT": ("second", "bitflip", None, 1, False),
    "WT_16": ("second", "bitflip", WEIGHT16, 1, True),
    "RBFLIP": ("out", "bitflip", None, 1, False),
    "RD": ("out", "random", None, 1, False),
    "RD_CORRECT": ("out", "copy", None, 1, False),
    "ZERO": ("out", "zero", None, 1, False),
    "N16_RD": ("out", "random:block=16", None, 16, False),
    "N16_RD_CORRECT": ("out", "copy:block=16", None, 16, False),
    "RD_GLB": ("out", "random:block=16,cycles=any", None, None, True),
    "RD_CORRECT_GLB": ("out", "copy:block=16,cycles=any", None, None, True),
    "N64_INPUT": ("first", "copy:block=64", None, 64, False),
    "N64_WT": ("second", "copy:block=64", None, 64, False),
    "N64_INPUT_16": ("first", "copy:block=64", INPUT16, 64, True),
    "N64_WT_16": ("second", "copy:block=64", WEIGHT16, 64, True),
    "N64_INPUT_GLB": ("first", "copy:block=64,cycles=any", None, None, True),
    "N64_WT_GLB": ("second", "copy:block=64,cycles=any", None, None, True),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_published_preset(name):
    operand, text, window, n, deviates = TABLE[name]
    found = preset(name)
    assert (found.name, found.operand, found.fault_model_text, found.window) == (name, operand, text, window)
    assert found.model == fault_model(text)
    assert found.model.text == text
    assert found.hardware_defect
    assert bool(found.remark) == deviates
    for phase in CORRUPTED_PHASES:
        draw = found.fault_at_operation("op:conv1#convolution.0", phase=phase, seed=7, micro_step=2)
        assert draw.site == f"op:conv1#convolution.0/{phase}/{operand}"
        assert (draw.seed, draw.micro_step, draw.window, draw.model) == (7, 2, window, found.model)
        (fault,) = draw.resolve_for_tensor("float32", (2, 64, 8, 8), axes=(0, 2, 3, 1))
        block = 64 if name.startswith("N64") else 16
        assert len(fault) == n or (n is None and len(fault) % block == 0)
        if len(fault) > 1:
            channels = np.unravel_index(fault.elements, (2, 64, 8, 8))[1]
            assert len(set(channels.tolist())) >= block


def test_there_are_no_others():
    assert set(PRESETS) == set(TABLE)
    with pytest.raises(UsageError, match="unknown preset 'N16RD'; did you mean 'N16_RD'"):
        preset("N16RD")


@pytest.mark.parametrize("name", TABLE)
def test_the_value_is_exchanged_and_the_place_is_not(name):
    worst = "uniform:low=1e16,high=1e18"
    draw = preset(name).fault_at_operation("op:conv1#convolution.0", seed=3, value=worst)
    own = preset(name).fault_at_operation("op:conv1#convolution.0", seed=3)
    assert draw.model.pattern == own.model.pattern
    assert draw.window == own.window
    (fault,) = draw.resolve_for_tensor("float32", (4, 640))
    values = fault.codec.decode(fault.operands)
    assert ((values >= 1e16) & (values <= 1e18)).all()
    assert fault_model(draw.model.text) == draw.model
    if name.startswith(("N", "RD_GLB")):
        np.testing.assert_array_equal(fault.elements, own.resolve_for_tensor("float32", (4, 640))[0].elements)


def test_what_cannot_be_drawn():
    with pytest.raises(
        UsageError, match="'random:block=4' chooses elements, but N16_RD already does; leave out block=4"
    ):
        preset("N16_RD").fault_at_operation("op:conv1#convolution.0", value="random:block=4")
    with pytest.raises(UsageError, match="unknown phase of a product 'optim'"):
        preset("N16_RD").fault_at_operation("op:conv1#convolution.0", phase="optim")
    with pytest.raises(UsageError, match="give the operation alone"):
        preset("INPUT_16").fault_at_operation("op:conv1#convolution.0/fwd/out")


def test_any_field_of_a_draw_may_be_given():
    draw = preset("INPUT_16").fault_at_operation("op:fc#addmm.0", held="float16", rank=3, window=None, index="3")
    assert (draw.held, draw.rank, draw.window, draw.index) == ("float16", 3, None, "3")


def test_the_family_follows_the_sizes():
    found = {p.name: p for p in presets_for_array(ArraySizes(8, 32, None, 2, tail=True, onward=True))}
    assert found["INPUT_16"].window == OutputWindow(8, 2, tail=True, onward=True)
    assert found["WT_ALL"].window == OutputWindow(1, None, tail=True)
    assert found["N8_RD"].fault_model_text == "random:block=8"
    assert found["N32_WT_GLB"].fault_model_text == "copy:block=32,cycles=any"
    assert found["N32_WT_ALL"].window == OutputWindow(1, None, tail=True)
    assert found["N32_INPUT_16"].window == found["INPUT_16"].window
    tiles = {
        p.name: p.fault_model_text
        for p in presets_for_array(ArraySizes(8, 16, 16, 1, tile=(16, 8)))
        if p.kind == "global control"
    }
    assert tiles == {"TILE_RD": "random:tile=16x8", "TILE_RD_CORRECT": "copy:tile=16x8"}
