"""Checks that a tape contains everything that a run depends on.

All parameters and inputs are corrupted, and the tape and a plain run must then give the same output.

A tape contains only operations. Other dependences of a run are not on it, for example code that holds a parameter
itself (a kernel with a closure, compiled code, an old numpy view). Two experiments detect them. *Blind*: memory is
corrupted while all operations run on golden values, so a changed result shows a read that is not on the tape. *Shaken*:
all parameters and inputs are corrupted at once, and the plain run must give the same output as the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from unsilent.engine.plain import same_outputs
from unsilent.engine.tape import Tape, Unrecordable, private_copy
from unsilent.engine.tape_replay import Replayer
from unsilent.faults import Fault
from unsilent.sites import Parameters
from unsilent.sites.corrupting import corruptible
from unsilent.sites.inputs import named_inputs
from unsilent.sites.memory import dtype_name
from unsilent.sites.parameters import ParameterSite

if TYPE_CHECKING:
    from unsilent.engine.cached import CachedEngine

MOST = 1 << 14
"""Largest number of elements of one tensor that are corrupted."""
SPREAD = 0.5
"""Largest relative change of floating-point numbers under strong corruption."""
HIDDEN = "the output depends on parameters or inputs through something other than operations, maybe compiled code"


def hidden_read_check(engine: CachedEngine, batch: int, replayer: Replayer, outputs: Callable[[Any], Any]) -> None:
    """Check that no operation reads parameter memory that is not on the tape.

    The tape is executed on copies of the parameters while the parameters themselves are corrupted, and must give the
    golden output. ``outputs`` converts the results of the tape to the output. Raises `Unrecordable`.
    """
    tape = replayer.tape
    live, memory_values = tape.externals, set(tape.by_storage.values())
    tape.externals = {v: private_copy(t) if v in memory_values else t for v, t in live.items()}
    try:
        with engine.inject_parameter_faults(perturbing_faults(engine.parameters, strongly=True)):
            try:
                result = outputs(replayer.run_golden(lambda value: False))
            except Exception:
                result = None
    finally:
        tape.externals = live
    if result is None or not same_outputs(engine.golden[batch], result):
        raise Unrecordable("an operation reads a parameter that is not among its arguments")


def perturbation_check(engine: CachedEngine, batch: int, tape: Tape) -> None:
    """Check a tape against a plain run while every parameter and input is corrupted at once.

    Milder corruptions are used if the run takes another path under strong ones.

    Raises:
        Unrecordable: plain run and tape differ; or both experiments failed and the tape has reads of unknown origin.
    """
    mixed = input_element_swap_faults(engine.batches[batch], batch)
    if tape.unexplained and any(_left_alone(t) for _, t in named_inputs(engine.batches[batch])):
        raise Unrecordable(
            f"the model uses numbers that no operation computed{first_unexplained_read_text(tape)}, maybe from integer inputs"
        )
    for strongly in (True, False):
        faults = [*perturbing_faults(engine.parameters, strongly), *mixed]
        with engine.inject_parameter_faults(faults):
            try:
                expected = engine.output_without_tape(batch, faults)
                result = engine.output_from_tape(batch, faults, packed=False)
            except Exception:  # noqa: S112 - the run takes another way then, or fails
                continue
        if not same_outputs(expected, result):
            raise Unrecordable(HIDDEN)
        return
    if tape.unexplained:
        raise Unrecordable(
            f"the model uses numbers that no operation computed{first_unexplained_read_text(tape)}, and their origin is unknown"
        )
    _corrupt_unread(engine, batch, tape)


def _corrupt_unread(engine: CachedEngine, batch: int, tape: Tape) -> None:
    """Raise ``Unrecordable`` if a parameter that no operation reads changes the output."""
    faults = [f for f in perturbing_faults(engine.parameters, strongly=True) if not _read(engine.parameters, f, tape)]
    if not faults:
        return
    with engine.inject_parameter_faults(faults):
        try:
            same = same_outputs(engine.golden[batch], engine.output_without_tape(batch, faults))
        except Exception:
            same = False
    if not same:
        raise Unrecordable("a parameter that no operation reads changes the output")


def _read(parameters: Parameters, fault: Fault, tape: Tape) -> bool:
    return parameters.memory(fault).tensor.untyped_storage().data_ptr() in tape.by_storage


def perturbing_faults(parameters: Parameters, strongly: bool) -> list[Fault]:
    """Faults that change many elements of every tensor but let the run continue.

    Numbers keep their sign, and indices are exchanged with each other.
    """
    chance = np.random.default_rng(0)
    return list(_shaken(parameters.sites.values(), strongly, chance))


def _shaken(sites: Any, strongly: bool, chance: np.random.Generator) -> Iterator[Fault]:
    for site in sites:
        elements = _elements(site, chance)
        if not elements.size:
            continue
        memory, codec = site.memory, site.memory.codec
        words = memory.read(elements)
        if codec.kind == "int":
            new = chance.permutation(words)
        elif strongly:
            values = np.asarray(codec.decode(words), np.float64)
            least = float(np.abs(values[np.isfinite(values)]).mean()) if np.isfinite(values).any() else 0.0
            moved = values * chance.uniform(1 - SPREAD, 1 + SPREAD, len(values))
            new = codec.encode(np.where(values == 0, SPREAD * least or SPREAD, moved))
        else:
            new = words ^ words.dtype.type(1)
        yield Fault(f"param:{site.name}", codec.name, memory.shape, elements, "set", new)


def _elements(site: ParameterSite, chance: np.random.Generator) -> Any:
    elements = np.arange(int(np.prod(site.memory.shape)), dtype=np.int64) if site.elements is None else site.elements
    return np.sort(chance.choice(elements, MOST, replace=False)) if len(elements) > MOST else elements.copy()


def input_element_swap_faults(batch: Any, step: int) -> list[Fault]:
    """Faults that exchange a few elements within every input, so that all values stay valid.

    Integers on an accelerator are left alone: as indices into tables of other sizes they may trigger an assertion on the
    device, after which every call of this process raises.
    """
    faults = []
    for name, tensor in named_inputs(batch):
        if corruptible(tensor) and tensor.numel() > 1 and not _left_alone(tensor):
            elements = np.unique(np.linspace(0, tensor.numel() - 1, 8).astype(np.int64))
            shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
            swapped = np.ascontiguousarray(elements[::-1])
            faults.append(Fault(f"input:{name}", dtype, shape, elements, "copy_from", swapped, step=step))
    return faults


def _left_alone(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" and not (tensor.is_floating_point() or tensor.is_complex())


def first_unexplained_read_text(tape: Tape) -> str:
    """The first operation on a tape that reads a tensor of unknown origin, as text.

    The text includes the last place before it at which Python read a tensor.
    """
    met = min((r for v in tape.unexplained for r in tape.values[v].readers), default=None)
    if met is None:
        return ""
    before = [n.name for n in tape.nodes[:met] if n.func is None]
    return f", first read by {tape.nodes[met].name}" + (f" after Python read a tensor ({before[-1]})" if before else "")
