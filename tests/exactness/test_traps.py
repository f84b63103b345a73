"""What a shortcut gets wrong most easily: the engine follows it exactly, or notices and runs plainly."""

from __future__ import annotations

from pathlib import Path

import pytest

from exactness.faults import Trial, draw, enough
from exactness.harness import Comparison, Reference, Summary, checked, compare_each
from exactness.traps import TRAPS

pytestmark = pytest.mark.slow

FILE = Path(__file__).with_name("traps.py")
SEED = 5
TRIALS = {"op": 25, "operand": 15, "input": 6}


@pytest.fixture(scope="module")
def results() -> dict[str, Summary | Exception]:
    """By name; one fresh process serves as the oracle of all."""
    return compare_each({name: Reference(f"{FILE}:{name}") for name in TRAPS}, mixed, SEED)


def mixed(comparison: Comparison) -> list[Trial]:
    """Every parameter, and some of everything else."""
    regions = comparison.regions("param")
    found = draw(regions, enough(regions, 20), SEED)
    for kind, trials in TRIALS.items():
        if regions := comparison.regions(kind):
            found += draw(regions, trials, SEED)
    return found


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_gives_the_bits_of_the_plain_run(results: dict[str, Summary | Exception], name: str) -> None:
    found = checked(results[name])
    assert found.corrupted == found.sites
    assert found.changed >= found.trials / 3
