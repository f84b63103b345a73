"""What must hold for every dtype and shape: one bit of one element changes, checksums fit or do not, undo restores every byte."""

from __future__ import annotations

import itertools
import random
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import unsilent
from checkpoint_checks import assert_one_word_differs, content, flipped, words
from unsilent.basics.printable import escape_unprintable
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.crc32 import crc_change
from unsilent.checkpoints.drawing import DrawOptions, corruptible, draw_faults
from unsilent.checkpoints.editing import apply_edit, undo_edit
from unsilent.checkpoints.hashes import hash_elements
from unsilent.checkpoints.names import MOST_CHARACTERS, SECTIONS, section_and_rest, unique_names, with_parameter_names
from unsilent.faults.codecs import CODECS
from unsilent.faults.models import fault_model
from unsilent.faults.record import Fault
from unsilent.sites.memory import content_of

SHAPE = (5, 6)
DTYPES = tuple(CODECS)


def values(dtype):
    """Distinct values, some of them negative where there are negative ones."""
    numbers = torch.arange(30.0).reshape(SHAPE) - (0 if dtype == "uint8" else 15)
    return numbers.to(getattr(torch, dtype))


@pytest.fixture(scope="module", params=["torch.save", "safetensors"])
def saved(request, tmp_path_factory):
    """A file with a tensor of every dtype, and its loader."""
    state = {dtype: values(dtype) for dtype in DTYPES}
    folder = tmp_path_factory.mktemp("saved")
    if request.param == "torch.save":
        torch.save({"model": state}, folder / "all.pt")
        return folder / "all.pt", lambda path: torch.load(path)["model"], state
    save_file(state, folder / "all.safetensors")
    return folder / "all.safetensors", load_file, state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checksums", ["stale", "fixed"])
def test_one_bit_changes_one_element(dtype, checksums, saved):
    path, load, state = saved
    draw = random.Random(dtype)
    width = CODECS[dtype].bits
    for bit in {0, width - 1, draw.randrange(width)}:
        element = draw.randrange(30)
        with flipped(path, f"model/{dtype}", element, bit, checksums):
            loaded = load(path)
            for name, before in state.items():
                if name == dtype:
                    assert_one_word_differs(loaded[name], before, element, bit)
                else:
                    assert np.array_equal(words(loaded[name]), words(before))
            if path.suffix == ".pt":
                broken = zipfile.ZipFile(path).testzip()
                assert broken is None if checksums == "fixed" else "/data/" in broken


@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=4),
    permute=st.randoms(use_true_random=False),
    dtype=st.sampled_from(DTYPES),
    begin=st.integers(0, 3),
    step=st.integers(1, 3),
)
def test_strided_views_have_the_bytes_of_torch(tmp_path_factory, shape, permute, dtype, begin, step):
    order = list(range(len(shape)))
    permute.shuffle(order)
    longer = [n * step for n in shape]
    storage = torch.arange(begin + int(np.prod(longer, dtype=int))).to(getattr(torch, dtype))
    view = storage[begin:].view(longer)[tuple(slice(None, None, step) for _ in shape)].permute(order)
    path = tmp_path_factory.mktemp("view") / "view.pt"
    torch.save({"storage": storage, "view": view}, path)
    loaded = torch.load(path)["view"]
    assert content(path, "model/view") == words(loaded).tobytes()
    element, bit = permute.randrange(view.numel()), permute.randrange(CODECS[dtype].bits)
    with flipped(path, "model/view", element, bit, "fixed"):
        assert_one_word_differs(torch.load(path)["view"], view, element, bit)
        assert int(np.count_nonzero(words(torch.load(path)["storage"]) != words(storage))) == 1
        assert zipfile.ZipFile(path).testzip() is None


def test_a_shared_storage_changes_for_all_of_its_tensors(tmp_path):
    base, path = torch.arange(12.0), tmp_path / "shared.pt"
    torch.save({"whole": base, "row": base.view(3, 4)[1], "again": base}, path)
    with flipped(path, "model/row", 2, 23):
        loaded = torch.load(path)
        assert_one_word_differs(loaded["whole"], base, 6, 23)
        assert_one_word_differs(loaded["again"], base, 6, 23)
    with Checkpoint(path) as checkpoint:
        assert [region.site for region in corruptible(checkpoint)] == ["file:model/whole"]


@pytest.mark.parametrize("kind", ["torch.save", "safetensors"])
def test_scalars_and_empty_tensors(kind, tmp_path):
    state = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "one": torch.ones(1, 1, 1)}
    path = tmp_path / "small.bin"
    torch.save(state, path) if kind == "torch.save" else save_file(state, path)
    load = torch.load if kind == "torch.save" else load_file
    with flipped(path, "model/scalar", 0, 31):
        assert float(load(path)["scalar"]) == -2.5
    with flipped(path, "model/one", 0, 31, "fixed"):
        assert load(path)["one"].tolist() == [[[-1.0]]]
    assert content(path, "model/empty") == b""
    with Checkpoint(path) as checkpoint:
        drawn = draw_faults(checkpoint, corruptible(checkpoint), fault_model("bitflip:count=50"), DrawOptions())
        assert {fault.site for fault in drawn} == {"file:model/scalar", "file:model/one"}


