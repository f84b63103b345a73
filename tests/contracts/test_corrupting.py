"""Every fault model x dtype x layout corrupted in place and in a copy: the words of a numpy oracle, nothing else changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from contracts.test_undo import FAULTS
from unsilent.basics.errors import InjectionError, UsageError
from unsilent.faults import CODECS, Region, fault_model
from unsilent.sites import corrupt, corrupted_copy


def layouts(dtype):
    base = torch.randint(0, 120, (7, 9), generator=torch.Generator().manual_seed(3)).float().to(dtype)
    return {
        "dense": base.clone(),
        "turned": base.clone().t(),
        "strided": base.clone()[1::2, ::3],
        "last channel": base.clone().reshape(7, 3, 3, 1).permute(0, 3, 1, 2),
        "scalar": base.clone()[2, 3],
    }


def words(tensor, codec):
    return np.frombuffer(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes(), codec.word_dtype)


def storage(tensor):
    return bytes(tensor.untyped_storage())


@pytest.mark.parametrize("dtype", sorted(CODECS))
@pytest.mark.parametrize("text", FAULTS)
def test_the_words_are_those_of_the_oracle(text, dtype):
    codec = CODECS[dtype]
    for number, (name, tensor) in enumerate(layouts(getattr(torch, dtype)).items()):
        region = Region("op:m#a.0/fwd/out", dtype, tuple(tensor.shape), step=3, occurrence=number)
        try:
            drawn = fault_model(text).draw([region], np.random.default_rng(number))
        except UsageError:  # too small, or no such bits
            continue
        for fault in drawn:
            assert (fault.step, fault.occurrence) == (3, number)
            before, stored = words(tensor, codec), storage(tensor)
            source = before[fault.operands] if fault.operation == "copy_from" else None
            expected = before.copy()
            expected[fault.elements] = fault.apply(before[fault.elements], source)
            copy = corrupted_copy(tensor, fault)
            assert words(copy, codec).tolist() == expected.tolist(), name
            assert (copy.stride(), copy.storage_offset()) == (tensor.stride(), tensor.storage_offset())
            assert storage(tensor) == stored
            hit = corrupt(tensor, fault)
            assert words(tensor, codec).tolist() == expected.tolist(), name
            assert storage(tensor) == storage(copy), "memory was changed that the fault does not name"
            assert len(hit.after) == len(fault)


def test_what_does_not_fit_is_refused_and_untouched():
    region = Region("op:m#a.0/fwd/out", "float32", (2, 3))
    (fault,) = fault_model("bitflip").draw([region], np.random.default_rng(0))
    for tensor in (torch.zeros(3, 2), torch.zeros(2, 3).double(), torch.zeros(2, 3, device="meta")):
        for how in (corrupt, corrupted_copy):
            with pytest.raises(InjectionError, match="op:m#a.0/fwd/out: "):
                how(tensor, fault)
