"""The tensors of a batch as sites: ``input_ids`` of a dict, ``a.b`` if nested, ``0`` for a single tensor.

The tensors of a tuple are named by their position, from ``0``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from unsilent.basics.errors import InjectionError
from unsilent.basics.nested import Path, leaves_in, map_tensors
from unsilent.faults import Fault
from unsilent.faults.naming import parse_site
from unsilent.faults.receipts import AppliedFault
from unsilent.sites.corrupting import copied, corrupt, misfit


def named_inputs(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a batch, in the batch's order."""
    for path, leaf in leaves_in(batch):
        if isinstance(leaf, Tensor):
            yield _name(path), leaf


def _name(path: Path) -> str:
    return ".".join(path) or "0"


def corrupted_inputs(batch: Any, faults: Sequence[Fault], applied_faults: list[AppliedFault]) -> Any:
    """The batch with corrupted copies of the tensors that ``input:`` faults name; the original is unchanged.

    ``applied_faults``: list to which applied faults are appended.

    Raises ``InjectionError`` if a fault names no tensor of the batch or does not fit it.
    """
    if not faults:
        return batch
    result = dict(named_inputs(batch))
    corrupted: dict[str, Tensor] = {}
    for fault in faults:
        name = parse_site(fault.site).name
        if name not in result:
            raise InjectionError(
                f"{fault.site}: the batch has no such input; its inputs are {', '.join(result) or 'no tensor'}"
            )
        if name not in corrupted:
            if why := misfit(result[name], fault):
                raise InjectionError(f"{fault.site}: {why}")
            corrupted[name] = copied(result[name])
        applied_faults.append(corrupt(corrupted[name], fault))
    return map_tensors(batch, lambda path, tensor: corrupted.get(_name(path), tensor))
