"""The pattern that the parameters of a text ask for."""

from __future__ import annotations

from unsilent.basics.errors import UsageError
from unsilent.faults.blocks import Block
from unsilent.faults.blocks import parse_tile as _tile
from unsilent.faults.patterns import Count, One, Pattern, Rate, Run, Strided
from unsilent.faults.slices import Head, Whole

_TOGETHER = ({"count", "stride"}, {"block", "cycles"})  # the only ones that go together


def pattern_from_parameters(
    count: int | None = None,
    rate: float | None = None,
    run: int | None = None,
    stride: int | None = None,
    block: int | None = None,
    cycles: int | str | None = None,
    tile: str | None = None,
    whole: str | None = None,
    heads: int | None = None,
) -> Pattern:
    """The pattern that these parameters ask for; raises ``UsageError`` where they contradict."""
    parameters = {k: v for k, v in locals().items() if v is not None}
    if set(parameters) == {"stride"}:
        raise UsageError(
            f"stride={stride} also needs count, the number of elements to corrupt at this distance; add count="
        )
    if set(parameters) == {"cycles"}:
        raise UsageError(f"cycles={cycles} needs block, the number of elements of one cycle; add block=")
    if len(parameters) > 1 and set(parameters) not in _TOGETHER:
        choices = "count, rate, run, block, tile, whole, heads, stride with count, or cycles with block"
        raise UsageError(f"{' and '.join(parameters)} exclude each other; give one of {choices}")
    if count is not None:
        return Count(count) if stride is None else Strided(count, stride)
    if rate is not None:
        return Rate(rate)
    if block is not None:
        return Block(block, _cycles(cycles))
    if tile is not None:
        return _tile(tile)
    if whole is not None:
        return Whole(whole)
    if heads is not None:
        return Head(heads=heads)
    return One() if run is None else Run(run)


def _cycles(value: int | str | None) -> int | None:
    if value is None or isinstance(value, int):
        return 1 if value is None else value
    if value != "any":
        raise UsageError(f"cycles={value[:40]!r}; expected a number of blocks, or any")
    return None
