"""Word access through numpy (CPU) and through torch (other devices) is the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unsilent.faults import CODECS, fault_model
from unsilent.sites import Parameters
from unsilent.sites.memory import TensorMemory, read_together
from unsilent.sites.parameters import ParameterInjection

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def tensors(dtype, device):
    base = torch.randint(0, 100, (6, 8), generator=torch.Generator().manual_seed(0)).float().to(dtype).to(device)
    return {
        "dense": base,
        "turned": base.t(),
        "strided": base[::2, 1::3],
        "vector": base[0],
        "row": base[:, 3],
        "scalar": base[2, 3],
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", sorted(CODECS))
def test_the_torch_path_reads_and_writes_the_same_words(dtype, device):
    for name, tensor in tensors(getattr(torch, dtype), device).items():
        quick, general = TensorMemory(tensor), TensorMemory(tensor)
        general._array = None  # what a tensor on another device has
        elements = np.unique(np.random.default_rng(1).integers(0, tensor.numel(), 5))
        expected = tensor.detach().cpu().contiguous().flatten()[torch.from_numpy(elements)].view(torch.uint8).numpy()
        before = general.read(elements)
        assert before.dtype == CODECS[dtype].word_dtype
        assert before.view(np.uint8).tolist() == expected.tolist(), name
        assert quick.read(elements).tolist() == before.tolist()
        digest = quick.hash()
        flipped = before ^ before.dtype.type(5)
        flipped.flags.writeable = False  # operands of a fault are read-only
        general.write(elements, flipped)
        assert quick.read(elements).tolist() == flipped.tolist()
        assert quick.hash() == general.hash() != digest
        quick.write(elements, before)
        assert general.read(elements).tolist() == before.tolist()
        assert general.hash() == digest


def test_reading_gives_a_copy():
    tensor = torch.arange(4.0)
    words = TensorMemory(tensor).read(np.array([1, 2]))
    words[:] = 0
    assert tensor.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_words_of_several_tensors_are_read_together(device):
    parts, expected = [], []
    for dtype in ("float32", "int8", "bfloat16", "float16", "int32"):
        for tensor in tensors(getattr(torch, dtype), device).values():
            memory = TensorMemory(tensor)
            elements = np.random.default_rng(len(parts)).integers(0, tensor.numel(), len(parts) % 4)
            expected.append(memory.read(elements))
            memory._array = None if len(parts) % 3 else memory._array
            parts.append((memory, elements))
    for got, wanted in zip(read_together(parts), expected, strict=True):
        assert got.dtype == wanted.dtype
        assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", ["bitflip:rate=0.1", "copy:count=3", "zero:run=3", "bitflip"])
def test_faults_of_several_tensors_are_applied_and_undone_together(device, text):
    """On a device, and on a CPU by the same way: as one after the other."""
    ends = []
    for together in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).to(device)
        parameters = Parameters(model)
        for site in parameters.sites.values():
            site.memory._array = None
        regions = parameters.select("param:*")
        faults = [f for r in regions for f in fault_model(text).draw((r,), np.random.default_rng(1))]
        assert len({f.site for f in faults}) > 1
        golden = parameters.hash()
        injection = parameters.inject(faults, strict=True)
        if not together:
            injection.__class__ = OneByOne
        with injection as receipt:
            ends.append((parameters.hash(), [(a.before.tolist(), a.after.tolist()) for a in receipt.applied_faults]))
        assert parameters.hash() == golden
    assert ends[0] == ends[1]
    assert ends[0][0] != golden


class OneByOne(ParameterInjection):
    _in_different_tensors = False
