"""Patterns of whole slices of a tensor: a channel, a row, a column, an expert, a head.

All slices of all tensors are equally likely; a slice is one physical event, as with runs.

    channel  one index of the channel axis: the first axis of a parameter (its output channels); the second axis of a value with
             four or more axes and of a result of a convolution, pooling or batch norm; the last axis of any other value
    row      all elements along the last axis of a matrix
    column   all elements along the axis before the last one
    expert   one index of the first axis of three or more: the experts of a stacked parameter
    heads=N  one of N equal parts of the channels
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from unsilent.basics.errors import unknown_name_error
from unsilent.faults.blocks import Aligned
from unsilent.faults.naming import kind_of, parse_site
from unsilent.faults.patterns import check_at_least_one
from unsilent.faults.population import Region
from unsilent.faults.sampling import Ints

WHOLE = ("channel", "row", "column", "expert")
CONVOLUTION = "convolution"
IMAGE_OPERATIONS = ("batch_norm", "group_norm", "pool", "upsample", "instance_norm")
"""Parts of the names of operations whose tensors have their channels in the second axis, besides the input and output of a
convolution."""
_LEAST_AXES = {"row": 2, "column": 2, "expert": 3}


@dataclass(frozen=True)
class Whole(Aligned):
    """A pattern of one whole slice of a tensor; ``slice`` names the kind of slice."""

    slice: str

    def __post_init__(self) -> None:
        if self.slice not in WHOLE:
            raise unknown_name_error("slice", str(self.slice)[:40], WHOLE)

    @property
    def placement_cache_key(self) -> Hashable:
        return self.text

    @property
    def text(self) -> str:
        return f"whole={self.slice}"

    @property
    def region_requirement(self) -> str:
        return f"a tensor of {_LEAST_AXES.get(self.slice, 1)} or more axes"

    def count_placements(self, region: Region) -> int:
        self.check_whole(region)
        if not region.eligible_count or len(region.shape) < _LEAST_AXES.get(self.slice, 1):
            return 0
        return region.eligible_count // self._slice_size(region)

    def _slice_size(self, region: Region) -> int:
        """Number of elements in one slice."""
        shape = _shape_in_order(region)
        if self.slice in ("row", "column"):
            return shape[-1] if self.slice == "row" else shape[-2]
        return region.numel // shape[_channel_axis(region) if self.slice == "channel" else 0]

    def places(self, region: Region, number: int, rng: np.random.Generator) -> Ints:
        shape = _shape_in_order(region)
        flat = np.arange(region.numel, dtype=np.int64).reshape(shape)
        if self.slice == "row":
            return np.asarray(flat.reshape(-1, shape[-1])[number])
        if self.slice == "column":
            matrix, column = divmod(number, shape[-1])
            return np.asarray(flat.reshape(-1, *shape[-2:])[matrix, :, column])
        axis = _channel_axis(region) if self.slice == "channel" else 0
        return flat.take(number, axis).reshape(-1)


@dataclass(frozen=True)
class Head(Whole):
    """A pattern of one of ``heads`` equal parts of a tensor's channels."""

    slice: str = "channel"
    heads: int = 1

    def __post_init__(self) -> None:
        check_at_least_one("heads", self.heads)

    @property
    def text(self) -> str:
        return f"heads={self.heads}"

    @property
    def region_requirement(self) -> str:
        return f"a tensor whose number of channels is a multiple of {self.heads}"

    def count_placements(self, region: Region) -> int:
        channels = super().count_placements(region)
        return self.heads if channels and channels % self.heads == 0 else 0

    def places(self, region: Region, number: int, rng: np.random.Generator) -> Ints:
        shape, axis = _shape_in_order(region), _channel_axis(region)
        width = shape[axis] // self.heads
        flat = np.arange(region.numel, dtype=np.int64).reshape(shape)
        return np.sort(flat.take(np.arange(number * width, (number + 1) * width), axis).reshape(-1))


def _shape_in_order(region: Region) -> tuple[int, ...]:
    """Lengths of the axes in the order that runs follow, slowest first; a scalar has one axis of length 1."""
    return tuple(region.shape[axis] for axis in region.axes or range(len(region.shape))) or (1,)


def _channel_axis(region: Region) -> int:
    """The position of the channel axis in the order that runs follow."""
    last = max(len(region.shape) - 1, 0)
    if region.axes is not None:
        return last
    if kind_of(region.site) in ("param", "optim", "file", "gradient"):
        return 0
    if kind_of(region.site) not in ("op", "saved"):
        return last if last < 3 else 1
    site = parse_site(region.site)
    operation = site.name.rpartition("#")[2]
    if CONVOLUTION in operation and site.operand == "second":
        return 0
    on_images = last == 2 and any(part in operation for part in (CONVOLUTION, *IMAGE_OPERATIONS))
    return 1 if on_images or last >= 3 else last
