"""Every training keeps the contract: one table, all rows; see ``ROWS`` in ``conftest.py``."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from conftest import few
from unsilent.faults import fault_model
from unsilent.sites.training.step import StepInjection
from unsilent.sites.training.step_survey import StepSurvey
from unsilent.workloads import TRAININGS, load_training
from unsilent.workloads.registry import PASSED
from unsilent.workloads.trainings import Seeds, TrainingWorkload
from unsilent.workloads.trainings.restore_check import check_restorable
from unsilent.workloads.trainings.snapshots import first_snapshot_difference

from .conftest import ROWS

FAST = ("train-resnet", "train-chargpt", "own loop")
every = pytest.mark.parametrize("row", few(ROWS, *FAST))
built_in = pytest.mark.parametrize("row", few([row for row in ROWS if row != "own loop"], *FAST))


def run(workload, state, steps):
    return [workload.step(state) for _ in range(steps)]


def reread(snapshot):
    """Through a file, as another process would see it."""
    file = io.BytesIO()
    torch.save(snapshot, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_every_built_in_training_has_a_row():
    assert {ref for ref, _ in ROWS.values() if ref} == set(TRAININGS)


@every
def test_parts(trainings, row):
    workload = trainings(row)
    assert isinstance(workload, TrainingWorkload)
    assert workload.name == (ROWS[row][0] or "own loop")
    assert (workload.world_size, workload.steps >= 1000) == (1, True)
    assert json.loads(json.dumps(workload.info)) == workload.info


@built_in
def test_info_says_what_it_is(trainings, row):
    workload = trainings(row)
    assert {"description", "data", "citation", "settings", "streams"} <= workload.info.keys()
    assert workload.settings["steps"] == workload.steps


@every
def test_comes_back_bit_for_bit(trainings, row):
    assert len(check_restorable(trainings(row), steps=2, new_process=False).ways_checked) == 3


@pytest.mark.slow
@pytest.mark.parametrize("row", ["train-vit", "scaled"])
def test_comes_back_in_a_new_process(trainings, row):
    found = check_restorable(trainings(row), steps=2)
    assert found.why_not_new_process is None
    assert found.ways_checked[-1] == "restored in a new process"


@every
def test_snapshot_at_several_steps(trainings, row):
    workload = trainings(row)
    state = workload.start(3)
    kept = {}
    for step in range(4):
        if step != 2:
            kept[step] = reread(workload.snapshot(state))
        workload.step(state)
    end = workload.snapshot(state)
    for step, snapshot in kept.items():
        other = workload.restore(snapshot)
        assert other.step == step
        run(workload, other, 4 - step)
        assert first_snapshot_difference(workload.snapshot(other), end) is None, step


@every
def test_two_trainings_side_by_side(trainings, row):
    workload = trainings(row)
    alone = [workload.start(seed) for seed in (1, 2)]
    for state in alone:
        run(workload, state, 3)
    mixed = [workload.start(seed) for seed in (1, 2)]
    for _ in range(3):
        for state in mixed:
            workload.step(state)
            workload.evaluate(state)
    for a, b in zip(alone, mixed, strict=True):
        assert first_snapshot_difference(workload.snapshot(a), workload.snapshot(b)) is None
    assert first_snapshot_difference(workload.snapshot(alone[0]), workload.snapshot(alone[1])) is not None


@every
def test_caller_notices_nothing(trainings, row):
    workload = trainings(row)
    torch.manual_seed(11)
    np.random.seed(12)
    random.seed(13)

    def here():
        return torch.random.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    before, threads = here(), torch.get_num_threads()
    with torch.no_grad():
        state = workload.start(0)
        workload.step(state)
        workload.evaluate(state)
        workload.restore_into(state, workload.snapshot(state))
        workload.restore(workload.snapshot(state))
        assert not torch.is_grad_enabled()
    assert (here(), torch.get_num_threads()) == (before, threads)


@every
def test_draws_of_the_caller_change_nothing(trainings, row):
    workload = trainings(row)
    state = workload.start(0)
    run(workload, state, 2)
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    other = workload.start(0)
    for _ in range(2):
        torch.rand(3), np.random.rand(2), random.random()
        workload.step(other)
    assert first_snapshot_difference(workload.snapshot(state), workload.snapshot(other)) is None


@every
def test_restoring_keeps_the_tensors(trainings, row):
    workload = trainings(row)
    state = workload.start(0)
    run(workload, state, 2)
    held = [*state.model.parameters(), *state.model.buffers()]
    held += [
        t for o in state.optimizers for entries in o.state.values() for t in entries.values() if torch.is_tensor(t)
    ]
    snapshot = workload.snapshot(state)
    run(workload, state, 1)
    workload.restore_into(state, snapshot)
    now = [*state.model.parameters(), *state.model.buffers()]
    now += [t for o in state.optimizers for entries in o.state.values() for t in entries.values() if torch.is_tensor(t)]
    assert [id(t) for t in now] == [id(t) for t in held]
    assert first_snapshot_difference(workload.snapshot(state), snapshot) is None


@every
def test_evaluation(trainings, row):
    workload = trainings(row)
    state = workload.start(0)
    run(workload, state, 1)
    before = workload.snapshot(state)
    modes = [module.training for module in state.model.modules()]
    first, second = workload.evaluate(state), workload.evaluate(state)
    assert first_snapshot_difference(workload.snapshot(state), before) is None
    assert [module.training for module in state.model.modules()] == modes
    assert (first.loss, dict(first.metrics)) == (second.loss, dict(second.metrics))
    assert (first.predictions == second.predictions).all()
    assert first.metrics["accuracy"] == (first.predictions == first.labels).mean()
    assert len(first.labels) > 10
    assert first.groups
    assert all(mask.any() and not mask.all() for mask in first.groups.values())


@every
def test_faults_around_a_step(trainings, row):
    """A step can be surveyed and corrupted from outside, and be taken back."""
    workload = trainings(row)
    state = workload.start(0)
    snapshot = workload.snapshot(state)
    with StepSurvey(state.model, state.optimizers) as survey:
        workload.step(state)
    clean = workload.snapshot(state)
    bit = 14 if next(state.model.parameters()).dtype == torch.bfloat16 else 30
    for globs in ("op:*/grad_wt/out", "op:*/optim/out", "op:*/fwd/out"):
        regions = [r for r in survey.select_regions(globs) if "(root)" not in r.site]
        faults = fault_model(f"bitflip:bits={bit}").draw(regions, np.random.default_rng(0), "per-tensor")
        workload.restore_into(state, snapshot)
        with StepInjection(state.model, faults, state.optimizers, state.step) as step:
            workload.step(state)
        assert step.receipt.verified_elements == 1
    workload.restore_into(state, snapshot)
    workload.step(state)
    assert first_snapshot_difference(workload.snapshot(state), clean) is None


@built_in
@pytest.mark.parametrize("stream", ["init", "order", "augment", "dropout", "within"])
def test_each_stream_alone(trainings, row, stream, monkeypatch):
    """Changing one seed changes what it is for, and none of the draws of the others."""
    workload = trainings(row)

    def watched(seeds):
        state = workload.start(seeds)
        seen = {"init": [p.detach().clone() for p in state.model.parameters()], "batches": [], "dropout": []}
        own = workload._loss

        def spy(model, batch):
            seen["batches"].append(batch)
            seen["dropout"].append(torch.random.get_rng_state())
            return own(model, batch)

        with monkeypatch.context() as patch:
            patch.setattr(workload, "_loss", spy)
            run(workload, state, 2)
        return seen, workload.snapshot(state)["model"]

    (base, end), (other, other_end) = watched(Seeds.same_for_all(5)), watched(Seeds(**changed(stream)))
    parts = {part for part in base if first_snapshot_difference(base[part], other[part]) is not None}
    expected = {"init": "init", "dropout": "dropout"}.get(stream, "batches")
    acts = stream in workload.streams
    # Dropout's seed sets the generator also where nothing draws from it.
    assert parts == ({expected} if acts or stream == "dropout" else set())
    assert (first_snapshot_difference(end, other_end) is not None) == acts
    if stream in ("within", "augment") and acts:
        for a, b in zip(base["batches"], other["batches"], strict=True):
            rows = [list(x.values())[-1] if isinstance(x, dict) else x[-1] for x in (a, b)]
            if stream == "within":
                rows = [part.flatten().sort().values for part in rows]
            assert torch.equal(*rows)


def changed(stream):
    return {**Seeds.same_for_all(5).to_json(), stream: 6}


@built_in
def test_permuted_rows_are_the_same_step_up_to_rounding(trainings, row):
    """Every row keeps its augmentation and its dropout: only the order of sums is another."""
    workload = trainings(row)
    records, ends = [], []
    for within in (None, 1, 2):
        state = workload.start(Seeds(7, 7, 7, 7, within))
        records.append(workload.step(state))
        ends.append(workload.snapshot(state)["model"])
    exact = ROWS[row][1].get("amp") is None
    for record in records[1:]:
        assert record.loss == pytest.approx(records[0].loss, rel=1e-5 if exact else 1e-2)
        assert record.metrics == pytest.approx(records[0].metrics, abs=1e-6 if exact else 0.1)
    assert all(first_snapshot_difference(ends[0], end) for end in ends[1:])


STEPS = {"train-resnet-nobn": 300, "train-vit": 250}
"""Steps of a shortened run, where 150 are too few."""


@pytest.mark.parametrize("name", few(TRAININGS, "train-resnet"))
def test_learns(name):
    steps = STEPS.get(name, 150)
    workload = load_training(name, {"steps": str(steps)})
    state = workload.start(0)
    before = workload.evaluate(state)
    records = run(workload, state, steps)
    after = workload.evaluate(state)
    assert after.metrics["accuracy"] > before.metrics["accuracy"]
    assert after.loss < before.loss
    assert np.mean([r.loss for r in records[-20:]]) < np.mean([r.loss for r in records[:20]])


@pytest.mark.parametrize("entry", TRAININGS.values(), ids=lambda e: e.name)
def test_declared_options_are_those_of_the_factory(entry):
    module, _, function = entry.factory_path.partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    assert set(parameters) - set(PASSED) - set(entry.fixed_options) == set(entry.options)
    assert ("data" in parameters) == (entry.data != "no")
    for option, text in entry.options.items():
        default = parameters[option].default
        if isinstance(default, (int, float)) and not isinstance(default, bool) and option != "rate":
            assert f"({default})" in text


def test_listing_imports_no_torch():
    code = (
        "import sys; from unsilent.workloads import TRAININGS; assert len(TRAININGS) == 7;"
        "assert not {'torch', 'numpy', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