@pytest.mark.parametrize("bit", [0, 51, 52, 62, 63])
@pytest.mark.parametrize("checksums", ["stale", "fixed"])
def test_a_learning_rate_in_the_pickle(bit, checksums, tmp_path):
    parameter, path = torch.nn.Parameter(torch.ones(2)), tmp_path / "training.pt"
    torch.save({"optimizer": torch.optim.SGD([parameter], lr=0.1).state_dict()}, path)
    expected = struct.unpack("<d", struct.pack("<Q", struct.unpack("<Q", struct.pack("<d", 0.1))[0] ^ 1 << bit))[0]
    with flipped(path, "optimizer/param_groups/0/lr", 0, bit, checksums):
        broken = zipfile.ZipFile(path).testzip()
        assert broken is None if checksums == "fixed" else broken.endswith("data.pkl")
        if checksums == "fixed":  # torch checks the checksum of the pickle
            assert torch.load(path)["optimizer"]["param_groups"][0]["lr"] == expected
        with Checkpoint(path) as checkpoint:
            assert checkpoint.tensor("optimizer/param_groups/0/lr").value == expected


def test_files_without_checksums_stay_without(tmp_path):
    path, tensor = tmp_path / "none.pt", torch.arange(6.0)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": tensor}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    stored = {entry.filename: entry.CRC for entry in zipfile.ZipFile(path).infolist()}
    assert set(stored.values()) == {0}
    with flipped(path, "model/w", 3, 30, "fixed"):
        assert_one_word_differs(torch.load(path)["w"], tensor, 3, 30)
        assert {entry.filename: entry.CRC for entry in zipfile.ZipFile(path).infolist()} == stored


# Checksums and hashes.


@given(content=st.binary(min_size=1, max_size=300), draw=st.randoms(use_true_random=False))
def test_crc_change_is_that_of_zlib(content, draw):
    begin = draw.randrange(len(content))
    end = draw.randrange(begin, len(content)) + 1
    new = bytes(draw.randrange(256) for _ in range(end - begin))
    difference = bytes(a ^ b for a, b in zip(content[begin:end], new, strict=True))
    changed = content[:begin] + new + content[end:]
    assert zlib.crc32(content) ^ crc_change(difference, len(content) - end) == zlib.crc32(changed)


@given(length=st.integers(0, 2**21), bit=st.integers(0, 7))
def test_crc_change_far_from_the_end_is_that_of_zlib(length, bit):
    zeros = bytes(length)
    assert crc_change(bytes([1 << bit]), length) == zlib.crc32(bytes([1 << bit]) + zeros) ^ zlib.crc32(b"\0" + zeros)


@given(first=st.integers(0, 2**40), second=st.integers(0, 2**40))
def test_crc_changes_add_up(first, second):
    """A change twice is none; two changes are one of both."""
    near, far = sorted((first, second))
    one, two = crc_change(b"\x10", near), crc_change(b"\x01", far)
    assert one ^ one == 0
    if far - near < 1000 and far > near:
        both = b"\x01" + bytes(far - near - 1) + b"\x10"
        assert crc_change(both, near) == one ^ two


