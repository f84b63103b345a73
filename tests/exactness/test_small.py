"""A few trials on every workload, in the time of a unit test; the full claim is in tests/claims."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from exactness import harness
from exactness.architectures import ARCHITECTURES, GENERATING
from exactness.faults import KINDS, Trial, draw
from exactness.harness import Comparison, Reference, Summary, checked, compare_all, compare_each
from exactness.zoo import references
from unsilent.engine import PlainEngine
from unsilent.faults import Fault
from unsilent.workloads import ZOO

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SEED = 20
TRIALS = {"param": 8, "op": 5, "operand": 3, "input": 2, "kv": 3}
NAMES = (*ARCHITECTURES, *GENERATING, *ZOO)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Summary | Exception]:
    """By name; one fresh process serves as the oracle of all."""
    zoo = references(tmp_path_factory.mktemp("zoo"), images=3)
    named = {n: zoo.get(n) or Reference(f"{HERE / 'architectures.py'}:{n}") for n in NAMES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNSILENT_CACHE", str(cache))
        return compare_each(named, mixed, SEED)


def mixed(comparison: Comparison) -> list[Trial]:
    """Some trials of every kind that the workload has."""
    found: list[Trial] = []
    for kind in KINDS:
        if regions := comparison.regions(kind):
            found += draw(regions, TRIALS[kind], SEED)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_gives_the_bits_of_the_plain_run(results: dict[str, Summary | Exception], name: str) -> None:
    found = checked(results[name])
    assert found.trials >= 10
    assert found.changed >= found.trials / 3


class Deaf(PlainEngine):
    """Hears of no fault."""

    def _evaluate(self, batch: int, faults: Sequence[Fault]) -> Any:
        return self.golden[batch]


def test_an_engine_that_ignores_faults_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ENGINE", Deaf)
    comparison = Comparison(f"{HERE / 'architectures.py'}:vit")
    some, none = compare_all([(comparison, mixed(comparison)), (comparison, [Trial("nothing", ())])], SEED)
    assert len(some.mismatches) >= some.changed
    with pytest.raises(AssertionError, match=r"differences from the plain run\ntrial \d+"):
        some.check()
    assert not none.mismatches
    with pytest.raises(AssertionError, match="no trial changed the output"):
        none.check()


def test_the_plain_engine_in_place_of_the_one_under_test_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ENGINE", PlainEngine)
    with pytest.raises(AssertionError, match="no engine but the plain one"):
        Comparison(f"{HERE / 'architectures.py'}:vit")
