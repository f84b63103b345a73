"""Published fault models of training accelerators, also for multiplier arrays of other sizes.

Source: the 18 injection types of the artifact of *Understanding and Mitigating Hardware Failures in Deep Learning Training
Systems* (ISCA 2023, DOI 10.1145/3579371.3589105). A preset determines the operand, the elements, and the outputs that see
them. Its new values are only a default and can be replaced (``value=``); the published campaigns replaced them as well. If the
published code contradicts the name of an injection type, the preset follows the name, and its remark states the difference.

Operands are (first, second, out) of the product: (X, W, Y) forward, (dY, W, dX) in ``grad_in``, (X, dY, dW) in ``grad_wt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.faults.hardware.output_window import OutputWindow
from unsilent.faults.models import FaultModel, fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault

CORRUPTED_PHASES = ("fwd", "grad_in", "grad_wt")


@dataclass(frozen=True)
class Preset:
    """A named fault model of hardware.

    Attributes:
        operand: Operand of the product that is corrupted.
        fault_model_text: The fault model as text.
        window: Outputs that one fault affects; None: all.
        kind: Kind of the flip-flops that the preset models.
        hardware_defect: Description of the defect in the hardware.
        remark: Difference between the published code and the preset.
    """

    name: str
    kind: str
    operand: str
    fault_model_text: str
    window: OutputWindow | None
    hardware_defect: str
    remark: str = ""

    @cached_property
    def model(self) -> FaultModel:
        """The fault model with the preset's default value."""
        return fault_model(self.fault_model_text)

    @property
    def affected_outputs_text(self) -> str:
        """Description of the outputs that see the corrupted operand."""
        if self.operand == "out":
            return "itself"
        return "all that use it" if self.window is None else self.window.text

    def model_with_value(self, value: str | None) -> FaultModel:
        """The fault model with another value, for example ``uniform:low=1e16,high=1e18``, and the same pattern.

        Raises ``UsageError`` if ``value`` contains a pattern.
        """
        if value is None:
            return self.model
        other_model = fault_model(value)
        if other_model.has_explicit_count:
            raise UsageError(
                f"{value!r} chooses elements, but {self.name} already does; leave out {other_model.pattern.text}"
            )
        return replace(other_model, pattern=self.model.pattern)

    def fault_at_operation(
        self, operation: str, phase: str = "fwd", seed: int = 0, value: str | None = None, **moment: Any
    ) -> UnresolvedFault:
        """The fault of this preset in an operation, such as ``op:conv1#convolution.0``; raises ``UsageError``.

        ``phase``: ``fwd``, ``grad_in`` or ``grad_wt``. ``value``: see `model_with_value`. ``moment``: any other field of
        `UnresolvedFault`.
        """
        if "/" in operation:
            raise UsageError(f"{operation!r} has a phase; give the operation alone, and phase=")
        if phase not in CORRUPTED_PHASES:
            raise unknown_name_error("phase of a product", phase, CORRUPTED_PHASES)
        site = f"{operation}/{phase}/{self.operand}"
        return UnresolvedFault(site, self.model_with_value(value), seed, **{"window": self.window, **moment})


class ArraySizes(NamedTuple):
    """The sizes of a multiplier array that determine its fault models.

    ``outputs``: number of outputs that one input register feeds in one cycle. ``reduction``: number of operands that one output
    reads in one cycle. ``weight_hold``, ``input_hold``: number of cycles for which a register holds a weight or an input (None:
    as long as values are streamed). ``tail``, ``onward``: see `OutputWindow`. ``tile``: rows and columns of the tile that one
    instruction writes (None: it does not write a tile).
    """

    outputs: int
    reduction: int
    weight_hold: int | None
    input_hold: int | None
    tail: bool = False
    onward: bool = False
    tile: tuple[int, int] | None = None