@pytest.mark.parametrize("times", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_fast_hash_finds_small_errors_and_swaps(times):
    rng = np.random.default_rng(8)
    clean = rng.integers(0, 256, 4096, dtype=np.uint8)

    def fast(array):
        return hash_elements([array.tobytes()], "uint8", array.shape).xxh3_128

    expected = fast(clean)
    for number in range(times):
        flips = rng.choice(clean.size * 8, number % 3 + 1, replace=False)
        damaged = clean.copy()
        for bit in flips.tolist():
            damaged[bit // 8] ^= 1 << bit % 8
        assert fast(damaged) != expected, flips
        swapped = clean.view("<f4").copy()
        a, b = rng.choice(swapped.size, 2, replace=False)
        bits = swapped.view("<u4")
        bits[[a, b]] = bits[[b, a]]
        assert fast(swapped) != expected or clean.view("<u4")[a] == clean.view("<u4")[b]


@given(cuts=st.lists(st.integers(0, 500), max_size=6))
def test_hashes_do_not_depend_on_how_the_content_is_cut(cuts):
    whole = bytes(range(250)) * 2
    places = [0, *sorted(cuts), len(whole)]
    parts = [whole[a:b] for a, b in itertools.pairwise(places)]
    assert hash_elements(parts, "uint8", (500,)) == hash_elements([whole], "uint8", (500,))


# Names.

SOME_KEYS = [
    "model", "state_dict", "optimizer", "0", "scheduler", "rng", "fc.weight", "state", "param_groups", "_modules", "_parameters",
    "opt.state.fc.weight.exp_avg", "opt.param_groups.fc.weight.lr", "param_groups.fc.lr", "state.fc.exp_avg",
]  # fmt: skip
KEYS = st.lists(
    st.one_of(st.sampled_from(SOME_KEYS), st.text(max_size=8)),
    min_size=1, max_size=5,
).map(tuple)  # fmt: skip


@given(paths=st.lists(KEYS, max_size=12), numbers=st.randoms(use_true_random=False))
def test_every_value_has_a_name_of_its_own(paths, numbers):
    names = unique_names(paths, [numbers.choice([None, (), (2,)]) for _ in paths])
    assert len(set(names)) == len(names) == len(paths)
    for name in names:
        assert name == escape_unprintable(name)
        assert name.partition("/")[0] in SECTIONS


def test_a_value_above_a_flattened_optimizer_has_a_name():
    flattened = "opt.param_groups.fc.weight.lr"
    paths = [("model",), ("model", "model", flattened), ("model", flattened)]
    assert len(set(unique_names(paths, [None, None, None]))) == 3


@given(path=KEYS)
def test_wrappers_do_not_change_a_name(path):
    if path[0].lower() not in ("model", "state_dict"):
        assert section_and_rest(("state", *path)) == section_and_rest(path)


def test_long_names_are_cut_and_stay_apart():
    names = unique_names([("x" * 5000, "a"), ("x" * 5000, "b"), ("y",)], [(1,)] * 3)
    assert len(set(names)) == 3
    assert max(map(len, names)) < MOST_CHARACTERS + 5


@given(count=st.integers(0, 6), draw=st.randoms(use_true_random=False))
def test_optimizer_names_are_one_to_one(count, draw):
    names = [f"model/p{n}" for n in range(count)] + [f"optimizer/{n}/{s}" for n in range(count) for s in ("m", "step")]
    names += [f"optimizer/param_groups/0/params/{n}" for n in range(count)]
    shapes = [(3, 3) if not name.endswith("step") else () for name in names[: 3 * count]] + [None] * count
    numbers = [None] * 3 * count + list(range(count))
    if count and draw.random() < 0.3:
        shapes[names.index(f"optimizer/{draw.randrange(count)}/m")] = (4,)
        assert with_parameter_names(names, shapes, numbers) == names
    else:
        renamed = with_parameter_names(names, shapes, numbers)
        assert len(set(renamed)) == len(names)
        assert len(set(renamed) - set(names)) == 2 * count


# The same fault in a file and in memory.


def small_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4).bfloat16())


@pytest.mark.parametrize(
    "model_name", ["bitflip:count=5", "zero:count=3", "random:count=2", "scale:factor=2", "bitflip:bits=exponent"]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_fault_does_the_same_in_a_file_and_in_memory(model_name, seed, tmp_path):
    model, path = small_model(), tmp_path / "model.pt"
    torch.save({"model": model.state_dict()}, path)
    before = path.read_bytes()
    with Checkpoint(path) as checkpoint:
        regions = corruptible(checkpoint, ["*.weight", "*.bias"])
        faults = draw_faults(checkpoint, regions, fault_model(model_name), DrawOptions(seed=seed))
        patches, receipt = checkpoint.plan(faults, "fixed")
    assert faults
    apply_edit(path, patches, receipt.to_json())
    loaded = torch.load(path)["model"]
    undo_edit(path)
    assert path.read_bytes() == before
    with unsilent.inject(model, faults) as live:
        for name, parameter in model.named_parameters():
            assert np.array_equal(words(loaded[name]), words(parameter)), name
    assert [
        np.array_equal(a.after, b.after) for a, b in zip(live.applied_faults, receipt.applied_faults, strict=True)
    ] == [True] * len(faults)


@pytest.mark.parametrize("bit", [0, 14])
def test_a_fault_of_a_live_model_does_the_same_in_its_file(bit, tmp_path):
    model, path = small_model(), tmp_path / "model.pt"
    torch.save({"model": model.state_dict()}, path)
    with unsilent.inject(model, "param:2.weight[1,3]", bit=bit) as live:
        corrupted = {name: words(tensor).copy() for name, tensor in model.state_dict().items()}
        from_memory = [Fault.from_json(hit.fault.to_json()) for hit in live.applied_faults]
    faults = [
        Fault(f"file:model/{f.site.removeprefix('param:')}", f.dtype, f.shape, f.elements, f.operation, f.operands)
        for f in from_memory
    ]
    with Checkpoint(path) as checkpoint:
        patches, receipt = checkpoint.plan(faults)
    apply_edit(path, patches, receipt.to_json())
    for name, tensor in torch.load(path)["model"].items():
        assert np.array_equal(words(tensor), corrupted[name]), name
    undo_edit(path)
    for name, tensor in torch.load(path)["model"].items():
        assert np.array_equal(words(tensor), words(model.state_dict()[name])), name


def test_bytes_of_a_tensor_whose_only_element_has_a_stride(tmp_path):
    strided = torch.arange(4, dtype=torch.float64).view(4)[slice(None, None, 4)].as_strided((1,), (2,))
    assert bytes(content_of(strided)) == bytes(8)
    unsilent.verified_save({"w": strided}, tmp_path / "w.pt")
    assert torch.equal(unsilent.verified_load(tmp_path / "w.pt")["w"], strided)
