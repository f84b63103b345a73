"""The reader of pickles against ``torch.load(weights_only=True)``: what torch loads is shown as torch has it, or refused."""

from __future__ import annotations

import argparse
import collections
import io
import itertools
import pickle
import pickletools
import random
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from unsilent.basics.errors import UsageError
from unsilent.basics.pickle_values import PickleDamaged, read_pickle
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.formats.torch_pickle import PickledObject, leaves
from unsilent.checkpoints.formats.torch_zip import read_archive

QUANTISED = {torch.qint8: "int8", torch.quint8: "uint8", torch.qint32: "int32"}


def model_and_optimizer(steps=1):
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "loss": 0.25}


def several_kinds():
    base = torch.arange(12.0)
    return collections.OrderedDict(
        a=base, view=base[2:8].view(2, 3).t(), eight=torch.ones(3).to(torch.float8_e8m0fnu), none=None, text="x",
        parameter=torch.nn.Parameter(torch.ones(2)), counts=collections.Counter(a=2), size=torch.Size((2, 3)),
        kinds=[torch.float32, torch.device("cpu"), {1, 2}], nested=[(1, 2.5), {3: True}],
        unsigned=torch.ones(2, dtype=torch.uint16),
    )  # fmt: skip


def objects():
    return {"w": torch.ones(2), "bytes": b"ab", "complex": 1j, "long": 2**70, "array": bytearray(b"c")}


def archive_of(state):
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


def with_pickle(archive: bytes, change) -> bytes:
    """The archive with its ``data.pkl`` changed."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(result, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(entry.filename, change(content) if entry.filename.endswith("data.pkl") else content)
    return result.getvalue()


# What torch has, by an independent walk.


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements in C order."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    if tensor.is_quantized:
        tensor, words = tensor.int_repr(), None
    tensor = tensor.detach()
    if words is not None and tensor.dtype is not words:
        tensor = tensor.view(words)
    return tensor.contiguous().view(-1).numpy().tobytes()


def seen(value: Any, depth: int = 0) -> Iterator[tuple[Any, ...]]:
    """Tensors and numbers of what torch loaded; ``("object",)`` for what is neither and no container of them."""
    assert depth < 70, "endless"
    if isinstance(value, (torch.storage.TypedStorage, torch.UntypedStorage)):
        typed = isinstance(value, torch.storage.TypedStorage)
        yield from seen(torch.tensor([], dtype=value.dtype if typed else torch.uint8).set_(value), depth)
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        if value.is_conj() or value.is_neg():
            yield ("object",)
            return
        dtype = QUANTISED.get(value.dtype, str(value.dtype).removeprefix("torch."))
        yield "tensor", dtype, tuple(value.shape), raw(value)
        if value.is_quantized and value.qscheme() is torch.per_tensor_affine:
            yield from seen([value.q_scale(), value.q_zero_point()])
        if attributes := {k: v for k, v in vars(value).items() if not k.startswith("_backward")}:
            yield from seen(attributes, depth + 1)
    elif isinstance(value, (bool, int, float)):
        yield (
            ("number", type(value).__name__, repr(value))
            if not isinstance(value, int) or -(2**63) < value < 2**63
            else ("object",)
        )
    elif isinstance(value, dict):
        for part in value.values():
            yield from seen(part, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from seen(part, depth + 1)
    elif (
        isinstance(value, (str, type(None), torch.dtype, torch.device, torch.layout, type, torch.qscheme))
        or callable(value)
        or isinstance(value, torch.serialization.StorageType)
    ):
        return
    else:
        yield ("object",)


def shown(archive: bytes, path) -> list[tuple[Any, ...]]:
    """The same of our reader; before names and before an optimizer's numbers are left out. Raises ``UsageError``."""
    path.write_bytes(archive)
    result: list[tuple[Any, ...]] = []
    with Checkpoint(path) as checkpoint:
        for value in read_archive(checkpoint.files, "")[1]:
            tensor = value.stored
            if tensor.is_object or (value.is_tensor and not tensor.is_readable):
                result.append(("object",))
            elif tensor.value is not None:
                result.append(("number", type(tensor.value).__name__, repr(tensor.value)))
            else:
                content = b"".join(checkpoint.content(tensor))
                result.append(("tensor", tensor.dtype, tensor.shape, content))
    return result


def loaded(archive: bytes) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(io.BytesIO(archive), weights_only=True)


