"""What may be asked of ``unsilent placement``, and how its arguments are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.errors import UsageError, unknown_name_error
from unsilent.options import OUTPUT_PANEL, Option, check_count
from unsilent.placement.cost import ALGORITHMS, AlphaBeta, CostModel
from unsilent.placement.nccl import VERSIONS, Nccl
from unsilent.placement.programs import GOALS
from unsilent.placement.ranking import Reduction
from unsilent.placement.synthesis import MOST_STEPS
from unsilent.placement.system import System
from unsilent.sizes import parse_bytes

SEARCH_PANEL = "Search"
MODELS = ("alpha-beta", *(f"nccl-{version}" for version in VERSIONS))
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*", re.ASCII)
NO_SYSTEM = "no system was given; expected unsilent placement SYSTEM, such as a100:4, here or machine.toml"


@dataclass(frozen=True)
class PlacementOptions:
    """What is placed on which machine."""

    system: Annotated[str, Option(
        "The machine: a100, v100 or h100-nvl with the number of nodes (a100:4), here, a .toml file, or a .txt file with the "
        "output of nvidia-smi topo -m.", "", missing_error=NO_SYSTEM)]  # fmt: skip
    axes: Annotated[str, Option("Axes of parallelism with their sizes, like data=8,tensor=4.", SEARCH_PANEL)] = ""
    reduce: Annotated[tuple[str, ...], Option(
        "Axes over which devices reduce together: data, or data,tensor. Repeat for several reductions; each may have its own "
        "bytes and weight: tensor:64MiB:48.", SEARCH_PANEL, is_repeatable=True)] = ()  # fmt: skip
    bytes: Annotated[str, Option("Size of what is reduced, like 2GiB.", SEARCH_PANEL)] = "1GiB"
    goal: Annotated[str, Option(f"What the programs do: {', '.join(GOALS)}.", SEARCH_PANEL)] = "all-reduce"
    max_steps: Annotated[int, Option("Most steps of a program.", SEARCH_PANEL)] = MOST_STEPS
    cost: Annotated[str, Option(f"Cost model: {', '.join(MODELS)}.", SEARCH_PANEL)] = "alpha-beta"
    algorithm: Annotated[str, Option(
        f"Algorithm of an all-reduce: {', '.join(ALGORITHMS)} (the faster of both).", SEARCH_PANEL)] = "auto"  # fmt: skip
    top: Annotated[int, Option("Placements, and programs of each, that are shown.", OUTPUT_PANEL)] = 10
    code: Annotated[bool, Option(
        "Print only Python that makes the mesh and the programs of the fastest placement.", OUTPUT_PANEL)] = False  # fmt: skip
    output: Annotated[Path | None, Option("Where to write the HTML page.", OUTPUT_PANEL, short_flag="o")] = None
    as_json: Annotated[bool, Option("Print one JSON object on stdout, and nothing else.", OUTPUT_PANEL, "json")] = False
    plain: Annotated[bool, Option("Print without colours and boxes, for pipes and logs.", OUTPUT_PANEL)] = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("goal", self.goal, GOALS), ("cost model", self.cost, MODELS), ("algorithm", self.algorithm, ALGORITHMS),
        ):  # fmt: skip
            if value not in known:
                raise unknown_name_error(name, value[:60], known)
        check_count("--max-steps", self.max_steps, 1, MOST_STEPS)
        check_count("--top", self.top, 1, 10_000)

    def axis_sizes(self) -> dict[str, int]:
        """Sizes by name; raises ``UsageError``."""
        sizes: dict[str, int] = {}
        if not self.axes:
            raise UsageError("no axes were given; add --axes with their sizes, like --axes data=8,tensor=4")
        for part in self.axes.split(","):
            name, _, size = (word.strip() for word in part.partition("="))
            if not _AXIS.fullmatch(name) or not size.isascii() or not size.isdigit() or len(size) > 9:
                raise UsageError(f"--axes has {part!r}; expected a name and a size, like data=8")
            if name in sizes:
                raise UsageError(f"--axes has the axis {name} twice; give each once")
            sizes[name] = int(size)
        return sizes

    def reductions(self) -> tuple[Reduction, ...]:
        """What is reduced; raises ``UsageError``."""
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
        """The cost model that is asked for."""
        if self.cost == "alpha-beta":
            return AlphaBeta(system, self.algorithm)
        return Nccl(system, self.cost.removeprefix("nccl-"), self.algorithm)
