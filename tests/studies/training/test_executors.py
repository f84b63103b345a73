"""Faulty training runs in processes of their own: the same rows whoever runs them, and a death harms no other trial."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from campaigns.faulty_loop import running, write_loop
from unsilent.campaigns.executors import make_executor
from unsilent.campaigns.spec import TrialId
from unsilent.studies.training.kind import TRAINING, TrainingStore
from unsilent.studies.training.spec import TrainingSpec

pytestmark = pytest.mark.slow

EXECUTORS = {"serial": 1, "processes": 2, "ray": 2}
TARGETS = ("param:conv.weight", "param:fc.weight", "optim:fc.weight", "guarded:param:fc.weight")
MANY = [TrialId(target, None, k) for k in range(4) for target in TARGETS]
DIES, HANGS = TrialId("param:fc.bias", None, 0), TrialId("param:conv.bias", None, 0)
DEADLINE = 3.0


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    loop = write_loop(tmp_path_factory.mktemp("executors"))
    return TrainingSpec(
        loop, (("ends", "fragile"),), per="tensor", layers=("conv", "fc"), faults=(("set:value=1e6", 1.0),)
    )


@pytest.fixture(scope="module")
def reference(spec):
    """Description and rows of this process."""
    with running(spec) as runner:
        return runner.establish_baseline(), {trial: runner.run(trial).reproducible_values() for trial in MANY}


def ran(executor, trials):
    return [row for rows in executor.run(iter(trials)) for row in rows]


@pytest.mark.parametrize(
    ("name", "deadly"),
    [
        ("processes", {}),
        pytest.param("serial", {DIES: "crash", HANGS: "hang"}, marks=pytest.mark.claim),
        pytest.param("processes", {DIES: "crash", HANGS: "hang"}, marks=pytest.mark.claim),
        pytest.param("ray", {DIES: "crash", HANGS: "hang"}, marks=pytest.mark.claim),
    ],
)
def test_every_executor_gives_the_same_rows(spec, reference, name, deadly):
    if name == "ray" and find_spec("ray") is None:
        pytest.skip("ray is not installed")
    described, expected = reference
    jobs = EXECUTORS[name]
    with make_executor(name, TRAINING.runner, spec, jobs=jobs, deadline=DEADLINE) as executor:
        found = executor.establish_baseline()
        rows = ran(executor, [*MANY[:8], *deadly, *MANY[8:]])
        assert all(spent > 0 for spent in executor.seconds_since_last_call())
    assert found.campaign == described.campaign
    assert found.fingerprint == described.fingerprint
    assert (found.losses, found.history_magnitudes) == (described.losses, described.history_magnitudes)
    assert sorted(row.trial for row in rows) == sorted([*MANY, *deadly])
    assert {row.trial: row.reproducible_values() for row in rows if row.trial not in deadly} == expected
    for row in rows:
        if row.trial in deadly:
            assert (row.end_reason, row.error) == (deadly[row.trial], f"worker: {deadly[row.trial]}")
            assert (row.steps_run, row.bit_identical, len(row.losses)) == (0, False, 0)
            assert row.injection.site == row.trial.target
            assert row.seconds > 0
        else:
            assert row.end_reason in ("end", "not-finite", "same-bits", "missed", "recovered", "stopped")


# -- kill -9 ------------------------------------------------------------------------------------------------------------

DRIVER = """
import sys
from unsilent.campaigns.driver import Budget, run_campaign
from unsilent.campaigns.executors import make_executor
from unsilent.studies.training.spec import TrainingSpec
from unsilent.studies.training.kind import TRAINING, TrainingStore

if __name__ == "__main__":
    spec = TrainingSpec(sys.argv[1], faults=(("RD", 2.0), ("bitflip:bits=30", 1.0)))
    with TrainingStore(sys.argv[2], write=True) as store, make_executor("serial", TRAINING.runner, spec) as executor:
        run_campaign(spec, Budget(int(sys.argv[3])), executor, store, command="by hand")
"""
TRIALS = 120


def stored(path):
    if not path.exists():
        return 0
    with TrainingStore(path) as store:
        return len(store.stored_trial_ids())


@pytest.mark.claim
def test_killed_and_run_again_it_is_as_if_nothing_had_been(tmp_path):
    loop = write_loop(tmp_path)
    (tmp_path / "driver.py").write_text(DRIVER)
    rng = random.Random(3)

    def start(name, trials):
        words = [sys.executable, str(tmp_path / "driver.py"), loop, str(tmp_path / name), str(trials)]
        return subprocess.Popen(words, start_new_session=True)

    seen = []
    for _ in range(3):
        process = start("killed.sqlite", TRIALS)
        before, end = seen[-1] if seen else 0, time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end and _count(tmp_path / "killed.sqlite") <= before:
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 1))
        process.kill()
        process.wait()
        seen.append(stored(tmp_path / "killed.sqlite"))
    assert seen == sorted(seen)
    assert 0 < seen[0] < TRIALS
    # First fewer than all, then all: a budget that grows changes nothing.
    for trials in (TRIALS // 2, TRIALS):
        assert start("killed.sqlite", trials).wait(timeout=300) == 0
    with running(TrainingSpec(loop, faults=(("RD", 2.0), ("bitflip:bits=30", 1.0)))) as runner:
        expected = [runner.run(TrialId("random", None, k)).reproducible_values() for k in range(TRIALS)]
        description = runner.establish_baseline()
    with TrainingStore(tmp_path / "killed.sqlite") as store:
        assert [row.reproducible_values() for row in store.rows()] == expected
        assert store.baseline.campaign == description.campaign
        assert store.baseline.losses == description.losses
        assert store.largest_budget() == (TRIALS, "by hand")


def _count(path):
    try:
        return stored(path)
    except Exception:  # it is just being made
        return 0


@pytest.mark.claim
def test_the_faults_are_those_of_another_process_with_other_hashes(spec):
    """What is drawn depends on no order of sets."""
    script = (
        "import sys; from campaigns.faulty_loop import running; from unsilent.studies.training.spec import TrainingSpec;"
        "from unsilent.campaigns.spec import TrialId\n"
        "with running(TrainingSpec(sys.argv[1])) as r: print([r.draw(TrialId('random', None, k)) for k in range(50)])"
    )
    found = set()
    for seed in ("1", "2"):
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-c", script, spec.workload],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
