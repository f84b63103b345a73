"""The study of faulty training runs as a whole, in this process: floor, campaigns that go on, guard, training PVF."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from campaigns.faulty_loop import Here, running, write_loop
from conftest import campaign_run
from unsilent.basics.errors import StoreError, UsageError
from unsilent.campaigns.replay import check_same_campaign
from unsilent.campaigns.spec import TrialId
from unsilent.outcomes.training import Thresholds, TrainingOutcome
from unsilent.replicas import Replica, ReplicaStore, Switches
from unsilent.replicas import noise_floors as floor_module
from unsilent.replicas.noise_floors import SEEDS, WINDOW, NoiseFloorTest, check_twin, run_noise_floors
from unsilent.replicas.runner import ReplicaRunner
from unsilent.studies.training.judging import SLACK, TrainingJudge, horizon_from_floor, replica_spec
from unsilent.studies.training.kind import TRAINING, TrainingStore
from unsilent.studies.training.spec import GUARDED_PREFIX, TrainingSpec
from unsilent.studies.training.study import TrainingAnalysisOptions, read_training, run_with_floors

pytestmark = pytest.mark.slow

STEPS, TRIALS, WITHIN = 24, 20, Switches.parse("within")


def in_this_process(spec, wanted, store, **_):
    """As `run_replicas`, without a process."""
    runner = ReplicaRunner(spec)
    store.bind_campaign(spec, runner.establish_baseline())
    store.add_rows(map(runner.run_replica, wanted(runner.establish_baseline())))


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return TrainingSpec(write_loop(tmp_path_factory.mktemp("study")))


@pytest.fixture(scope="module")
def ran(spec, tmp_path_factory):
    """The floors, the rows of each, the clean twin, and the labels."""
    path = tmp_path_factory.mktemp("floor") / "floor.sqlite"
    with pytest.MonkeyPatch.context() as patch, ReplicaStore(path, write=True) as store:
        patch.setattr(floor_module, "run_replicas", in_this_process)
        found = run_noise_floors(replica_spec(spec), store, WITHIN, 20)
        rows = [list(store.runs_with_switches(switches, 20)) for switches in (WITHIN, SEEDS)]
        twin = store.clean_twin()
        labels = np.array(store.baseline.labels)
    return found, rows, twin, labels


@pytest.fixture(scope="module")
def floors(ran):
    return ran[0]


@pytest.fixture(scope="module")
def here(spec):
    with running(spec) as runner:
        yield Here(runner)


@pytest.fixture(scope="module")
def done(spec, floors, here, tmp_path_factory):
    """A campaign with the guard: its store and its result."""
    path = tmp_path_factory.mktemp("campaign") / "s.sqlite"
    with TrainingStore(path, write=True) as store:
        asked = campaign_run(TRAINING, spec, store, here, "unsilent training x", trials=TRIALS, guard=True)
        result = run_with_floors(asked, floors)
    return path, result


# -- the floor ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1], ids=["implementation", "seeds"])
def test_the_floors_are_what_replicas_ended_in(ran, number):
    floors, rows, twin, labels = ran
    found = (floors.implementation, floors.seeds)[number]

    def right(row):
        return (row.predictions == labels).mean()

    assert found.switches == ("within", "init+order+augment+dropout")[number]
    assert found.accuracy == tuple(right(row) - right(twin) for row in rows[number])
    assert found.loss == tuple(row.loss - twin.loss for row in rows[number])
    assert found.churn == tuple((row.predictions != twin.predictions).mean() for row in rows[number])
    assert found.identical_to_twin == (False,) * 20
    widest = [
        max(abs(row.losses[a : a + WINDOW].mean() - twin.losses[a : a + WINDOW].mean()) for row in rows[number])
        for a in range(0, STEPS, WINDOW)
    ]
    assert found.loss_band == pytest.approx(widest)
    assert found.window == WINDOW


def test_other_seeds_differ_more_than_the_order_of_sums(floors):
    assert np.std(floors.seeds.loss) > 10 * np.std(floors.implementation.loss)


def test_golden_is_the_clean_twin_of_its_replicas(ran, here, floors):
    found = here.establish_baseline()
    check_twin(found.name, found.losses, floors)
    assert found.losses == tuple(ran[2].losses.tolist())
    with pytest.raises(UsageError, match=r"golden run of tiny and the fault-free twin .* unsilent explain") as raised:
        check_twin(found.name, np.nextafter(ran[2].losses, 1).tolist(), floors)
    assert "\n" not in str(raised.value)


def test_a_floor_of_another_training_is_refused(spec, floors, here, tmp_path):
    with TrainingStore(tmp_path / "s.sqlite", write=True) as store:
        with pytest.raises(UsageError, match="and the fault-free twin of its replicas have different losses"):
            run_with_floors(
                campaign_run(TRAINING, spec, store, here, trials=2),
                replace(floors, seeds=replace(floors.seeds, twin_losses_hash="0" * 32)),
            )
        with pytest.raises(StoreError, match="holds no campaign yet"):  # nothing was stored
            store.stored_trial_ids()


def test_a_horizon_has_a_wider_band(floors):
    horizon = horizon_from_floor(replace(floors.implementation, loss_band=(0.1, 0.4, 0.2, 0.05, 0.0)), 7)
    assert (horizon.steps, horizon.window) == (7, WINDOW)
    assert horizon.loss == tuple(SLACK * x for x in (0.4, 0.4, 0.4, 0.2, 0.05))
    assert horizon.test == max(map(abs, floors.implementation.accuracy))
    one = horizon_from_floor(replace(floors.implementation, loss_band=(0.3,)), 2)
    assert one.loss == (SLACK * 0.3,)


def test_replicas_are_inside_the_band_of_their_horizon(ran, floors):
    _, (rows, _), twin, _ = ran
    limits = np.repeat(horizon_from_floor(floors.implementation, 5).loss, WINDOW)[:STEPS]
    for row in rows:
        off = row.losses - twin.losses
        for step in range(WINDOW - 1, STEPS):
            assert abs(off[step - WINDOW + 1 : step + 1].mean()) <= limits[step]


def test_replicas_themselves_are_beyond_at_about_the_level(spec, floors, here):
    golden = TrainingJudge(here.establish_baseline(), floors, Thresholds()).golden_curves(0)
    floor, called = floors.implementation, 0
    for out in range(20):
        rest = {
            name: tuple(v for i, v in enumerate(getattr(floor, name)) if i != out)
            for name in ("accuracy", "loss", "churn", "identical_to_twin")
        }
        ending = replace(golden, test_accuracy=golden.test_accuracy + floor.accuracy[out], same_bits=False)
        called += NoiseFloorTest(replace(floor, **rest), Thresholds().test_gap).is_beyond_noise(
            golden, ending, floor.loss[out]
        )
    assert called <= 2


@pytest.mark.parametrize(
    ("switches", "count", "said"),
    [
        ("within", 19, "--replicas is 19; a noise floor at level 0.05 needs at least 20"),
        ("control", 20, "--noise control does not vary between runs; name switches that vary"),
        ("threads=2", 20, "does not vary between runs"),
        ("layout", 20, "does not vary between runs"),
        (
            "algo",
            20,
            "varies seeds .init, order, augment, dropout., but every campaign already has a noise floor of seeds",
        ),
        ("order+within", 20, "varies seeds .order."),
    ],
)
def test_a_floor_that_says_nothing_is_refused(spec, tmp_path, switches, count, said):
    with ReplicaStore(tmp_path / "f.sqlite", write=True) as store, pytest.raises(UsageError, match=said):
        run_noise_floors(replica_spec(spec), store, Switches.parse(switches), count)


def test_replicas_are_of_the_same_training(spec):
    changed = replace(spec, options=(("steps", "7"),), data="d.npz", init=3, steps=5, faults=(("RD", 1.0),))
    found = replica_spec(changed)
    assert (found.workload, found.options, found.data, found.seed, found.steps) == (
        spec.workload, (("steps", "7"),), "d.npz", 3, 5,
    )  # fmt: skip
    assert str(Replica(WITHIN, 3)) == "within/3"


# -- campaigns ----------------------------------------------------------------------------------------------------------


def test_every_trial_has_its_class(done, spec, here, floors):
    path, result = done
    assert result.n == TRIALS
    assert sum(c.n for c in result.classes) == TRIALS
    assert [c.name for c in result.classes] == [str(o) for o in TrainingOutcome]
    judge = TrainingJudge(here.establish_baseline(), floors, Thresholds())
    with TrainingStore(path) as store:
        rows = [row for row in store.rows() if row.trial.target == "random"]
    assert [row.reproducible_values() for row in rows[::2]] == [
        here.runner.run(row.trial).reproducible_values() for row in rows[::2]
    ]
    counts = {c.name: c.n for c in result.classes}
    for outcome in TrainingOutcome:
        assert counts[outcome] == sum(judge.judge(row).outcome is outcome for row in rows)
    assert result.cost.end_reasons.keys() <= {"end", "same-bits", "not-finite"}
    assert sum(result.cost.end_reasons.values()) == TRIALS
    assert result.command == "unsilent training x"
    assert result.floors == floors


def test_curves_are_those_of_their_trials(done):
    path, result = done
    with TrainingStore(path) as store:
        for curve in result.curves:
            row = store.row(TrialId.parse(curve.trial))
            assert curve.step == row.injection.step
            golden = np.array(store.baseline.losses)[row.injection.step + row.steps_run :]
            rest = golden if row.end_reason == "same-bits" else []
            expected = [None if not np.isfinite(x) else x for x in [*row.losses.tolist(), *rest]]
            assert list(curve.losses) == expected
    assert max(sum(c.outcome == o for c in result.curves) for o in TrainingOutcome) <= 3
    assert {c.outcome for c in result.curves} == {c.name for c in result.classes if c.n}


def test_only_different_trials_are_run_again_under_the_guard(done, here, floors):
    path, result = done
    judge = TrainingJudge(here.establish_baseline(), floors, Thresholds())
    with TrainingStore(path) as store:
        plain = {row.trial: judge.judge(row) for row in store.rows() if row.trial.target == "random"}
        again = {row.unguarded_trial() for row in store.rows() if row.trial.target.startswith(GUARDED_PREFIX)}
    different = {trial for trial, one in plain.items() if one.is_different}
    assert again == different
    assert (result.guard is None) == (not different)
    if different:
        assert result.guard.different.n == len(different)
        assert result.guard.all_harmful.n == sum(one.is_harmful for one in plain.values())


def test_a_store_with_one_floor_is_completed_by_the_same_command(done, spec, floors, here, tmp_path):
    shutil.copy(done[0], tmp_path / "s.sqlite")
    with closing(sqlite3.connect(tmp_path / "s.sqlite")) as db, db:
        db.execute("DELETE FROM record WHERE rowid = 2")
    with (
        TrainingStore(tmp_path / "s.sqlite") as store,
        pytest.raises(UsageError, match="lacks a noise floor .* run again the command that made it"),
    ):
        read_training(store, TrainingAnalysisOptions())
    before = len(here.ran)
    with TrainingStore(tmp_path / "s.sqlite", write=True) as store:
        again = run_with_floors(campaign_run(TRAINING, spec, store, here, trials=TRIALS, guard=True), floors)
    assert len(here.ran) == before
    assert again.classes == done[1].classes


def test_a_campaign_goes_on_where_it_stopped(spec, floors, here, done, tmp_path):
    def ask(trials):
        before = len(here.ran)
        with TrainingStore(tmp_path / "s.sqlite", write=True) as store:
            result = run_with_floors(campaign_run(TRAINING, spec, store, here, trials=trials), floors)
        return result, len(here.ran) - before

    assert ask(10)[1] == 10
    assert ask(10)[1] == 0
    result, more = ask(TRIALS)
    assert more == TRIALS - 10
    assert ask(10)[0].n == TRIALS  # what is there stays
    assert result.classes == done[1].classes
    with TrainingStore(tmp_path / "s.sqlite") as store, TrainingStore(done[0]) as other:
        plain = [row.reproducible_values() for row in other.rows() if row.trial.target == "random"]
        assert [row.reproducible_values() for row in store.rows()] == plain


def test_a_store_is_read_again_with_other_thresholds(done):
    with TrainingStore(done[0]) as store:
        strict = read_training(store, TrainingAnalysisOptions(Thresholds(gap=1e-6, test_gap=1e-6)))
        loose = read_training(store, TrainingAnalysisOptions(Thresholds(gap=0.9, test_gap=0.9), confidence=0.5))
        assert read_training(store, TrainingAnalysisOptions()) is not None
    assert (
        strict.all_trials.harmful.estimate >= done[1].all_trials.harmful.estimate >= loose.all_trials.harmful.estimate
    )
    assert loose.confidence == loose.all_trials.harmful.confidence == 0.5


@pytest.mark.parametrize("fields", [{"margin": -0.1}, {"margin": 1.0}, {"margin": float("nan")}])
def test_readings_that_make_no_sense(fields):
    with pytest.raises(UsageError, match="margin is"):
        TrainingAnalysisOptions(**fields)


# -- training PVF -------------------------------------------------------------------------------------------------------


def test_training_pvf_counts_failures_of_each_part(spec, floors, tmp_path):
    memory = replace(spec, per="layer", faults=(("scale:factor=-30,rate=1", 1.0),))
    with running(memory) as runner, TrainingStore(tmp_path / "s.sqlite", write=True) as store:
        result = run_with_floors(campaign_run(TRAINING, memory, store, Here(runner), trials=4, margin=0.1), floors)
        rows = list(store.rows())
        found = runner.establish_baseline()
    worst = min(floors.implementation.accuracy)
    least = found.test_accuracy + min(worst, *floors.seeds.accuracy) - 0.1
    assert [part.target for part in result.parts] == [t.name for t in found.targets]
    for part, target in zip(result.parts, found.targets, strict=True):
        own = [row for row in rows if row.trial.target == part.target]
        assert (part.n, part.elements, part.memory_kind) == (4, target.elements, target.memory_kind)
        assert part.failures == sum(not row.test_accuracy >= least for row in own)
        assert part.pvf.estimate == part.failures / 4
        assert (
            part.different.estimate
            == sum(not row.test_accuracy >= found.test_accuracy + worst - 0.1 for row in own) / 4
        )
    assert result.n == 4 * len(result.parts)


# -- replay -------------------------------------------------------------------------------------------------------------


def test_a_trial_of_another_campaign_is_not_run_again(done, spec, tmp_path):
    said = "differs from this replay in seed; a bit-exact replay needs the same weights"
    other = replace(spec, seed=9)
    with running(other) as runner, TrainingStore(done[0]) as store, pytest.raises(StoreError, match=said):
        check_same_campaign(store, other, runner.establish_baseline())


# -- the horizon --------------------------------------------------------------------------------------------------------


def test_a_horizon_has_the_same_faults_and_seldom_another_class(done, spec, floors, tmp_path):
    horizon = horizon_from_floor(floors.implementation, 6)
    wide = replace(horizon, loss=(1e300,) * len(horizon.loss), test=1e300)  # which no run leaves, on any machine
    short = replace(spec, horizon=wide)
    with running(short) as runner, TrainingStore(tmp_path / "s.sqlite", write=True) as store:
        result = run_with_floors(campaign_run(TRAINING, short, store, Here(runner), trials=TRIALS), floors)
        early = {row.trial: row for row in store.rows()}
    with TrainingStore(done[0]) as store:
        whole = {row.trial: row for row in store.rows() if row.trial.target == "random"}
    assert {t: r.injection for t, r in early.items()} == {t: r.injection for t, r in whole.items()}
    for trial, row in early.items():
        assert row.losses.tobytes() == whole[trial].losses[: row.steps_run].tobytes()
        if row.end_reason != "horizon":
            assert row.reproducible_values() == whole[trial].reproducible_values()
    assert result.cost.steps < done[1].cost.steps
    assert result.cost.steps_without_early_end == done[1].cost.steps_without_early_end
    assert result.cost.end_reasons["horizon"] > 0
