"""Converts published injections to faults of this package, and such faults to published injections.

Both conversions are exact. A fault that is converted and converted back is unchanged, and an injection then has its victims in
the order of the artifact, by their place in its tensor. The text of a value is that of its float32 with 15 digits, as in the
published files.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.faults import Fault
from unsilent.faults.codecs import Array
from unsilent.faults.naming import PHASES, parse_site
from unsilent.faults.sampling import Ints
from unsilent.papers.isca23.geometry import Convolution, IndexMapping, Shape, make_index_mapping
from unsilent.papers.isca23.injections import BACKWARD, FORWARD, OPERANDS, STEPS, WORKERS, PublishedInjection
from unsilent.papers.isca23.layer_lists import NETWORKS, convolutions

_USUAL = {"first": ("INPUT", "N64_INPUT", 64), "second": ("WT", "N64_WT", 64), "out": ("RD", "N16_RD", 16)}


class Victims(NamedTuple):
    """The elements that a fault corrupts, with the artifact's indices.

    Attributes:
        shape: Shape of the tensor.
        positions: int64[n, 4].
        words: uint32[n], the bits of the values.
    """

    shape: Shape
    positions: Ints
    words: Array


def images_per_worker(batch: int) -> int:
    """Number of images of each worker.

    Raises ``UsageError`` if the batch cannot be divided evenly.
    """
    if batch < WORKERS or batch % WORKERS:
        raise UsageError(
            f"batch is {batch}; expected a multiple of {WORKERS}, because {WORKERS} workers share each batch"
        )
    return batch // WORKERS


def fault_from_injection(injection: PublishedInjection, *, batch: int = 1024, width: int = 64) -> Fault:
    """The fault that a published injection describes, for the rebuilt network.

    The fault's ``micro_step`` is the worker.

    Raises ``UsageError`` with row and column if the network or layer is not implemented here, or if a victim is outside of its
    tensor, or on padding or between elements that are not part of the operation's operand here.
    """
    if injection.model not in NETWORKS:
        raise UsageError(
            f"{injection.file_position('model')}: the network is {injection.model}, which is not built in, so its injections "
            f"cannot be replayed; expected an injection into {', '.join(NETWORKS)}"
        )
    there = convolutions(images_per_worker(batch), width, injection.model)
    if injection.layer not in there:
        suffix = "" if injection.phase == "fwd" else f"_{injection.phase}"
        why = unknown_name_error("layer", injection.target_layer, [layer + suffix for layer in there])
        raise UsageError(f"{injection.file_position('target_layer')}: {why}")
    return fault_in_convolution(injection, there[injection.layer])


def fault_in_convolution(injection: PublishedInjection, conv: Convolution) -> Fault:
    """The fault that an injection describes in the given convolution, whose name is not compared."""
    index = injection.positions
    mapped = make_index_mapping(conv, injection.phase, injection.operand)
    outside = ((index < 0) | (index >= np.array(mapped.shape))).any(1)
    if outside.any():
        entry = int(outside.argmax())
        raise UsageError(
            f"{injection.file_position('inj_pos', entry)}: index {_index_text(index[entry])} is outside {mapped.shape}, "
            f"the {injection.operand} tensor of {injection.target_layer} with {conv.images} images per worker"
        )
    ours, real = mapped.to_our_index(index)
    if not real.all():
        if (injection.phase, injection.operand) != ("grad_in", "first"):
            entry = int((~real).argmax())
            raise UsageError(
                f"{injection.file_position('inj_pos', entry)}: index {_index_text(index[entry])} is "
                f"{mapped.zeros_origin} in {mapped.shape}, "
                f"the {injection.operand} tensor of {injection.target_layer}; this implementation has no such element"
            )
        mapped = make_index_mapping(conv, injection.phase, injection.operand, with_inserted_zeros=True)
        ours, _ = mapped.to_our_index(index)
    elements = np.ravel_multi_index(tuple(ours.T), mapped.tensor).astype(np.int64)
    order = np.argsort(elements)
    site = f"op:{conv.module}#convolution.0/{injection.phase}/{injection.operand}"
    step, worker = injection.target_epoch * STEPS + injection.target_step, injection.target_worker
    elements, words, layout = elements[order], injection.value_words[order], mapped.layout
    return Fault(site, "float32", mapped.tensor, elements, "set", words, layout=layout, step=step, micro_step=worker)


def injection_from_fault(
    fault: Fault,
    *,
    after: Array | None = None,
    model: str = "resnet18",
    fmodel: str | None = None,
    learning_rate: str = "0.001",
    seed: int = 123,
    batch: int = 1024,
    width: int = 64,
) -> PublishedInjection:
    """The published injection that describes a fault in a convolution of the network.

    Args:
        after: Words uint32[n] at the fault's elements after the injection, from its receipt; required unless the fault sets
            them.
        model, fmodel, learning_rate, seed: Values that are not part of a fault. The default of ``fmodel`` is one that corrupts
            that tensor.

    Raises:
        UsageError: The fault is not in a convolution of the network, or cannot be expressed in the published format.
    """
    conv, phase, operand = _site(fault, batch, width, model)
    mapped = victims(fault, conv, fault.operands if fault.operation == "set" and after is None else after)
    name = fmodel or _usual(operand, len(fault))
    if OPERANDS.get(name) != operand:
        raise unknown_name_error(
            f"fault model for the {operand} tensor", name, [m for m, o in OPERANDS.items() if o == operand]
        )
    epoch, step = divmod(fault.step or 0, STEPS)
    order = np.argsort(np.ravel_multi_index(tuple(mapped.positions.T), mapped.shape))
    return PublishedInjection(
        model=model,
        stage=FORWARD if phase == "fwd" else BACKWARD,
        fmodel=name,
        target_worker=fault.micro_step or 0,
        target_layer=conv.layer if phase == "fwd" else f"{conv.layer}_{phase}",
        target_epoch=epoch,
        target_step=step,
        inj_pos=tuple(map(tuple, mapped.positions[order].tolist())),
        inj_values=tuple(value_text(word) for word in mapped.words[order].tolist()),
        learning_rate=learning_rate,
        seed=seed,
        name=fault.site,
    )


def victims(fault: Fault, conv: Convolution, words: Array | None) -> Victims:
    """The elements that a fault corrupts in a convolution, with the artifact's indices.

    ``words`` are the bits at the fault's elements, uint32[n].

    Raises ``UsageError`` like `injection_from_fault`.
    """
    site = parse_site(fault.site)
    mapped: IndexMapping = make_index_mapping(conv, site.phase, site.operand, fault.layout == "stuffed")
    if fault.dtype != "float32" or fault.shape != mapped.tensor:
        result = f"{fault.dtype}{list(fault.shape)}"
        raise UsageError(
            f"{fault.site} is {result}; expected float32{list(mapped.tensor)}, the tensor that published injections corrupt"
        )
    if words is None:
        raise UsageError(
            f"{fault.site}: operation {fault.operation!r} names no values; give the corrupted words (after=) from the receipt "
            "of the fault"
        )
    index, named = mapped.to_published_index(
        np.stack(np.unravel_index(fault.elements, fault.shape), axis=1).astype(np.int64)
    )
    if not named.all():
        element = int(fault.elements[int((~named).argmax())])
        raise UsageError(f"{fault.site}: element {element} is padding, which the published format cannot address")
    return Victims(mapped.shape, index, np.asarray(words))


def convolution_of(fault: Fault, *, model: str = "resnet18", batch: int = 1024, width: int = 64) -> Convolution:
    """The convolution of a published network that a fault corrupts.

    Raises ``UsageError`` if it does not corrupt one.
    """
    return _site(fault, batch, width, model)[0]


def value_text(word: int) -> str:
    """Text of a float32 as in the published files.

    Raises ``UsageError`` for a NaN without a published text.
    """
    text = format(float(np.uint32(word).view(np.float32)), ".15g")
    if text == "nan":
        text = "-nan" if word >> 31 else "nan"
        if word & 0x7FFFFFFF != 0x7FC00000:
            raise UsageError(
                f"the NaN {word:#010x} has no text form in published files; only 0x7fc00000 and 0xffc00000 can be written"
            )
    return text


def _site(fault: Fault, batch: int, width: int, model: str) -> tuple[Convolution, str, str]:
    site = parse_site(fault.site)
    module, _, operation = site.name.partition("#")
    result = [c for c in convolutions(images_per_worker(batch), width, model).values() if c.module == module]
    if site.kind != "op" or not result or operation != "convolution.0" or site.phase not in PHASES[:3]:
        raise UsageError(f"{fault.site} is not a convolution of {model} that published injections corrupt")
    if site.operand not in ("first", "second", "out"):
        raise UsageError(
            f"{fault.site}: published injections have only the operands first, second and out, not {site.operand}"
        )
    limits = {
        "held": fault.held,
        "reach": fault.reach,
        "rank": fault.rank or None,
        "occurrence": fault.occurrence or None,
    }
    limits["micro_step"] = fault.micro_step if (fault.micro_step or 0) >= WORKERS else None
    if said := [key for key, value in limits.items() if value is not None]:
        raise UsageError(f"{fault.site} sets {', '.join(said)}, which the published format cannot express")
    return result[0], site.phase, site.operand


def _usual(operand: str, count: int) -> str:
    single, run, length = _USUAL[operand]
    if count == 1:
        return single
    return run if count == length else {"out": "RD_GLB"}.get(operand, f"{run}_GLB")


def _index_text(index: Ints) -> str:
    return "/".join(str(i) for i in index.tolist())
