"""The noise study on real runs of a tiny training: what it finds is what the rows say; what cannot be switched is said."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from replicas.subjects import LOOP
from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.replicas import ReplicaSpec, ReplicaStore, Switches
from unsilent.studies.noise.study import NoiseQuestion, read_noise, run_noise, variant_name

pytestmark = pytest.mark.slow

RACE = ("race=2", "threads=2", "layout", "tf32", "augment")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("noise")
    (path / "loop.py").write_text(LOOP)
    return path


def ask(folder, switches, options=(), **more):
    spec = ReplicaSpec(f"{folder}/loop.py:make", options)
    return NoiseQuestion(spec, tuple(map(Switches.parse, switches)), **{"replicas": 3, **more})


@pytest.fixture(scope="module")
def named(folder):
    with ReplicaStore(folder / "named.sqlite", write=True) as store:
        asked = ask(folder, ("control", "algo", "impl", "algo+impl", "race=2"), replicas=4)
        return run_noise(asked, store, jobs=2), folder / "named.sqlite", asked


def test_measures_follow_from_the_rows(named):
    result, path, _ = named
    assert [v.name for v in result.variants] == ["CONTROL", "ALGO", "IMPL", "ALGO+IMPL", "race=2"]
    assert [v.distinct_final_states for v in result.variants] == [1, 4, 4, 4, 1]
    algo = result.variants[1]
    with ReplicaStore(path) as store:
        rows = list(store.runs_with_switches(Switches.parse("algo"), 4, weights=True))
        labels = np.array(store.baseline.labels)
    pairs = list(itertools.combinations(rows, 2))
    accuracies = [float((row.predictions == labels).mean()) for row in rows]
    assert algo.accuracies == pytest.approx(accuracies)
    assert algo.accuracy.sd.estimate == pytest.approx(np.std(accuracies, ddof=1))
    assert algo.churn.estimate == pytest.approx(np.mean([(a.predictions != b.predictions).mean() for a, b in pairs]))
    assert algo.raw_weight_distance.estimate == pytest.approx(
        np.mean([np.linalg.norm(a.flat_weights - b.flat_weights) for a, b in pairs]), rel=1e-5
    )
    assert 0 < algo.unit_sphere_distance.low < algo.unit_sphere_distance.estimate < algo.unit_sphere_distance.high <= 2
    assert algo.divergence_steps == (0, 0, 0, 0)
    assert result.churn_matrix.churn[4][5] == (rows[0].predictions != rows[1].predictions).mean()


def test_the_operation_at_which_runs_part(named):
    """The model is linear layers and a tanh; in-batch permutations reach the weights by a gradient that sums over the batch."""
    result = named[0]
    control, algo, impl, both, _ = (v.diverging_operation for v in result.variants)
    assert control is None
    assert (algo.kind, algo.step) == ("start", 0)
    assert (impl.kind, impl.kernel, impl.phase) in [("kernel", k, "backward") for k in ("mm", "sum")]
    assert impl.module in ("first", "last")
    assert both.kind == "start"
    firsts = {e.switch: e.diverging_operation for e in result.effects}
    assert firsts["init"].kind == "start"
    assert firsts["order"].kind in ("data", "moved")
    assert firsts["augment"] is None


def test_the_clean_twins_do_not_differ_in_anything(named):
    control = named[0].variants[0]
    assert (control.churn.estimate, control.raw_weight_distance.estimate, control.accuracy.sd.estimate) == (0, 0, 0)
    assert control.divergence_steps == (None,) * 4
    assert math.isinf(control.median_divergence_step.estimate)
    assert control.twin_churn == (0,) * 4


def test_a_stream_that_is_not_drawn_from_is_said_and_the_others_count(named):
    effects = {e.switch: (e.changes_bits, e.explanation) for e in named[0].effects}
    assert effects["augment"] == (None, "seeds of augment have no effect on this training")
    assert effects["dropout"][0] is None
    assert [effects[name][0] for name in ("init", "order", "within")] == [True, True, True]


def test_reading_again_gives_the_same(named):
    result, path, asked = named
    with ReplicaStore(path) as store:
        again = read_noise(asked, store)
    assert again.variants == result.variants
    assert again.effects == result.effects


def test_races_and_what_cannot_be_switched(folder):
    with ReplicaStore(folder / "race.sqlite", write=True) as store:
        result = run_noise(ask(folder, RACE, (("racing", "yes"), ("steps", "12"))), store)
    effects = {e.switch: e for e in result.effects}
    if not effects["race=2"].changes_bits:
        pytest.skip("no operation raced here in three runs")
    assert "makes runs with the same seeds differ" in effects["race=2"].explanation
    assert effects["threads=2"].changes_bits is not None
    assert effects["layout=channels_last"].changes_bits is None
    assert "four dimensions" in effects["layout=channels_last"].explanation
    assert "needs a CUDA device" in effects["tf32"].explanation
    assert [v.name for v in result.variants] == ["race=2", "threads=2"]
    assert result.variants[0].distinct_final_states > 1
    assert (result.variants[1].distinct_final_states, result.variants[1].is_deterministic) == (1, True)
    assert sum("was not run" in note for note in result.notes) == 3


def test_no_race_is_said(named):
    effect = next(e for e in named[0].effects if e.switch == "race=2")
    assert "no race was observed in 3 runs" in effect.explanation


@pytest.mark.parametrize(("loose", "step"), [("clock", 2), ("process", 0)])
def test_twins_that_differ_are_an_error_with_step_and_tensor(folder, loose, step):
    """Also those that differ between processes alone, with one job."""
    with ReplicaStore(folder / f"{loose}.sqlite", write=True) as store, pytest.raises(UnsilentError) as raised:
        run_noise(ask(folder, ("control",), (("loose", loose),)), store)
    told = str(raised.value)
    assert "control/0 and control/1 differ" in told
    assert f"in the loss from step {step} on" in told
    assert "first in model/table" in told or "first in model/first" in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("loose", "said"),
    [
        ("left", "control/0 and control/1 differ in the loss from step 0 on.*leaves state for the next one"),
        (
            "evaluate",
            "differ in (loss|predictions|metrics).* of held-out samples, although weights are equal .does evaluate draw",
        ),
        ("nan", "the clean twin's loss is nan in step 3; a noise floor needs finite losses: fix the training"),
    ],
)
def test_a_twin_that_is_none_is_an_error(folder, loose, said):
    """Also what one run leaves behind for the next in its process, and an evaluation that is random."""
    with (
        ReplicaStore(folder / f"{loose}.sqlite", write=True) as store,
        pytest.raises(UnsilentError, match=said),
    ):
        run_noise(ask(folder, ("within",), (("loose", loose),)), store)


def test_masks_that_are_dealt_anew_and_draws_are_told_as_such(folder):
    with ReplicaStore(folder / "draws.sqlite", write=True) as store:
        asked = ask(folder, ("within", "augment"), (("dropout", "yes"), ("mirror", "yes"), ("steps", "4")))
        result = run_noise(asked, store)
    firsts = {e.switch: e.diverging_operation for e in result.effects}
    assert firsts["augment"].kind == "random"
    assert firsts["within"].kind == "dealt"
    assert any("change dropout masks" in note for note in result.notes)


def test_nothing_that_can_be_run_is_an_error(folder):
    with (
        ReplicaStore(folder / "none.sqlite", write=True) as store,
        pytest.raises(UsageError, match="no variant can be run here .tf32: tf32 needs a CUDA device"),
    ):
        run_noise(ask(folder, ("tf32",)), store)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicas": 2}, "at least 3 are needed"),
        ({"replicas": 20, "level": 0.01}, "set --replicas 99 or more"),
        ({"replicas": 18, "level": 0.05}, "set --replicas 19 or more"),
        ({"level": 2.0}, "between 0 and 1"),
    ],
)
def test_what_cannot_be_answered_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        NoiseQuestion(ReplicaSpec("train-resnet"), (Switches(),), **given)
    assert NoiseQuestion(ReplicaSpec("train-resnet"), (Switches(),), replicas=19, level=0.05).replicas == 19


def test_names():
    assert variant_name(Switches.parse("order+within")) == "order+within"
    assert variant_name(Switches.parse("within")) == "IMPL"