def disagreement(archive: bytes, path) -> tuple[str, str]:
    """``refused``, ``read`` or ``torch refuses``, and what is wrong; empty where nothing is."""
    try:
        theirs = loaded(archive)
    except Exception:
        return "torch refuses", ""
    try:
        ours = shown(archive, path)
    except UsageError:
        return "refused", ""
    expected = list(seen(theirs))
    surplus = collections.Counter(ours) - collections.Counter(expected)
    lacking = collections.Counter(expected) - collections.Counter(ours)
    surplus.pop(("object",), None)  # more may be named as not read
    if ("object",) in ours and ("object",) not in lacking:
        lacking.clear()  # what an object holds that is not read
    return "read", f"{ours} instead of {expected}" if surplus or lacking else ""


# Mutations.


def opcodes_of(content: bytes) -> list[bytes]:
    starts = [position for _, _, position in pickletools.genops(content)] + [len(content)]
    return [content[a:b] for a, b in itertools.pairwise(starts)]


GLOBALS = [
    b"c" + name.replace(" ", "\n").encode() + b"\n"
    for name in (
        "collections OrderedDict", "collections Counter", "torch Size", "torch FloatStorage", "torch IntStorage",
        "torch HalfStorage",
        "torch float16", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch._utils _rebuild_tensor_v3",
        "torch Tensor", "torch.nn.parameter Parameter", "__builtin__ set", "__builtin__ complex", "__builtin__ bytearray",
        "torch device", "torch._tensor _rebuild_from_type_v2", "torch FloatTensor", "UserList OrderedDict",
        "torch._utils _rebuild_meta_tensor_no_storage", "torch._utils _rebuild_parameter_with_state",
        "torch.storage UntypedStorage",
        "torch _utils._rebuild_tensor",
    )
]  # fmt: skip
PIECES = [
    *(bytes([code]) for code in b"(N\x88\x89}])\x8ft\x85\x86\x87RbsuaeQ\x81"), b"K\x00", b"K\x01", b"K\x02", b"M\x01\x02",
    b"J\xff\xff\xff\xff", b"G?\xe0\0\0\0\0\0\0", b"X\x01\0\0\0a", b"X\x01\0\0\x001", b"U\x01a", b"U\x02\xc3\xa9",
    b"\x8a\x09" + b"\xff" * 8 + b"\x01", b"X\x04\0\0\0data", *GLOBALS,
]  # fmt: skip


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The pickle with other opcodes or bytes."""
    if draw.random() < 0.2:
        at = draw.randrange(len(content))
        return content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]
    parts = opcodes_of(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        at = draw.randrange(1, len(parts))
        way = draw.randrange(6)
        if way == 0:
            parts[at : at + 1] = []
        elif way == 1:
            parts.insert(at, draw.choice(PIECES))
        elif way == 2:
            parts[at] = draw.choice(PIECES)
        elif way == 3:
            parts.insert(at, parts[draw.randrange(1, len(parts))])
        elif way == 4:
            begin = draw.randrange(1, len(parts))
            parts[at:at] = parts[begin : begin + draw.randrange(1, 12)]
        elif parts[at][:1] in (b"K", b"q", b"h"):
            parts[at] = parts[at][:1] + bytes([draw.randrange(draw.choice((4, 60)))])
        elif parts[at][:1] == b"c":
            parts[at] = draw.choice(GLOBALS)
    return b"".join(parts)


def compare_mutations(count, seed, path):
    draw = random.Random(seed)
    archives = [
        archive_of(state)
        for state in (model_and_optimizer(), several_kinds(), objects(), {"w": torch.arange(3.0)}, [torch.ones(2), 0.5])
    ]
    outcomes: collections.Counter[str] = collections.Counter()
    for number in range(count):
        archive = with_pickle(draw.choice(archives), lambda content: mutated(content, draw))
        outcome, wrong = disagreement(archive, path)
        outcomes[outcome] += 1
        assert not wrong, f"mutation {number}: {wrong}"
    assert outcomes["read"] > count // 20, outcomes


def test_sound_files_are_shown_as_torch_loads_them(tmp_path):
    for state in (model_and_optimizer(), several_kinds(), objects()):
        assert disagreement(archive_of(state), tmp_path / "w.pt") == ("read", "")


def test_changed_pickles_are_shown_as_torch_loads_them_or_refused(tmp_path):
    compare_mutations(600, 3, tmp_path / "w.pt")


@pytest.mark.slow
def test_many_changed_pickles_are_shown_as_torch_loads_them_or_refused(tmp_path):
    compare_mutations(20_000, 4, tmp_path / "w.pt")


# What a mutation seldom meets.


def storage(key, kind="FloatStorage", count=3):
    return (
        b"(X\x07\0\0\0storagectorch\n"
        + kind.encode()
        + b"\nX\x01\0\0\0"
        + key
        + b"X\x03\0\0\0cpuK"
        + bytes([count])
        + b"tQ"
    )


HOOKS = b"ccollections\nOrderedDict\n)R"


def tensor(key, kind="FloatStorage", end=HOOKS):
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(key, kind) + b"K\x00K\x03\x85K\x01\x85\x89" + end + b"tR"


def pairs(function, *, inside=b"t"):
    return function + b"(](X\x01\0\0\0w" + tensor(b"1") + b"\x86X\x01\0\0\0v" + tensor(b"0") + b"\x86e" + inside + b"R"


ORDERED = b"ccollections\nOrderedDict\n"
CRAFTED = {
    "a state that replaces a tensor's storage": b"}X\x01\0\0\0w" + tensor(b"0") + b"(" + storage(b"1")
    + b"K\x00K\x03\x85K\x01\x85tbs",
    "pairs as arguments of a dict": pairs(ORDERED),
    "pairs by the Python 2 name of a module": pairs(b"cUserList\nOrderedDict\n"),
    "a list of pairs that grows afterwards": ORDERED + b"]q\x00\x85Rh\x00X\x01\0\0\0w" + tensor(b"0") + b"\x86a\x86",
    "a key twice": b"}(X\x01\0\0\0w" + tensor(b"1") + b"X\x01\0\0\0w" + tensor(b"0") + b"u",
    "keys that are equal": b"}(K\x01" + tensor(b"1") + b"\x88" + tensor(b"0") + b"u",
    "a storage that is described twice": b"(" + tensor(b"0") + tensor(b"0", "IntStorage") + b"t",
    "a tensor in the hooks": b"}X\x01\0\0\0w" + tensor(b"0", end=b"}X\x01\0\0\0h" + tensor(b"1") + b"s") + b"s",
    "values as an attribute": b"ctorch._utils\n_rebuild_parameter_with_state\n(" + tensor(b"0") + b"\x89" + HOOKS
    + b"}X\x04\0\0\0data" + tensor(b"1") + b"stR",
    "an attribute": b"ctorch._utils\n_rebuild_parameter_with_state\n(" + tensor(b"0") + b"\x89" + HOOKS + b"}X\x01\0\0\0a"
    + tensor(b"1") + b"stR",
    "a tensor among a state dict's attributes": ORDERED + b")R}X\x09\0\0\0_metadata" + tensor(b"1") + b"sb",
    "the attributes of an ordered dict": ORDERED + b")R}X\x01\0\0\0a" + tensor(b"1") + b"sb",
    "a new ordered dict with arguments": ORDERED + b"}X\x01\0\0\0w" + tensor(b"1") + b"s\x85\x81",
    "a parameter of a parameter": b"ctorch.nn.parameter\nParameter\n" + tensor(b"1") + b"\x85\x81",
    "a tensor of a list": b"ctorch\nFloatTensor\n](G?\xe0\0\0\0\0\0\0K\x02e\x85R",
    "a storage alone": b"}X\x01\0\0\0s" + storage(b"1") + b"s",
    "a set of a list with tensors": b"c__builtin__\nset\n](" + tensor(b"0") + tensor(b"1") + b"e\x85R",
    "a name of two parts": b"ctorch\n_utils._rebuild_tensor\n(" + storage(b"1") + b"K\x00K\x03\x85K\x01\x85tR",
    "params that are no parameters": b"}X\x06\0\0\0params}X\x02\0\0\0lrG?\xe0\0\0\0\0\0\0ss",
}  # fmt: skip


def crafted(content):
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + content + b".")
        archive.writestr("archive/byteorder", b"little")
        for number, value in enumerate((0.0, 666.0)):
            archive.writestr(f"archive/data/{number}", np.full(3, value, "<f4").tobytes())
        archive.writestr("archive/version", b"3\n")
    return result.getvalue()


@pytest.mark.parametrize("name", CRAFTED)
def test_nothing_that_torch_loads_disappears(name, tmp_path):
    loaded(crafted(CRAFTED[name]))
    outcome, wrong = disagreement(crafted(CRAFTED[name]), tmp_path / "w.pt")
    assert not wrong
    assert outcome in ("read", "refused")


def test_numbers_under_a_key_params_are_listed(tmp_path):
    torch.save({"params": {"lr": 0.5, "n": 3}}, tmp_path / "w.pt")
    with Checkpoint(tmp_path / "w.pt") as checkpoint:
        assert {t.value for t in checkpoint.tensors.values()} == {0.5, 3}


def test_an_order_of_parameters_that_is_not_torch_s_is_listed_and_names_none(tmp_path):
    state = model_and_optimizer()
    path = tmp_path / "w.pt"
    torch.save(state, path)
    with Checkpoint(path) as checkpoint:
        assert "optimizer/weight/exp_avg" in checkpoint.tensors
        assert not [name for name in checkpoint.tensors if "/params" in name]
    state["optimizer"]["param_groups"][0]["params"] = [1, 0]
    torch.save(state, path)
    with Checkpoint(path) as checkpoint:
        assert "optimizer/0/exp_avg" in checkpoint.tensors
        assert len([name for name in checkpoint.tensors if "/params/" in name]) == 2


class Settings:
    """A class of a training script."""


def test_objects_of_real_files_go_on_working(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised tensors are deprecated
        settings = Settings()
        settings.mean, settings.rate = torch.ones(3), 0.5
        state = {
            "args": argparse.Namespace(lr=0.5, scale=torch.full((2,), 2.0)),
            "settings": settings,
            "default": collections.defaultdict(dict, {"step": 4}),
            "numpy": np.random.RandomState(0).get_state(),
            "scalar": np.float64(1.5),
            "groups": [{1, 2}, torch.Size((2, 3)), torch.float32, torch.device("cpu")],
            "model": {
                "sparse": torch.eye(2).to_sparse(), "parameter": torch.nn.Parameter(torch.ones(2)),
                "quantised": torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.qint8),
                "channels": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
            },
        }  # fmt: skip
        torch.save(state, tmp_path / "w.pt")
    with Checkpoint(tmp_path / "w.pt") as checkpoint:
        values = {name: tensor.value for name, tensor in checkpoint.tensors.items()}
        objects = {name: tensor.obstacle for name, tensor in checkpoint.tensors.items() if tensor.is_object}
        readable = {name for name, tensor in checkpoint.tensors.items() if tensor.is_readable}
    assert {
        "model/args/scale",
        "model/settings/mean",
        "model/parameter",
        "model/quantised",
        "model/channels",
    } <= readable
    assert values["other/args/lr"] == values["other/settings/rate"] == 0.5
    assert values["other/default/step"] == 4
    assert values["other/quantised/scale"] == 0.5
    assert "model/channels/scale" in readable
    assert {"other/numpy/1", "other/scalar"} <= set(objects)
    assert all("is not read" in obstacle for obstacle in objects.values())


def test_an_object_that_is_not_read_has_a_hash_of_its_content():
    def hash_of(value):
        content = pickle.dumps(value, 2)
        (leaf,) = [
            leaf for _, leaf in leaves(read_pickle(content)[0], "x", len(content)) if isinstance(leaf, PickledObject)
        ]
        return leaf.fingerprint

    assert hash_of([np.arange(3)]) == hash_of([np.arange(3)])
    assert hash_of([np.arange(3)]) == hash_of(["another", np.arange(3)])
    assert hash_of([np.arange(3)]) != hash_of([np.arange(1, 4)])


def test_a_conjugate_is_listed_with_the_reason(tmp_path):
    torch.save({"w": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "w.pt")
    with Checkpoint(tmp_path / "w.pt") as checkpoint:
        assert "resolve_conj" in checkpoint.tensor("model/w").obstacle


def test_a_frame_that_is_longer_than_the_file_is_refused_as_pickle_refuses_it():
    content = pickle.dumps([1, 2, 3], protocol=4)
    place = content.index(b"\x95") + 1
    read_pickle(content)
    for size in (len(content), 1 << 63):
        changed = content[:place] + size.to_bytes(8, "little") + content[place + 8 :]
        with pytest.raises((pickle.UnpicklingError, OverflowError)):
            pickle.loads(changed)
        with pytest.raises(PickleDamaged, match="a frame is longer than the file"):
            read_pickle(changed)
