"""Options of ``unsilent placement``, and parsers of their values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.options import OUTPUT_PANEL, Option, check_count
from unsilent.basics.sizes import parse_bytes
from unsilent.placement.cost import ALGORITHMS, AlphaBeta, CostModel
from unsilent.placement.nccl import VERSIONS, Nccl
from unsilent.placement.programs import GOALS
from unsilent.placement.ranking import Reduction
from unsilent.placement.synthesis import MOST_STEPS
from unsilent.placement.system import System

SEARCH_PANEL, MEASURE_PANEL = "Search", "Measurement"
MODELS = ("alpha-beta", *(f"nccl-{version}" for version in VERSIONS), "measured")
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*", re.ASCII)
NO_SYSTEM = "no system was given; expected unsilent placement SYSTEM, such as a100:4, here or machine.toml"


@dataclass(frozen=True)
class PlacementOptions:
    """Options that name the machine, the axes and the reductions."""

    system: Annotated[str, Option(
        "The machine: a100, v100 or h100-nvl with the number of nodes (a100:4), here, a .toml file, a .json file of unsilent "
        "placement measure, or a .txt file with the output of nvidia-smi topo -m.", "", missing_error=NO_SYSTEM)]  # fmt: skip
    axes: Annotated[str, Option("Axes of parallelism with their sizes, like data=8,tensor=4.", SEARCH_PANEL)] = ""
    reduce: Annotated[tuple[str, ...], Option(
        "Axes over which devices reduce together: data, or data,tensor. Repeat for several reductions; each may have its own "
        "bytes and number of times per step: tensor:64MiB:48.", SEARCH_PANEL, is_repeatable=True)] = ()  # fmt: skip
    bytes: Annotated[str, Option("Size of what is reduced, like 2GiB.", SEARCH_PANEL)] = "1GiB"
    goal: Annotated[str, Option(
        f"What the collectives of a reduction do together: {', '.join(GOALS)}.", SEARCH_PANEL)] = "all-reduce"  # fmt: skip
    max_steps: Annotated[int, Option(
        "Most collectives that one reduction is composed of, one after the other.", SEARCH_PANEL)] = MOST_STEPS  # fmt: skip
    cost: Annotated[str, Option(
        f"Model that predicts times: {', '.join(MODELS)} (needs a .json SYSTEM).", SEARCH_PANEL)] = "alpha-beta"  # fmt: skip
    algorithm: Annotated[str, Option(
        f"Algorithm of an all-reduce: {', '.join(ALGORITHMS)}; auto: the faster of ring and tree.",
        SEARCH_PANEL)] = "auto"  # fmt: skip
    top: Annotated[int, Option("How many placements, and programs of each reduction, are shown.", OUTPUT_PANEL)] = 10
    code: Annotated[bool, Option(
        "Print only Python that makes the mesh and the programs of the fastest placement.", OUTPUT_PANEL)] = False  # fmt: skip

    def __post_init__(self) -> None:
        for name, value, known in (
            ("goal", self.goal, GOALS), ("cost model", self.cost, MODELS), ("algorithm", self.algorithm, ALGORITHMS),
        ):  # fmt: skip
            if value not in known:
                raise unknown_name_error(name, value[:60], known)
        check_count("--max-steps", self.max_steps, 1, MOST_STEPS)
        check_count("--top", self.top, 1, 10_000)

    def axis_sizes(self) -> dict[str, int]:
        """Sizes of the axes by name; raises ``UsageError`` for an invalid option."""
        if not self.axes:
            raise UsageError("no axes were given; add --axes with their sizes, like --axes data=8,tensor=4")
        return _named_sizes(self.axes, "--axes", "data=8")

    def reductions(self) -> tuple[Reduction, ...]:
        """Reductions to place; raises ``UsageError`` for an invalid option."""
        if not self.reduce:
            raise UsageError("nothing is reduced; add --reduce with the names of one or more axes, like --reduce data")
        return tuple(self._reduction(text) for text in self.reduce)

    def _reduction(self, text: str) -> Reduction:
        names, *more = text.split(":")
        if len(more) > 2:
            raise UsageError(
                f"--reduce is {text!r}; expected AXES, AXES:BYTES or AXES:BYTES:WEIGHT, like tensor:64MiB:48"
            )
        payload = parse_bytes(more[0] if more else self.bytes)
        try:
            weight = float(more[1]) if len(more) > 1 else 1.0
        except ValueError:
            raise UsageError(f"--reduce has the weight {more[1]!r}; expected a number, like tensor:64MiB:48") from None
        if not 0 < weight < float("inf") or not payload:
            raise UsageError(f"--reduce {text} has {payload} bytes and weight {weight:g}; expected more than 0 of both")
        return Reduction(tuple(name.strip() for name in names.split(",")), payload, weight, self.goal)

    def cost_model(self, system: System) -> CostModel:
        """The cost model that the option names."""
        if self.cost == "measured":
            from unsilent.placement.measure import MeasuredTable, load_sweep

            if not self.system.endswith(".json"):
                raise UsageError(
                    f"--cost measured needs the measurements of the system, but it is {self.system}; give the .json file of "
                    "unsilent placement measure -o as SYSTEM"
                )
            return MeasuredTable(system, load_sweep(self.system))
        if self.cost == "alpha-beta":
            return AlphaBeta(system, self.algorithm)
        return Nccl(system, self.cost.removeprefix("nccl-"), self.algorithm)


@dataclass(frozen=True)
class MeasureOptions:
    """Options of a measurement: the job, its levels and the payloads."""

    levels: Annotated[str, Option(
        "Levels of the job's machine with their counts, outermost first, like node=2,gpu=4; ranks are numbered in this order.",
        MEASURE_PANEL)] = ""  # fmt: skip
    sizes: Annotated[str, Option("Bytes to reduce in each measurement, separated by commas.", MEASURE_PANEL)] = (
        "16KiB,128KiB,1MiB,4MiB"
    )
    repeats: Annotated[int, Option("Repetitions of each measurement; its median is used.", MEASURE_PANEL)] = 5
    output: Annotated[Path | None, Option(
        "Write all measurements to this .json file, a SYSTEM for unsilent placement, also with --cost measured.", OUTPUT_PANEL,
        short_flag="o")] = None  # fmt: skip

    def __post_init__(self) -> None:
        check_count("--repeats", self.repeats, 1, 1000)
        if self.output is not None and self.output.suffix != ".json":
            raise UsageError(f"--output is {str(self.output)!r}; expected a name that ends in .json")

    def level_counts(self) -> dict[str, int]:
        """Components per level by name; raises ``UsageError`` for an invalid option."""
        if not self.levels:
            raise UsageError("no levels were given; add --levels with their counts, like --levels node=2,gpu=4")
        return _named_sizes(self.levels, "--levels", "node=2")

    def payloads(self) -> tuple[int, ...]:
        """Sizes of the payloads in bytes; raises ``UsageError`` for an invalid option."""
        sizes = tuple(parse_bytes(text) for text in self.sizes.split(","))
        if min(sizes) < 4 or len(set(sizes)) < 2:
            raise UsageError(f"--sizes is {self.sizes!r}; expected at least two different sizes of 4 bytes or more")
        return sizes


def _named_sizes(text: str, option: str, example: str) -> dict[str, int]:
    """Parse sizes by name from a text ``name=size,name=size``.

    Raises ``UsageError`` for any other text.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if not _AXIS.fullmatch(name) or not size.isascii() or not size.isdigit() or len(size) > 9:
            raise UsageError(f"{option} has {part!r}; expected a name and a size, like {example}")
        if name in sizes:
            raise UsageError(f"{option} has {name} twice; give each once")
        sizes[name] = int(size)
    return sizes
