"""The plan of an incident that the farm makes, with its cause and place, drawn from a seed.

Queries do not see the plan; grades are derived from it.
"""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.plainfiles import parse_json, read_plain, replace_file
from unsilent.events.event_files import parse_fields
from unsilent.triage.farm.naming import HEALTHY, NAMING, REAL

PLANNED_FILE, INCIDENT_FOLDER, TWIN_FOLDER = "planned.json", "incident", "twin"
"""File and subfolders in the folder of an incident, see `collection`."""
MOST_BYTES = 2**20
"""Most bytes of a file that describes a collection or a plan."""
_UNFINISHED = ".unfinished-"

FAMILIES = {
    family: tuple(kind for of_kind, kind in NAMING if of_kind == family)
    for family in dict.fromkeys(name for name, _ in NAMING)
}
"""Kinds of causes by family."""
WORKLOADS = ("mlp", "convolution", "transformer", "recurrent")
WORLD_SIZES = (1, 2, 4, 8)
HEALTHY_SHARE = 0.2
FIRST, LAST = 44, 60
"""Range of steps in which a cause may begin; the end is exclusive."""
NEEDS_RANKS = frozenset({"payload", "replica", "time", "stopped"})
"""Families of causes that need another rank."""


@dataclass(frozen=True)
class PlannedIncident:
    """The plan of one incident, which determines it fully.

    Attributes:
        number: Number in its collection.
        family, kind: Family and kind of the cause, from `FAMILIES`; for real processes, `REAL` with the kind, and a variety of
            it.
        workload: Name from `WORKLOADS`.
        world_size: Number of ranks.
        rank: Rank with the cause; -1 if all ranks have it.
        step: Step in which the cause begins.
        seed: Seed of the training and of its random choices.
        draws: Four numbers from 0 to 1 that choose tensor, element, size and words of the report.
    """

    number: int
    family: str
    kind: str
    workload: str
    world_size: int
    rank: int
    step: int
    seed: int
    draws: tuple[float, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether the planned incident has no fault."""
        return self.family in (HEALTHY, f"{REAL}benign")


ALL_RANKS_ALIKE = frozenset({
    "damaged for all", "learning rate", "seed", "gradients not zeroed", "bfloat16 weights", "full disk", "nothing",
    "learning rate by plan", "other data for all", "noisy time",
})  # fmt: skip
"""Kinds of causes that affect all ranks equally."""


def planned_incidents(count: int, seed: int) -> list[PlannedIncident]:
    """The planned incidents of a collection, equal for equal seeds.

    A smaller collection is the beginning of a larger one.
    """
    kinds = [(family, kind) for family, kinds in FAMILIES.items() for kind in kinds if family != HEALTHY]
    result, faults, controls = [], 0, 0
    for number in range(count):
        if int(HEALTHY_SHARE * (number + 1)) > controls:
            family, kind = HEALTHY, FAMILIES[HEALTHY][controls % len(FAMILIES[HEALTHY])]
            controls += 1
        else:
            family, kind = kinds[faults % len(kinds)]
            faults += 1
        rng = np.random.default_rng([seed, number, zlib.crc32(kind.encode())])
        sizes = [size for size in WORLD_SIZES if size > 1 or family not in NEEDS_RANKS]
        ranks = int(rng.choice(sizes))
        workload, draws = str(rng.choice(WORKLOADS)), tuple(rng.random(4).tolist())
        rank = -1 if kind in ALL_RANKS_ALIKE else int(rng.integers(ranks))
        step, own_seed = int(rng.integers(FIRST, LAST)), int(rng.integers(2**31))
        result.append(PlannedIncident(number, family, kind, workload, ranks, rank, step, own_seed, draws))
    return result


def folder_of(folder: Path, number: int) -> Path:
    """The folder of an incident inside its collection."""
    return folder / f"{number:05d}"


def read_planned(path: Path) -> PlannedIncident:
    """The plan in a file ``planned.json``.

    Raises ``UsageError`` if it cannot be read.
    """
    try:
        return parse_fields(PlannedIncident, parse_json(read_plain(path, MOST_BYTES)))
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} does not say what was planned: {first_line(error)[:200]}; make the collection again"
        ) from None


def write_planned(folder: Path, planned: PlannedIncident) -> None:
    """Write a plan to ``planned.json`` in the folder."""
    replace_file(folder / PLANNED_FILE, (json.dumps(asdict(planned), indent=1) + "\n").encode())


def unfinished_folder(folder: Path, number: int) -> Path:
    """Create an empty folder for an incident that is not yet complete."""
    result = folder / f"{_UNFINISHED}{number:05d}"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    return result
