"""Outputs that are affected by a corrupted operand register while it holds the corrupted value.

An operand that is wrong in a register, and not in the buffer before it, affects only some of the outputs that use it.
Channels (computed by parallel units) and positions (streamed through the units, one in each cycle) both form
aligned groups. The groups are aligned in the whole output, not in the list of outputs that use the operand: hardware streams the
border of a padded convolution like the rest, and multiplies the operand by zero there. So some outputs of a group may not depend
on the operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unsilent.basics.errors import UsageError
from unsilent.faults.sampling import Ints


@dataclass(frozen=True)
class OutputWindow:
    """An aligned group of ``channels`` channels and an aligned run of ``positions`` positions (None: all).

    ``tail``: the fault occurs in one of the run's cycles; earlier positions were computed with the correct value.
    ``onward``: the value is passed from unit to unit and is corrupted in one of them; earlier channels used the correct value.
    """

    channels: int | None = None
    positions: int | None = None
    tail: bool = False
    onward: bool = False

    def __post_init__(self) -> None:
        for name in ("channels", "positions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value} of a window; expected 1 or more, or None for all")

    @property
    def text(self) -> str:
        """A short description, such as ``16 channels x 1 position``."""
        channels = "all channels" if self.channels is None else _several(self.channels, "channel")
        positions = "all positions" if self.positions is None else _several(self.positions, "position")
        return f"{channels}{' onward' * self.onward} x {positions}{' from the fault on' * self.tail}"

    def draw_affected_outputs(
        self, dependents: npt.NDArray[np.bool_], channel_axis: int, rng: np.random.Generator
    ) -> Ints:
        """Draw the outputs among ``dependents`` (bool, in the output's shape) that see the corrupted register.

        Returns flat C-order positions, ascending, int64[m]; empty only if no output depends on the operand. Positions are all
        axes except ``channel_axis``, flattened in C order. Every (group of channels, run of positions) with a dependent output is
        equally likely, because a register holds its value equally long for each. The corrupted cycle is uniform from the first of
        the run to the last with a dependent output, because the register is not read afterwards. The corrupted unit is drawn in
        the same way.
        """
        flat = np.flatnonzero(dependents)
        if not flat.size or not dependents.ndim:
            return flat
        shape, axis = dependents.shape, range(dependents.ndim)[channel_axis]
        inner = math.prod(shape[axis + 1 :])
        outer, rest = np.divmod(flat, shape[axis] * inner)
        channel, place = np.divmod(rest, inner)
        place += outer * inner
        run = place // (self.positions or dependents.size)
        group = channel // (self.channels or dependents.size)
        pair = group * dependents.size + run
        chosen = rng.choice(np.unique(pair))
        affected = pair == chosen
        if self.tail:
            affected &= place >= rng.integers(
                (self.positions or 0) * run[affected][0], place[affected].max(), endpoint=True
            )
        if self.onward:
            affected &= channel >= rng.integers(
                (self.channels or 0) * group[affected][0], channel[affected].max(), endpoint=True
            )
        return np.asarray(flat[affected])


def _several(n: int, noun: str) -> str:
    return f"{n} {noun}" + "s" * (n != 1)
