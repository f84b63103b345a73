"""Settings and sequences of hdf5_corrupter: what is injected, against an oracle; its law; files that are damaged or hostile."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from faults.test_lists import MODEL
from unsilent.basics.errors import UsageError
from unsilent.checkpoints import Checkpoint, corrupt_by_settings, replay, undo_edit
from unsilent.checkpoints.hdf5_corrupter.settings import read_settings
from unsilent.checkpoints.hdf5_corrupter.tries import draw_tries
from unsilent.cli.main import run
from unsilent.faults.lists import read_entries, resolve_entry

SHAPES = {
    "predictor/conv1/W": ("float32", (8, 4, 3, 3)), "predictor/conv1/b": ("float32", (8,)),
    "predictor/conv10/W": ("float32", (5, 2)),
    "predictor/half": ("float16", (40,)), "predictor/double": ("float64", (6, 6)), "predictor/count": ("int64", ()),
    "predictor/scale": ("float32", ()), "deep": ("float32", (2, 3, 2, 2, 2)), "signed": ("int32", (4, 4)),
}  # fmt: skip
WIDTHS = {"float16": 16, "float32": 32, "float64": 64}
SETTINGS = {
    "hdf5_file": "/nowhere/model.h5", "injection_probability": 1, "injection_type": "count", "injection_tries": 200,
    "log_file_path": "/nowhere/log-", "float_precision": 32, "allow_sign_change": False, "allow_NaN_values": True,
    "save_injection_sequence": False, "use_random_locations": False, "locations_to_corrupt": ["/predictor/conv1"],
}  # fmt: skip


@pytest.fixture
def arrays():
    rng = np.random.default_rng(3)
    return {
        name: rng.normal(size=shape).astype(dtype)
        if dtype[0] == "f"
        else rng.integers(-500, 900, shape).astype(dtype).reshape(shape)
        for name, (dtype, shape) in SHAPES.items()
    }


@pytest.fixture
def path(tmp_path, arrays):
    save_file(arrays, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def content(path):
    """The arrays of a checkpoint by the names of `SHAPES`, read by nothing of ours."""
    from safetensors.numpy import load_file

    return load_file(path)


def write_settings(path, **changes):
    """A file of settings next to a checkpoint; a change to None leaves a key out."""
    values = {key: value for key, value in (SETTINGS | changes).items() if value is not None}
    file = path.with_name("config.yaml")
    file.write_text("# as its repository has them\n" + "".join(f"{k}: {json.dumps(v)}\n" for k, v in values.items()))
    return file


def write_sequence(path, value):
    file = path.with_name("sequence.json")
    file.write_text(value if isinstance(value, str) else json.dumps(value, indent=2))
    return file


def flipped(value, bits):
    """A numpy number with bits flipped one after the other, counted from the sign, by way of its digits."""
    width = value.dtype.itemsize * 8
    digits = [*f"{int(value.view(f'u{value.dtype.itemsize}')):0{width}b}"]
    for bit in bits:
        digits[bit] = "10"[int(digits[bit])]
    return np.array(int("".join(digits), 2), f"u{value.dtype.itemsize}").view(value.dtype)[()]


def bits_changed(before, after):
    """(flat element, bit from the sign) of all that differ."""
    size = before.dtype.itemsize
    changed = before.reshape(-1).view(f"u{size}") ^ after.reshape(-1).view(f"u{size}")
    return [
        (i, b) for i in np.flatnonzero(changed) for b in range(size * 8) if int(changed[i]) >> (size * 8 - 1 - b) & 1
    ]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


# -- sequences ---------------------------------------------------------------------------------------------------------


def test_a_sequence_with_indexes_does_what_the_oracle_does(path, arrays):
    sequence = {
        "/predictor/conv1/W": [
            [[7, 3, 2, 1], [0]],
            [[1, 2, 0, 1], [1, 5, 31]],
            [[1, 2, 0, 1], [5]],
            [[0, 0, 0, 0], None],
        ],
        "/predictor/half": [[[39], [15, 3]]],
        "/predictor/double": [[[5, 0], [63, 0]]],
        "/predictor/scale": [[[0], [9]]],
    }
    edit = replay(path, write_sequence(path, sequence))
    expected = {name: array.copy() for name, array in arrays.items()}
    for location, injections in sequence.items():
        array = expected[location[1:]]
        for index, bits in injections:
            place = tuple(index) if array.ndim else ()
            array[place] = flipped(array[place], bits or [])
    assert_same(content(path), expected)
    assert any("bit 0 is bit 31 of a float32" in note for note in edit.notes)
    assert any("entries without bits" in note and note.endswith("(1)") for note in edit.notes)
    undo_edit(path)
    assert_same(content(path), arrays)


def test_entries_without_an_index_hit_random_elements_of_their_location_and_can_be_saved(path, tmp_path, capsys):
    copy = path.with_name("copy.safetensors")
    shutil.copy(path, copy)
    before = content(path)
    file = write_sequence(path, {"/predictor/conv1/": [[[], [4, 9]]] * 30})
    saved = tmp_path / "made.jsonl"
    assert run(["checkpoint", "replay", str(path), str(file), "--seed", "5", "--save", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert "Note: entries without an index: the element is drawn with seed 5 (30)" in shown
    after = content(path)
    changed = {
        name: bits_changed(before[name], after[name])
        for name in before
        if name in ("predictor/conv1/W", "predictor/conv1/b")
    }
    assert all(changed.values()), "both tensors of the location are hit"
    assert {bit for hits in changed.values() for _, bit in hits} == {4, 9}
    assert all(np.array_equal(before[name], after[name]) for name in before if name not in changed)
    replay(copy, saved)
    assert_same(content(copy), after)


def test_the_same_bits_go_to_another_format_under_another_name(path, tmp_path, capsys):
    weight = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    other = tmp_path / "torch.pt"
    torch.save(
        {"state_dict": {"layer1.weight": weight, "layer1.bias": torch.randn(8), "layer10.weight": torch.ones(5)}}, other
    )
    file = write_sequence(path, {"/predictor/conv1/W": [[[1, 0, 2, 2], [1]]], "/predictor/conv1/": [[[], [3]]] * 20})
    words = ["--map", "predictor/conv1=layer1", "--map", "predictor/conv1/W=layer1.weight"]
    assert run(["checkpoint", "replay", str(other), str(file), *words, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert {hit["fault"]["site"] for hit in results["results"]} == {
        "file:model/layer1.weight",
        "file:model/layer1.bias",
    }
    assert any("counts bits from the sign" in note for note in results["notes"])
    after = torch.load(other)["state_dict"]["layer1.weight"].numpy()
    assert (flipped(weight.numpy()[1, 0, 2, 2], [1]) == after[1, 0, 2, 2]) or 3 in [
        b for _, b in bits_changed(weight.numpy(), after)
    ]


def test_an_index_is_sought_in_the_tensors_that_have_it(path):
    """Its replay draws a tensor first, and fails, or hits something else, where that has another shape."""
    edit = replay(path, write_sequence(path, {"/predictor/conv1": [[[4, 1], [2]]], "/predictor/": [[[3], [4]]] * 20}))
    names = {fault.fault.site for fault in edit.receipt.applied_faults}
    assert names == {"file:model/predictor.conv10.W", "file:model/predictor.conv1.b", "file:model/predictor.half"}
    assert any("several tensors of the location" in note and note.endswith("(20)") for note in edit.notes)


def test_integers_take_a_digit_of_their_shortest_form(path, arrays):
    seen = set()
    for seed in range(60):
        replay(path, write_sequence(path, {"/predictor/count": [[[0], 2]]}), seed=seed)
        seen.add(int(content(path)["predictor/count"]))
        undo_edit(path)
    value = int(arrays["predictor/count"])
    assert seen == {int(np.sign(value)) * (abs(value) ^ 1 << k) for k in range(len(f"{abs(value):b}"))}


def test_bits_that_make_nan_are_flipped_and_said(path, arrays):
    element = int(np.argmax(np.abs(arrays["predictor/double"]) < 1))
    value = arrays["predictor/double"].reshape(-1)[element]
    digits = f"{int(value.view('u8')):064b}"[1:12]
    bits = [1 + i for i, digit in enumerate(digits) if digit == "0"]
    edit = replay(path, write_sequence(path, {"predictor/double": [[[element // 6, element % 6], bits]]}))
    assert not np.isfinite(content(path)["predictor/double"].reshape(-1)[element])
    assert any("without --allowNaNValues hdf5_corrupter replaces such bits" in note for note in edit.notes)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"/predictor/conv1/W": [[[8, 0, 0, 0], [1]]]}, "entry 1: index [8, 0, 0, 0] is in none of 1 tensors"),
        ({"/predictor/half": [[[], [3]], [[1], [16]]]}, "'/predictor/half' entry 2: bit 16 is not in model/predictor.half"),
        ({"/predictor/half": [[[1], 3]]}, "bit 3 is of an integer, but model/predictor.half is float16"),
        ({"/predictor/conv2": [[[1], [3]]]}, "unknown location in"),
        ({"/predictor/half": [[[1], [-2]]]}, "it marks a value that was scaled"),
        ({"/predictor/half": [[[1], [1.5]]]}, "found the bits [1.5]"),
        ({"/predictor/half": [[[1], [True]]]}, "found the bits [True]"),
        ({"/predictor/half": [[[1], []]]}, "found the bits []"),
        ({"/predictor/half": [[[1], list(range(2000))]]}, "found the bits [0, 1,"),
        ({"/predictor/half": [[[-1], [1]]]}, "found the index [-1]"),
        ({"/predictor/half": [[[2**70], [1]]]}, "found the index"),
        ({"/predictor/half": [[[1], [1], [2]]]}, "expected [[index"),
        ({"/predictor/half": [[1, [1]]]}, "found the index 1"),
        ({"/predictor/half": [[[[1]], [1]]]}, "found the index [[1]]"),
        ({"/predictor/half": [[[1], "1"]]}, "found the bits '1'"),
        ('{"/a": [[[1], [1]]], "/a": [[[1], [1]]]}', "a location appears twice"),
        ('{"/a": [[[1], [1]]', "cannot be read as JSON"),
        ('{"/a": [[[1], [1' + "0" * 5000 + "]]]}", "cannot be read as JSON"),
        ('{"/a": ' + "[" * 200_000, "cannot be read as JSON"),
        ('{"/a": [[[1], [1]]], "/b": 3}', "'/b': found 3; expected a list of injections"),
        ('{"/a": [[[1], [NaN]]]}', "found the bits [nan]"),
        ('{"/\\u001b[31m": [[[1], [1]]]}', "unknown location"),
    ],
)  # fmt: skip
def test_damaged_sequences_are_refused_in_one_line(path, arrays, value, said):
    with pytest.raises(UsageError) as caught:
        replay(path, write_sequence(path, value))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1200
    assert_same(content(path), arrays)


def test_same_bits_need_words(path):
    with pytest.raises(UsageError, match="leave out --same-bits"):
        replay(path, write_sequence(path, {"/deep": [[[0, 0, 0, 0, 0], [1]]]}), same_bits=True)


# -- sequences as lists for a live model -------------------------------------------------------------------------------


def trials(value, how=None):
    text = value if isinstance(value, str) else json.dumps(value, indent=2)
    return [resolve_entry(entry, MODEL, "LIST") for entry in read_entries(text.encode(), "LIST", how)]


def test_a_sequence_is_a_list_for_a_live_model():
    value = {
        "/model/body.last.weight": [[[2, 1], [0, 1]], [[0, 0], None]],
        "/half/weight": [[[1, 1], [1]]],
        "head/weight": [[[0, 3], [31]]],
    }
    found = [(f.site, f.elements.tolist(), f.operands.tolist()) for trial in trials(value) for f in trial]
    assert found == [
        ("param:body.last.weight", [11], [0xC0000000]), ("param:half.weight", [3], [0x4000]),
        ("param:body.last.weight", [3], [1]),
    ]  # fmt: skip
    (together,) = trials(value, "hdf5-corrupter:together=true")
    assert [(f.site, f.elements.tolist()) for f in together] == [
        ("param:body.last.weight", [3, 11]),
        ("param:half.weight", [3]),
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"/body.last.weight": [[[], [1]]]}, "LIST '/body.last.weight' entry 1: has no index"),
        ({"/body.last.weight": [[[0, 1], 3]]}, "bit 3 is of an integer"),
        ({"/body.last.weight": [[[0, 1], [32]]]}, "bits: bit 32 is outside float32"),
        ({"/body.last.weight": [[[0, 5], [3]]]}, "index: 5 is outside"),
        ({"/body.last.weight": [[[0], [3]]]}, "index: 1 coordinates are given"),
        ({"/body.lost.weight": [[[0, 5], [3]]]}, "location: unknown parameter 'body.lost.weight'; did you mean"),
        ({"/flags.weight": [[[0], [3]]]}, "cannot be corrupted: bool"),
        ({"/body.last.weight": [[[0, 0], None]]}, "holds no fault"),
    ],
)
def test_lists_for_a_model_that_cannot_be(value, said):
    with pytest.raises(UsageError) as caught:
        trials(value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# -- settings: the law -------------------------------------------------------------------------------------------------


def draw(path, seed=0, **changes):
    with Checkpoint(path) as checkpoint:
        return draw_tries(checkpoint, read_settings(write_settings(path, **changes)), seed)


def hits(faults):
    """Flips by tensor and by bit from the sign, where no dtype is converted."""
    by_tensor, by_bit = Counter(), Counter()
    for fault in faults:
        name = fault.site.removeprefix("file:model/")
        by_tensor[name] += len(fault)
        by_bit.update(fault.corrupted_codec.bits - 1 - bit for _, bit in fault.bit_positions())
    return by_tensor, by_bit


def test_tensors_are_alike_then_elements_then_bits(tmp_path):
    path = tmp_path / "law.safetensors"
    save_file(
        {"large": np.ones((50, 40, 10), "f4"), "small": np.ones((300, 5), "f4"), "tiny": np.ones((4, 3), "f4")}, path
    )
    faults, notes = draw(path, use_random_locations=True, injection_tries=6000, first_bit=3, last_bit=10)
    rows = {f.site.removeprefix("file:model/"): f for f in faults}
    tries = {"large": 2000, "small": 2000}  # of tiny, whose 12 elements are hit again and again, parities are left
    for name, expected in tries.items():
        fault = rows[name]
        flips = sum(int(mask).bit_count() for mask in fault.operands)
        assert 0.75 * expected < flips <= 1.1 * expected
        thirds = np.bincount(fault.elements * 3 // np.prod(fault.shape), minlength=3)
        assert (abs(thirds - len(fault) / 3) < 100).all()
    assert len(rows["tiny"]) == 12
    _, by_bit = hits([rows["large"]])
    assert set(by_bit) == set(range(3, 11))
    assert all(abs(count - sum(by_bit.values()) / 8) < 80 for count in by_bit.values())
    assert any("drawn with replacement" in note for note in notes)
    again, _ = draw(path, use_random_locations=True, injection_tries=6000, first_bit=3, last_bit=10)
    other, _ = draw(path, 1, use_random_locations=True, injection_tries=6000, first_bit=3, last_bit=10)
    assert list(again) == list(faults) != list(other)


def test_a_tensor_below_two_locations_is_drawn_twice_as_often(path):
    where = ["/predictor/conv1", "/predictor/conv1/b"]  # conv1/W, conv1/b, conv10/W, and conv1/b again
    faults, notes = draw(path, locations_to_corrupt=where, injection_tries=4000, scaling_factor=1.5)
    by_tensor, _ = hits(faults)
    assert set(by_tensor) == {"predictor.conv1.W", "predictor.conv1.b", "predictor.conv10.W"}
    share = {name: count / 4000 for name, count in by_tensor.items()}
    assert share["predictor.conv1.b"] == pytest.approx(0.5, abs=0.04)
    assert share["predictor.conv1.W"] == pytest.approx(0.25, abs=0.04)
    assert any("tensors of several locations" in note for note in notes)


def test_probability_is_of_each_try(path):
    faults, _ = draw(
        path,
        locations_to_corrupt=["/predictor/conv1/W"],
        injection_tries=4000,
        injection_probability="25e-2",
        scaling_factor=2,
    )
    assert sum(hits(faults)[0].values()) == pytest.approx(1000, abs=120)


def test_a_percentage_is_of_all_values_and_a_hundredth_of_the_readmes(path, arrays):
    total = sum(array.size for array in arrays.values())
    faults, notes = draw(path, injection_type="percentage", injection_tries=1, scaling_factor=2)
    assert sum(hits(faults)[0].values()) == int(total / 100) > 0
    assert any("a percentage, as in its code, though its README says a fraction: 1 % of" in note for note in notes)


@pytest.mark.parametrize(
    ("sign", "first", "bits"),
    [(True, 4, {0, 4, 5, 6}), (False, 4, {4, 5, 6}), (True, 0, set(range(7))), (True, 1, set(range(7)))],
)
def test_the_sign_is_added_to_the_range(path, sign, first, bits):
    faults, _ = draw(
        path,
        injection_tries=600,
        first_bit=first,
        last_bit=6,
        allow_sign_change=sign,
        locations_to_corrupt=["/predictor/conv1/W"],
    )
    assert set(hits(faults)[1]) == bits


def test_a_burst_is_of_different_bits_but_for_one_as_long_as_the_range(path):
    where = {"locations_to_corrupt": ["/predictor/conv1/W"], "injection_tries": 1, "first_bit": 20, "last_bit": 23}
    for seed in range(20):
        assert sum(hits(draw(path, seed, burst=3, **where)[0])[1].values()) == 3
    whole = Counter(sum(hits(draw(path, seed, burst=4, **where)[0])[1].values()) for seed in range(60))
    assert set(whole) == {2, 4}, "the fourth bit is drawn from all four again, and may flip one back"
    assert whole[4] < whole[2]


@pytest.mark.slow
def test_a_mask_is_placed_anywhere_and_not_kept_from_the_sign(path):
    where = {"locations_to_corrupt": ["/predictor/conv1/W"], "injection_tries": 1, "bit_mask": "1011"}
    seen = set()
    for seed in range(300):
        ((fault,), _) = draw(path, seed, **where)
        seen.add(int(fault.operands[0]))
    assert seen == {0b1011 << k for k in range(29)}


def test_nan_and_infinity_are_replaced_by_another_bit_of_the_same_element(tmp_path):
    path = tmp_path / "ones.safetensors"
    save_file({"ones": np.ones(500, "f4")}, path)  # flipping bit 1 of 1.0 makes infinity
    common = {"use_random_locations": True, "injection_tries": 300, "first_bit": 1, "last_bit": 2}
    corrupt_by_settings(path, write_settings(path, **common, allow_NaN_values=True))
    assert np.isinf(content(path)["ones"]).sum() > 80
    undo_edit(path)
    faults, _ = draw(path, **common, allow_NaN_values=False)
    assert set(hits(faults)[1]) <= {1, 2}
    corrupt_by_settings(path, write_settings(path, **common, allow_NaN_values=False))
    assert np.isfinite(content(path)["ones"]).all()
    with pytest.raises(UsageError, match="no bits that the settings allow leave model/ones finite where it is 1;"):
        draw(path, **common | {"last_bit": 1}, allow_NaN_values=False)


def test_another_precision_converts_and_converts_back(path, arrays):
    where = {"locations_to_corrupt": ["/predictor/half", "/predictor/double"], "injection_tries": 30}
    asked = where | {"float_precision": "64", "first_bit": 2, "last_bit": 40}
    faults, notes = draw(path, **asked)
    assert any("1 tensor of another dtype: values are converted to float64 and back" in note for note in notes)
    corrupt_by_settings(path, write_settings(path, **asked))
    expected = {name: array.copy() for name, array in arrays.items()}
    for fault in faults:
        array = expected[fault.site.removeprefix("file:model/").replace(".", "/")].reshape(-1)
        for element, mask in zip(fault.elements, fault.operands, strict=True):
            bits = [63 - b for b in range(64) if int(mask) >> b & 1]
            with np.errstate(over="ignore"):
                array[element] = flipped(np.float64(array[element]), bits).astype(array.dtype)
    assert_same(content(path), expected)


def test_auto_takes_the_bits_of_each_dtype(path):
    faults, _ = draw(
        path,
        float_precision="auto",
        locations_to_corrupt=["/predictor/half", "/predictor/double"],
        injection_tries=2000,
    )
    for fault in faults:
        assert fault.held is None
        assert set(hits([fault])[1]) == set(range(WIDTHS[fault.dtype]))


def test_integers_and_five_dimensions(path, arrays):
    faults, notes = draw(path, use_random_locations=True, injection_tries=90, float_precision="auto")
    assert {f.site for f in faults} == {f"file:model/{name.replace('/', '.')}" for name in SHAPES}
    assert any(
        "1 tensor with more than 4 dimensions: corrupted too, though hdf5_corrupter skips them" in n for n in notes
    )
    assert any("2 tensors of integers: a digit of the shortest binary form is flipped" in n for n in notes)
    faults, _ = draw(path, locations_to_corrupt=["/signed"], injection_tries=1)
    place = int(faults[0].elements[0])
    corrupt_by_settings(path, write_settings(path, locations_to_corrupt=["/signed"], injection_tries=1))
    old, new = int(arrays["signed"].reshape(-1)[place]), int(content(path)["signed"].reshape(-1)[place])
    assert old * new >= 0
    assert (abs(old) ^ abs(new)).bit_count() == 1
    assert (abs(old) ^ abs(new)).bit_length() <= abs(old).bit_length()


def test_scaling_multiplies(path, arrays):
    edit = corrupt_by_settings(
        path, write_settings(path, locations_to_corrupt=["predictor/conv1/b"], injection_tries=9, scaling_factor=-3.0)
    )
    times = Counter(int(e) for hit in edit.receipt.applied_faults for e in hit.fault.elements)
    assert sum(times.values()) == 9
    expected = arrays["predictor/conv1/b"].copy()
    for element, count in times.items():
        for _ in range(count):
            expected[element] = np.float32(np.float64(expected[element]) * -3)
    np.testing.assert_array_equal(content(path)["predictor/conv1/b"], expected)


def test_by_the_command_line(path, arrays, capsys, tmp_path):
    file = write_settings(path, first_bit=1, last_bit=8, injection_sequence_path="/x.json")
    words = ["checkpoint", "corrupt", str(path), "--settings", str(file)]
    assert run([*words, "--dry-run"]) == 0
    assert_same(content(path), arrays)
    saved = tmp_path / "saved.jsonl"
    assert run([*words, "--seed", "3", "--save", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert "Note: the settings count bits from the sign: their bit 0 is bit 31 of a float32" in shown
    assert "Note: injection_sequence_path is not used" in shown
    assert "in 3 tensors of" in shown
    after = content(path)
    assert run(["checkpoint", "undo", str(path)]) == 0
    assert_same(content(path), arrays)
    assert run(["checkpoint", "replay", str(path), str(saved)]) == 0
    assert_same(content(path), after)
    assert run([*words, "--law", "per-tensor"]) == 2
    assert "leave out --at" in capsys.readouterr().err


def test_locations_are_those_of_an_hdf5_file(tmp_path, capsys):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "model.h5"
    with h5py.File(path, "w") as file:
        file["state_dict/layer1.0.bn1.weight"] = np.ones(16, "f4")
        file["state_dict/layer1.0.bn1.bias"] = np.ones(16, "f4")
        file["state_dict/fc.weight"] = np.ones((3, 16), "f4")
    settings = write_settings(
        path, locations_to_corrupt=["/state_dict/layer1.0"], injection_tries=40, first_bit=9, last_bit=31
    )
    assert run(["checkpoint", "corrupt", str(path), "--settings", str(settings), "--json"]) == 0
    sites = {hit["fault"]["site"] for hit in json.loads(capsys.readouterr().out)["results"]}
    assert sites == {"file:model/layer1.0.bn1.weight", "file:model/layer1.0.bn1.bias"}
    with h5py.File(path) as file:
        assert (file["state_dict/layer1.0.bn1.weight"][:] != 1).any()
        assert (file["state_dict/fc.weight"][:] == 1).all()


# -- settings: files that are wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"injection_type": None}, "lacks injection_type"),
        ({"injection_type": "counts"}, "injection_type is 'counts'; input should be 'count' or 'percentage'"),
        ({"injection_tries": 0}, "injection_tries is 0"),
        ({"injection_tries": 0.5}, "expected 1 or more for count"),
        ({"injection_tries": 10**400}, "injection_tries is 1000"),
        ({"injection_tries": float("nan")}, "injection_tries is"),
        ({"injection_tries": [1]}, "injection_tries is [1]"),
        ({"injection_type": "percentage", "injection_tries": 2}, "expected at most 1 for percentage"),
        ({"injection_probability": 1.5}, "injection_probability is 1.5"),
        ({"injection_probability": "often"}, "injection_probability is 'often'"),
        ({"float_precision": 8}, "float_precision is"),
        ({"float_precision": None}, "lacks float_precision"),
        ({"first_bit": 3}, "found first_bit 3 and last_bit None; give both"),
        ({"first_bit": 7, "last_bit": 3}, "bits 7 to 3; expected a range within 0-31"),
        ({"first_bit": 3, "last_bit": 32}, "bits 3 to 32"),
        ({"first_bit": -1, "last_bit": 3}, "first_bit is -1"),
        ({"burst": 10**9}, "burst is 1000000000"),
        ({"bit_mask": 1011}, 'put it in quotes, like "1011"'),
        ({"bit_mask": "102"}, "bit_mask is '102'"),
        ({"bit_mask": "1" * 33}, "bit_mask has 33 bits; expected at most 32"),
        ({"bit_mask": "11", "scaling_factor": 2}, "found scaling_factor and bit_mask; expected one of them"),
        ({"bit_mask": "11", "burst": 2}, "found a bit range or burst and bit_mask"),
        ({"float_precision": "auto", "burst": 2}, "found float_precision: auto and a bit range or burst"),
        ({"scaling_factor": float("inf")}, "scaling_factor is"),
        ({"allow_NaN_values": None}, "lacks allow_NaN_values"),
        ({"allow_sign_change": "maybe"}, "allow_sign_change is 'maybe'"),
        ({"locations_to_corrupt": []}, "lacks locations_to_corrupt"),
        ({"locations_to_corrupt": "/predictor"}, "locations_to_corrupt is '/predictor'"),
        ({"locations_to_corrupt": [3]}, "locations_to_corrupt is 3"),
        ({"locations_to_corrupt": ["/lost"]}, "unknown location in"),
        ({"injection_trys": 3}, "unknown setting in"),
        ({"\x1b[31m": 3}, "cannot be read as YAML"),
        ({"\u2066x": 3}, "unknown setting in"),
    ],
)  # fmt: skip
def test_settings_that_are_wrong_are_refused_in_one_line(path, arrays, changes, said):
    refused(path, write_settings(path, **changes), said)
    assert_same(content(path), arrays)


def refused(path, file, said):
    with pytest.raises(UsageError) as caught:
        corrupt_by_settings(path, file)
    text = str(caught.value)
    assert said in text
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) < 1500


BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
)
MERGES = "a: &a {x: 1}\n" + "".join(f"k{i}: &k{i} {{<<: [*a, *a, *a]}}\n" for i in range(20))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "has an alias"),
        (MERGES, "has an alias"),
        ("a: " + "[" * 100_000, "levels"),
        ("a:\n" + "".join(" " * i + "- \n" for i in range(1, 50)), "levels"),
        ("- 1\n" * 30_000, "values than settings have"),
        ("x" * 2_000_000, "is larger than 128 KiB"),
        ("burst: " + "9" * 5000, "cannot be read as YAML"),
        ("burst: !!int ''", "cannot be read as YAML"),
        ("burst: !!timestamp x", "cannot be read as YAML"),
        ("burst: 2001-99-99", "cannot be read as YAML"),
        ("burst: !!python/object/apply:os.system ['true']", "cannot be read as YAML"),
        ("{[1]: 2}", "cannot be read as YAML"),
        ("3: 4", "settings.yaml"),
        ("", "is None; expected settings"),
        ("just words", "expected settings"),
        ("\x00\xff", "cannot be read as YAML"),
        ("a: 1\n---\nb: 2", "cannot be read as YAML"),
    ],
)
def test_hostile_yaml_is_refused_in_one_line(path, tmp_path, text, said):
    file = tmp_path / "settings.yaml"
    file.write_bytes(text.encode("latin-1"))
    refused(path, file, said)


def test_without_pyyaml_the_package_is_named(path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    refused(path, write_settings(path), "pip install pyyaml")
