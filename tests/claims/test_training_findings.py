"""What the documentation says of faulty training runs, on one of its campaigns, exact and with a horizon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conftest import campaign_run
from unsilent.campaigns.executors import make_executor
from unsilent.outcomes.training import Thresholds
from unsilent.replicas import ReplicaStore, Switches
from unsilent.replicas.noise_floors import run_noise_floors
from unsilent.statistics.intervals import clopper_pearson
from unsilent.studies.training.judging import TrainingJudge, horizon_from_floor, replica_spec
from unsilent.studies.training.kind import TRAINING, TrainingStore
from unsilent.studies.training.records import TrainingResult
from unsilent.studies.training.spec import TrainingSpec
from unsilent.studies.training.study import run_with_floors, sampled_rows

pytestmark = pytest.mark.claim
TRIALS = 400
SPEC = TrainingSpec("train-resnet-sgd", value="uniform:low=1e16,high=1e18")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainings")


@pytest.fixture(scope="module")
def floors(folder: Path):
    with ReplicaStore(folder / "floor.sqlite", write=True) as store:
        return run_noise_floors(replica_spec(SPEC), store, Switches.parse("impl"), jobs=2)


def campaign(folder: Path, floors, spec: TrainingSpec, name: str, *, guard: bool = False) -> TrainingResult:
    with (
        TrainingStore(folder / name, write=True) as store,
        make_executor(None, TRAINING.runner, spec, jobs=2) as executor,
    ):
        return run_with_floors(campaign_run(TRAINING, spec, store, executor, trials=TRIALS, guard=guard), floors)


@pytest.fixture(scope="module")
def exact(folder: Path, floors) -> TrainingResult:
    return campaign(folder, floors, SPEC, "exact.sqlite", guard=True)


@pytest.fixture(scope="module")
def shortened(folder: Path, floors) -> TrainingResult:
    return campaign(
        folder, floors, replace(SPEC, horizon=horizon_from_floor(floors.implementation, 50)), "horizon.sqlite"
    )


def test_all_classes_add_up_and_much_is_harmful(exact: TrainingResult) -> None:
    assert sum(group.n for group in exact.classes) == TRIALS
    assert exact.all_trials.harmful.low > 0.1


def test_harm_is_part_of_what_is_different(exact: TrainingResult) -> None:
    for group in exact.classes:
        assert group.different <= group.n
        assert group.different == group.n or group.name.startswith("masked")
    assert exact.all_trials.different.estimate >= exact.all_trials.harmful.estimate


def test_latent_harm_is_foretold_within_two_steps(exact: TrainingResult) -> None:
    """Consistent with the published statement at our threshold of 100 times; the published ranges have not been read."""
    (found,) = [c for c in exact.conditions if (c.kind, c.factor) == ("any", 100.0)]
    assert found.true_positives > 10
    assert found.false_negatives == 0


def test_the_condition_is_not_sufficient(exact: TrainingResult) -> None:
    (found,) = [c for c in exact.conditions if (c.kind, c.factor) == ("any", 100.0)]
    assert found.false_positives > 0


def test_the_guard_undoes_every_large_harmful_fault(exact: TrainingResult) -> None:
    assert exact.guard is not None
    assert exact.guard.large_harmful.n > 30
    assert (
        exact.guard.large_harmful.detected_in_time
        == exact.guard.large_harmful.n
        == exact.guard.large_harmful.recovered_identical
    )


def test_a_horizon_costs_less_and_misjudges_few(
    folder: Path, floors, exact: TrainingResult, shortened: TrainingResult
) -> None:
    with TrainingStore(folder / "exact.sqlite") as whole, TrainingStore(folder / "horizon.sqlite") as short:
        judge = TrainingJudge(whole.baseline, floors, Thresholds())
        ends = {row.trial: judge.judge(row).outcome for row in sampled_rows(whole)}
        wrong = [row.trial for row in sampled_rows(short) if judge.judge(row).outcome != ends[row.trial]]
    assert clopper_pearson(len(wrong), TRIALS).high <= 0.02
    assert shortened.cost.steps < 0.7 * exact.cost.steps