def presets_for_array(sizes: ArraySizes) -> tuple[Preset, ...]:
    """All presets of an array of these sizes; for sizes (16, 64, 16, 1) they have the published names."""
    p, c = sizes.outputs, sizes.reduction
    seen = OutputWindow(p, sizes.input_hold, sizes.tail and sizes.input_hold != 1, sizes.onward and p > 1)
    streamed = OutputWindow(1, sizes.weight_hold, sizes.tail and sizes.weight_hold != 1)
    by_input = "ALL" if sizes.input_hold is None else str(p * sizes.input_hold)
    by_weight = "ALL" if sizes.weight_hold is None else str(sizes.weight_hold)
    buffered = "is wrong in or before the buffer: all outputs that use the wrong value are affected"
    datapath = (
        Preset("INPUT", "input", "first", "bitflip", None, f"an input {buffered}"),
        Preset(f"INPUT_{by_input}", "input register", "first", "bitflip", seen, "an input is wrong in an operand register"),
        Preset("WT", "weight", "second", "bitflip", None, f"a weight {buffered}"),
        Preset(f"WT_{by_weight}", "weight register", "second", "bitflip", streamed, "a weight is wrong in an operand register"),
        Preset("RBFLIP", "output", "out", "bitflip", None, "a bit of an accumulator or output register flips"),
    )  # fmt: skip
    unit = "control of one unit fails: the output of the unit is"
    local = (
        Preset("RD", "local control", "out", "random", None, f"{unit} arbitrary"),
        Preset("RD_CORRECT", "local control", "out", "copy", None, f"{unit} stale or that of another unit"),
        Preset("ZERO", "local control", "out", "zero", None, f"{unit} never written"),
    )
    if sizes.tile is not None:
        return datapath + local + _tiles(*sizes.tile)
    return datapath + local + _lines_out(p) + _lines_in(c, {"INPUT": (by_input, seen), "WT": (by_weight, streamed)})


def _global(name: str, operand: str, text: str, values_text: str, window: OutputWindow | None = None) -> Preset:
    """A preset for a failure of the control of the whole array."""
    how = "are arbitrary" if text.startswith("random") else "are stale or values of other elements"
    long = " for a number of cycles" if "cycles" in text else ""
    return Preset(name, "global control", operand, text, window, f"{values_text} {how}{long}")


def _lines_out(n: int) -> tuple[Preset, ...]:
    """Presets that corrupt the outputs of one cycle or of several cycles."""
    once, long = f"the {n} outputs of one cycle", f"the {n} outputs of every cycle"
    return (
        _global(f"N{n}_RD", "out", f"random:block={n}", once),
        _global(f"N{n}_RD_CORRECT", "out", f"copy:block={n}", once),
        _global("RD_GLB", "out", f"random:block={n},cycles=any", long),
        _global("RD_CORRECT_GLB", "out", f"copy:block={n},cycles=any", long),
    )


def _lines_in(n: int, windows: Mapping[str, tuple[str, OutputWindow]]) -> tuple[Preset, ...]:
    """Presets that corrupt the operands read in one cycle or in several cycles."""
    result = []
    for name, (suffix, window) in windows.items():
        operand, noun = ("first", "inputs") if name == "INPUT" else ("second", "weights")
        result += [
            _global(f"N{n}_{name}", operand, f"copy:block={n}", f"{n} {noun} in a row"),
            _global(f"N{n}_{name}_{suffix}", operand, f"copy:block={n}", f"{n} {noun} in operand registers", window),
            _global(f"N{n}_{name}_GLB", operand, f"copy:block={n},cycles=any", f"{n} {noun} of every cycle"),
        ]
    return tuple(result)


def _tiles(rows: int, columns: int) -> tuple[Preset, ...]:
    """Presets that corrupt the output tile of one instruction."""
    tile, outputs_text = f"tile={rows}x{columns}", f"the {rows} x {columns} outputs of one instruction"
    return (
        _global("TILE_RD", "out", f"random:{tile}", outputs_text),
        _global("TILE_RD_CORRECT", "out", f"copy:{tile}", outputs_text),
    )


_NOT_RESTRICTED = (
    "the published code does not restrict the fault to 16 outputs: it affects all outputs that use the element"
)
_UP_TO_THE_END = (
    "the published code and this preset draw cycles up to the end of the tensor; the code ignores its limit of 1000"
)
_REMARKS: Mapping[str, str] = {
    "INPUT_16": _NOT_RESTRICTED,
    "WT_16": _NOT_RESTRICTED,
    "N64_INPUT_16": _NOT_RESTRICTED,
    "N64_WT_16": f"{_NOT_RESTRICTED}; here each of the 64 affects one channel, at 16 positions",
    "RD_GLB": _UP_TO_THE_END,
    "RD_CORRECT_GLB": _UP_TO_THE_END,
    "N64_INPUT_GLB": _UP_TO_THE_END,
    "N64_WT_GLB": _UP_TO_THE_END,
}

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {p.name: replace(p, remark=_REMARKS.get(p.name, "")) for p in presets_for_array(ArraySizes(16, 64, 16, 1))}
)
"""The 18 published presets."""


def preset(name: str) -> Preset:
    """The published preset of this name; raises ``UsageError`` for an unknown name."""
    if name not in PRESETS:
        raise unknown_name_error("preset", name, PRESETS)
    return PRESETS[name]
