"""Claim: what the engine with shortcuts gives is, bit for bit, what the plain run gives in a fresh process.

Every workload of the zoo and one small model of each of six transformers architectures (two of them also generating) get
faults in every parameter tensor, and faults in operations, their operands, inputs and key/value caches. At least half of the
trials must change the output; some must give NaN or infinity. One row a workload is printed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from exactness.architectures import ARCHITECTURES, GENERATING
from exactness.faults import Trial, draw, enough
from exactness.harness import HEADER, Comparison, Reference, Summary, compare_all
from exactness.zoo import bank, references
from unsilent.workloads import ZOO

FILE = Path(__file__).parents[1] / "exactness" / "architectures.py"
SEED = 1
ZOO_LEAST, OTHERS_LEAST = 200, 50
NAMES = (*ZOO, "dlrm-bank", *ARCHITECTURES, *GENERATING)
DTYPES = ("float64", "bfloat16", "float16")


@pytest.fixture(scope="module", autouse=True)
def _header() -> None:
    print(f"\n{'kind':8} {HEADER}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


def reference(name: str, folder: Path, dtype: str | None = None) -> Reference:
    if name == "dlrm-bank":
        return bank() or pytest.skip("bank-full.csv is not here")
    return references(folder)[name] if name in ZOO else Reference(f"{FILE}:{name}", dtype=dtype)


def least(name: str) -> int:
    return ZOO_LEAST if name in ZOO or name == "dlrm-bank" else OTHERS_LEAST


def compared(kind: str, comparison: Comparison, trials: list[Trial]) -> Summary:
    """Run, print the row, and demand that nothing differs."""
    (found,) = compare_all([(comparison, trials)], SEED)
    print(f"{kind:8} {found.row}", flush=True)
    return found.check()


@pytest.mark.parametrize("name", NAMES)
def test_parameters(name: str, folder: Path) -> None:
    comparison = Comparison(reference(name, folder))
    regions = comparison.regions("param")
    found = compared("param", comparison, draw(regions, enough(regions, least(name)), SEED))
    assert found.trials >= least(name)
    assert found.changed >= found.trials / 2
    assert found.corrupted == found.sites
    assert found.nonfinite


@pytest.mark.parametrize("kind", ["op", "operand"])
@pytest.mark.parametrize("name", NAMES)
def test_operations(name: str, kind: str, folder: Path) -> None:
    comparison = Comparison(reference(name, folder))
    found = compared(kind, comparison, draw(comparison.regions(kind), least(name), SEED))
    assert found.trials >= least(name)
    assert found.changed >= found.trials / 2
    assert found.nonfinite
    assert found.transient >= 20


@pytest.mark.parametrize("name", NAMES)
def test_inputs(name: str, folder: Path) -> None:
    comparison = Comparison(reference(name, folder))
    found = compared("input", comparison, draw(comparison.regions("input"), 50, SEED))
    assert found.changed >= found.trials / 2


@pytest.mark.parametrize("name", GENERATING)
def test_caches(name: str, folder: Path) -> None:
    comparison = Comparison(reference(name, folder))
    found = compared("kv", comparison, draw(comparison.regions("kv"), 100, SEED))
    assert found.changed >= found.trials / 2
    assert found.nonfinite


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *GENERATING])
def test_other_dtypes(name: str, dtype: str, folder: Path) -> None:
    comparison = Comparison(reference(name, folder, dtype))
    trials = draw(comparison.regions("param"), 60, SEED) + draw(comparison.regions("op"), 30, SEED)
    found = compared(dtype, comparison, trials)
    assert found.changed >= found.trials / 2
