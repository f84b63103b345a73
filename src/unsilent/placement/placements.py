"""Placements of parallelism axes as parallelism matrices, with their grids of devices and Python code.

A parallelism matrix has a row per axis and a column per level of the machine. An entry is the number of ways in which the axis is
split over the components of that level. The product of a row is the size of its axis, the product of a column the count of its
level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unsilent.basics.errors import UsageError
from unsilent.basics.lazy_numpy import np, npt

Matrix = tuple[tuple[int, ...], ...]
MOST_DIMENSIONS = 64
"""Largest number of dimensions of a numpy array; the grid of devices has one for each axis and level."""


@dataclass(frozen=True)
class Placement:
    """An assignment of parallelism axes to the levels of a machine.

    Attributes:
        axes: Names of the axes, in the order of the matrix' rows.
        matrix: The parallelism matrix, int[axes, levels].
    """

    axes: tuple[str, ...]
    matrix: Matrix

    def __str__(self) -> str:
        return "[" + " ".join(f"[{' '.join(map(str, row))}]" for row in self.matrix) + "]"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each axis."""
        return tuple(map(prod, self.matrix))

    def factors(self, reduce: Sequence[str]) -> tuple[int, ...]:
        """Number of components of each level that one reduction over these axes spans."""
        rows = [self.matrix[self.axes.index(name)] for name in reduce]
        return tuple(prod(column) for column in zip(*rows, strict=True))

    def _device_order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape of the devices by level and axis, and the permutation that sorts them by axis and level."""
        rows, levels = len(self.axes), len(self.matrix[0])
        shape = tuple(self.matrix[row][level] for level in range(levels) for row in range(rows))
        return shape, tuple(level * rows + row for row in range(rows) for level in range(levels))

    def grid(self) -> npt.NDArray[np.int64]:
        """Grid of device numbers, int64[sizes of the axes]."""
        shape, order = self._device_order()
        return np.arange(prod(shape)).reshape(shape).transpose(order).reshape(self.sizes)

    def reduction_groups(self, reduce: Sequence[str]) -> npt.NDArray[np.int64]:
        """Groups of devices that reduce together, int64[groups, devices of one], in ascending order."""
        at = [self.axes.index(name) for name in reduce]
        grid = np.moveaxis(self.grid(), at, range(-len(at), 0))
        return np.sort(grid.reshape(-1, prod(self.sizes[i] for i in at)), axis=1)

    def mesh_code(self, device_type: str = "cuda") -> str:
        """Python code that makes the device mesh in torch, for a training script."""
        shape, order = self._device_order()
        long_axes = [at for at in order if shape[at] > 1]
        names = f"mesh_dim_names={self.axes!r}"
        if long_axes == sorted(long_axes):
            return (
                "from torch.distributed.device_mesh import init_device_mesh\n\n"
                f'mesh = init_device_mesh("{device_type}", {self.sizes!r}, {names})'
            )
        rank = {at: number for number, at in enumerate(sorted(long_axes))}
        sizes = ", ".join(map(str, self.sizes))
        small, permuted = tuple(shape[at] for at in sorted(long_axes)), tuple(rank[at] for at in long_axes)
        return (
            "import torch\nfrom torch.distributed.device_mesh import DeviceMesh\n\n"
            f"ranks = torch.arange({prod(shape)}).reshape{small}.permute{permuted}.reshape({sizes})\n"
            f'mesh = DeviceMesh("{device_type}", ranks, {names})'
        )


def placements(counts: Sequence[int], axes: Mapping[str, int]) -> Iterator[Placement]:
    """All placements of the axes on the levels of a machine.

    Args:
        counts: Components per level, outermost first.
        axes: Sizes of the axes by name.

    Raises:
        UsageError: The product of the sizes is not the number of devices, or a size is below 1.
    """
    if not axes:
        raise UsageError("no axes were given; expected sizes by name, like data=8,tensor=4")
    if len(axes) * len(counts) > MOST_DIMENSIONS:
        raise UsageError(
            f"{len(axes)} axes were given; expected at most {MOST_DIMENSIONS // len(counts)} with {len(counts)} levels; "
            "leave out axes of size 1, and join others"
        )
    for name, size in axes.items():
        if size < 1:
            raise UsageError(f"axis {name} has size {size}; expected 1 or more")
    for level, count in enumerate(counts):
        if count < 1:
            raise UsageError(f"level {level} of the system has size {count}; expected 1 or more")
    if prod(axes.values()) != prod(counts):
        product = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise UsageError(
            f"the sizes of the axes multiply to {prod(axes.values()):,} ({product}), but the system has {prod(counts):,} "
            "devices; change an axis or the system"
        )
    for matrix in _matrices(tuple(axes.values()), tuple(counts)):
        yield Placement(tuple(axes), matrix)


def _matrices(sizes: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Matrix]:
    """All matrices whose rows multiply to ``sizes`` and whose columns multiply to ``counts``."""
    if not sizes:
        if all(count == 1 for count in counts):
            yield ()
        return
    for row in _rows(sizes[0], counts):
        left = tuple(count // factor for count, factor in zip(counts, row, strict=True))
        for rest in _matrices(sizes[1:], left):
            yield (row, *rest)


def _rows(size: int, counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All divisions of ``size`` into a factor per level; each factor divides the count of its level."""
    if not counts:
        if size == 1:
            yield ()
        return
    for factor in range(1, min(size, counts[0]) + 1):
        if size % factor == 0 and counts[0] % factor == 0:
            for rest in _rows(size // factor, counts[1:]):
                yield (factor, *rest)
