"""The tensors of a batch as sites: ``0`` for a lone tensor or the first of a tuple, ``input_ids`` of a dict, ``a.b`` nested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from unsilent.errors import InjectionError
from unsilent.faults import Fault
from unsilent.faults.naming import parse_site
from unsilent.faults.receipts import Hit
from unsilent.sites.striking import copied, corrupt, misfit


def named_inputs(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a batch, in its own order."""
    if isinstance(batch, Tensor):
        yield "0", batch
    else:
        yield from _nested("", batch)


def _nested(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _nested(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _nested(f"{prefix}.{i}" if prefix else str(i), item)


def struck_inputs(batch: Any, faults: Sequence[Fault], hits: list[Hit]) -> Any:
    """The batch with corrupted copies of the tensors that the ``input:`` faults name; the batch itself is left alone.

    ``hits``: what landed is added to it.

    Raises ``InjectionError`` where a fault names no tensor of the batch or does not fit it.
    """
    if not faults:
        return batch
    found = dict(named_inputs(batch))
    struck: dict[str, Tensor] = {}
    for fault in faults:
        name = parse_site(fault.site).name
        if name not in found:
            raise InjectionError(f"{fault.site}: the batch has no such input; it has {', '.join(found) or 'no tensor'}")
        if name not in struck:
            if why := misfit(found[name], fault):
                raise InjectionError(f"{fault.site}: {why}")
            struck[name] = copied(found[name])
        hits.append(corrupt(struck[name], fault))
    return struck["0"] if isinstance(batch, Tensor) else _replaced("", batch, struck)


def _replaced(prefix: str, value: Any, struck: Mapping[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return struck.get(prefix, value)
    if isinstance(value, Mapping):
        return {k: _replaced(f"{prefix}.{k}" if prefix else str(k), v, struck) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_replaced(f"{prefix}.{i}" if prefix else str(i), v, struck) for i, v in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
