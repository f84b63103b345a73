"""Writing a fault's bits into a tensor, in place or into a copy, with verification.

Can be used during a run: dispatch modes do not see these writes, and autograd's version counters do not change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from unsilent.basics.errors import InjectionError
from unsilent.faults import CODECS, Fault
from unsilent.faults.receipts import AppliedFault
from unsilent.sites.memory import TensorMemory, Words, dtype_name, read_together


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether the tensor is strided, has memory, and is not a negated or conjugated view."""
    special = tensor.is_nested or tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()
    return tensor.layout == torch.strided and not special


def corruptible(tensor: Tensor) -> bool:
    """Whether a fault can corrupt this tensor: it has elements, memory and a dtype with a codec."""
    return dtype_name(tensor.dtype) in CODECS and has_plain_memory(tensor) and not tensor.is_meta and tensor.numel() > 0


def intended(memory: TensorMemory, fault: Fault) -> tuple[Words, Words]:
    """The words at the fault's elements before the fault and after it."""
    before = memory.read(fault.elements)
    source = memory.read(fault.operands) if fault.operation == "copy_from" else None
    return before, fault.apply(before, source)


def intended_together(targets: Sequence[tuple[TensorMemory, Fault]]) -> list[tuple[Words, Words]]:
    """Words before and after faults in different tensors, with at most two waits for the device."""
    before = read_together([(memory, fault.elements) for memory, fault in targets])
    copying = [k for k, (_, fault) in enumerate(targets) if fault.operation == "copy_from"]
    sources = read_together([(targets[k][0], np.asarray(targets[k][1].operands, np.int64)) for k in copying])
    source = dict(zip(copying, sources, strict=True))
    return [(words, targets[k][1].apply(words, source.get(k))) for k, words in enumerate(before)]


def write(memory: TensorMemory, fault: Fault, before: Words, words: Words) -> AppliedFault:
    """Write ``words`` at the fault's elements and read them back; raises ``InjectionError`` if they differ."""
    memory.write(fault.elements, words)
    return landed(fault, before, words, memory.read(fault.elements))


def landed(fault: Fault, before: Words, words: Words, after: Words) -> AppliedFault:
    """The record of an applied fault; raises ``InjectionError`` if memory does not hold the words written."""
    if not np.array_equal(after, words):
        missed = int((after != words).sum())
        raise InjectionError(
            f"{fault.site}: {len(fault) - missed} of {len(fault)} elements corrupted; "
            "the memory does not hold the values that were written"
        )
    return AppliedFault(fault, before, after)


def misfit(tensor: Tensor, fault: Fault) -> str:
    """Why a fault does not fit a tensor (other dtype or shape, no memory); empty if it fits."""
    result = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    if result != (expected := f"{fault.dtype}{list(fault.shape)}"):
        return f"the fault is for {expected}, found {result}"
    return "" if corruptible(tensor) else f"the tensor, {result}, has no memory of its own"


def corrupt(tensor: Tensor, fault: Fault) -> AppliedFault:
    """Apply a fault to a tensor in place, whatever its strides; raises ``InjectionError`` if that fails."""
    with no_dispatch():
        if why := misfit(tensor, fault):
            raise InjectionError(f"{fault.site}: {why}")
        memory = TensorMemory(tensor)
        return write(memory, fault, *intended(memory, fault))


def overlaps(tensor: Tensor) -> bool:
    """Whether several elements of the tensor may share one memory cell (``expand``, ``unfold``)."""
    with no_dispatch():
        return bool(torch._debug_has_internal_overlap(tensor) != 0)


def copied(tensor: Tensor) -> Tensor:
    """A copy of a tensor with its own memory: the whole storage, at the same offset and strides."""
    with no_dispatch():
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return copy


def corrupted_copy(tensor: Tensor, fault: Fault) -> Tensor:
    """A corrupted copy of a tensor (see `copied`); the tensor itself is unchanged.

    Raises ``InjectionError`` if the fault does not fit or is not written as intended.
    """
    with no_dispatch():
        if why := misfit(tensor, fault):
            raise InjectionError(f"{fault.site}: {why}")
        copy = copied(tensor)
        corrupt(copy, fault)
        return copy
