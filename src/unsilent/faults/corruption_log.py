"""Log lines that list the elements that faults corrupted, in the format of the ISCA'23 artifact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.faults.naming import parse_site
from unsilent.faults.receipts import Receipt
from unsilent.faults.record import Fault
from unsilent.faults.sampling import Ints


def corrupted_log_lines(
    receipt: Receipt,
    worker: int,
    layer: str,
    shape: Sequence[int],
    positions: Ints,
    values: Sequence[float] | None = None,
) -> list[str]:
    """The log lines of one step: worker, layer, tensor shape, and each element's index, old and new value.

    Args:
        receipt: Receipt of the step.
        shape: Shape of the tensor in the layout of the log.
        positions: Indices int64[n, d] into ``shape``, one for each corrupted element of the receipt, in the receipt's order.
        values: New values to log (None: the values that were read back).
    """
    before = [x for hit in receipt.applied_faults for x in hit.fault.codec.decode(hit.before).tolist()]
    after = [x for hit in receipt.applied_faults for x in hit.fault.codec.decode(hit.after).tolist()]
    values = after if values is None else list(values)
    if not len(before) == len(positions) == len(values):
        raise UsageError(
            f"{len(positions)} positions and {len(values)} values for {len(before)} corrupted elements; give one of each per "
            "element"
        )
    order = np.argsort(np.ravel_multi_index(tuple(np.asarray(positions).T), tuple(shape)))
    lines = [f"Inject worker: {worker}", f"Inject layer: {layer}", f"Shape for target layer is {tuple(shape)}"]
    places = [tuple(index) for index in positions.tolist()]
    return lines + [
        f"Position is {places[i]}, Golden data is {before[i]}, inject data is {values[i]}" for i in order.tolist()
    ]


def trial_lines(receipt: Receipt) -> list[str]:
    """The log lines of any faults: the rank is the worker, the site is the layer, and images have channels last."""
    parts = []
    for hit in receipt.applied_faults:
        site = parse_site(hit.fault.site)
        image = site.kind == "op" and len(hit.fault.shape) > 2 and "convolution" in site.name
        shape, places = channels_last_indices(hit.fault) if image else (hit.fault.shape, _places(hit.fault))
        parts += corrupted_log_lines(
            replace(receipt, applied_faults=(hit,)), hit.fault.rank, hit.fault.site, shape, places
        )
    return parts


def channels_last_indices(fault: Fault) -> tuple[tuple[int, ...], Ints]:
    """Shape and indices int64[n, d] of a fault's elements, with the channel axis moved to the end as in TensorFlow."""
    index = _places(fault)
    axes = [0, *range(2, len(fault.shape)), 1] if len(fault.shape) > 2 else list(range(len(fault.shape)))
    return tuple(fault.shape[a] for a in axes), index[:, axes]


def _places(fault: Fault) -> Ints:
    """Indices of a fault's elements, int64[n, d]."""
    return np.stack(np.unravel_index(fault.elements, fault.shape), axis=1).astype(np.int64)
