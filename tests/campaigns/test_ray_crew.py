"""What the driver of a cluster decides, against one that is played: who is hired, refused and lost, and which rows count."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.campaigns import TrialId, ray_executor, ray_launch
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.ray_executor import RayExecutor
from unsilent.campaigns.runner import WorkerJob
from unsilent.studies.pvf.kind import PVF
from unsilent.studies.pvf.spec import PvfBaseline, PvfSpec, PvfTrialRow

FOUND = PvfBaseline(
    campaign="c", fingerprint={"weights": "1"}, targets=(), tensors=(), samples=(1,), golden_seconds=1.0, judge="top1",
    info={}, versions={"unsilent": "1"},
)  # fmt: skip
TRIALS = [TrialId("stem", 1, k) for k in range(40)]


class Listener(Observer):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)


class Played:
    """Stands for the bridge. ``finds(number)``: what a supervisor describes; ``does(number, trials)``: what happens then."""

    def __init__(self, finds: Callable[[int], PvfBaseline], does: Callable[[int, list[TrialId]], list[Any]]) -> None:
        self.finds, self.does = finds, does
        self.hired: list[tuple[int, int]] = []
        self.dropped: list[int] = []
        self.unfit: set[int] = set()
        self._messages: deque[tuple[Any, ...]] = deque()

    def __call__(self, *_: object) -> Played:
        return self

    def send(self, kind: str, *rest: Any) -> None:
        if kind == "hire":
            self.hired.append(rest)
            if rest[0] in self.unfit:
                self.gone(rest[0], "No module named 'unsilent'", True)
            else:
                self._tell(rest[0], [("ready", self.finds(rest[0]), 1, f"node{rest[0]}")])
        elif kind == "drop":
            self.dropped.append(rest[0])
        elif kind == "give":
            for event in self.does(rest[0], pickle.loads(rest[1])):
                if event == "gone":
                    self.gone(rest[0], "its node has died", False)
                else:
                    self._tell(rest[0], [event])

    def gone(self, *what: Any) -> None:
        self._messages.append(("gone", *what))

    def _tell(self, number: int, events: list[Any]) -> None:
        self._messages.append(("news", number, pickle.dumps(events), 0.0, 0.0))

    def receive(self, timeout: float) -> tuple[Any, ...] | None:
        return self._messages.popleft() if self._messages else None

    def close(self) -> None: ...


def works(number: int, trials: list[TrialId]) -> list[Any]:
    """A supervisor that does as it is told."""
    rows = [PvfTrialRow(trial, "[]", b"\0", 0, 0.0, "", 1.0, worker=0) for trial in trials]
    return [*(("row", row) for row in rows), ("proven", trials)]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RayExecutor, Played, Listener]]:
    def made(
        finds: Callable[[int], PvfBaseline] = lambda number: FOUND,
        does: Callable[[int, list[TrialId]], list[Any]] = works,
        jobs: int = 1,
        threads: int = 1,
    ) -> tuple[RayExecutor, Played, Listener]:
        played, observer = Played(finds, does), Listener()
        monkeypatch.setattr(ray_executor, "BridgeProcess", played)
        monkeypatch.setattr(ray_launch, "find_spec", lambda name: name)
        spec = PvfSpec("digits-cnn", threads=threads)
        return (
            RayExecutor(WorkerJob(PVF.runner, spec), jobs, observer),
            played,
            observer,
        )

    return made


def rows_of(executor: RayExecutor, trials: list[TrialId] = TRIALS) -> list[PvfTrialRow]:
    return [row for batch in executor.run(trials) for row in batch]


def test_every_trial_is_run_once_by_as_many_as_were_asked(play):
    executor, played, observer = play(jobs=3)
    assert sorted(row.trial for row in rows_of(executor)) == TRIALS
    assert played.hired == [(0, 1), (1, 1), (2, 1)]
    assert observer.said == []


def test_what_no_proof_covers_is_run_again_and_nothing_is_handed_out_twice(play):
    def does(number, trials):
        if number:
            return works(number, trials)
        told = works(number, trials)[:-1]
        return [*told, ("proven", trials[: len(trials) // 2]), "gone", ("proven", trials)]  # the last comes too late

    executor, played, observer = play(finds=lambda number: replace(FOUND, golden_seconds=0.01), does=does)
    rows = rows_of(executor)
    assert sorted(row.trial for row in rows) == TRIALS
    assert {row.worker for row in rows} == {0, 1}
    assert observer.said == [
        "a worker on node0 was lost (its node has died); its 20 unfinished trials run on other workers"
    ]
    assert len(played.hired) == 2


def test_a_trial_that_ends_every_node_ends_the_campaign(play):
    def does(number, trials):
        return ["gone"] if TRIALS[5] in trials else works(number, trials)

    executor, _, observer = play(does=does)
    with pytest.raises(
        UnsilentError, match="5 workers were lost while they had trial stem/x1/[345] to run .* --executor serial"
    ):
        rows_of(executor)
    assert len(observer.said) == 5


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(FOUND, campaign="d", fingerprint={"weights": "2"}), "weights"),
        (replace(FOUND, campaign="d"), "its targets"),
        (replace(FOUND, versions={"unsilent": "2"}), "unsilent"),
    ],
)
def test_who_finds_something_else_is_refused_and_not_replaced(play, other, said):
    executor, played, observer = play(finds=lambda number: other if number == 1 else FOUND, jobs=3)
    executor.establish_baseline()
    assert sorted(row.trial for row in rows_of(executor)) == TRIALS
    assert played.dropped == [1]
    assert len(played.hired) == 3
    assert observer.said == [
        f"node node1 does not reproduce the golden run of the first worker ({said} differ): "
        "the campaign continues without this worker"
    ]


def test_a_campaign_without_a_fitting_node_ends(play):
    other = replace(FOUND, campaign="d", fingerprint={"weights": "2"})
    executor, _, _ = play(finds=lambda number: other if number else FOUND, does=lambda number, trials: ["gone"], jobs=1)
    with pytest.raises(
        UsageError, match=r"no node is left to run trials on: node node1 does not .* \(weights differ\)"
    ):
        rows_of(executor)


def test_a_node_that_cannot_start_a_worker_is_left_out(play):
    executor, played, observer = play(jobs=3)
    played.unfit = {0, 2}
    assert sorted(row.trial for row in rows_of(executor)) == TRIALS
    assert observer.said == 2 * [
        "a node cannot start a worker (No module named 'unsilent'); install the same version of Unsilent on that node: "
        "the campaign continues without this worker"
    ]
    executor, played, _ = play(jobs=1)
    played.unfit = {0}
    with pytest.raises(UsageError, match="no node is left to run trials on: a node cannot start a worker"):
        executor.establish_baseline()


def test_a_gang_takes_room_on_one_node(play):
    executor, played, _ = play(finds=lambda number: replace(FOUND, info={"world_size": 2}), jobs=5, threads=3)
    assert sorted(row.trial for row in rows_of(executor)) == TRIALS
    assert played.hired == [(0, 3), (1, 6), (2, 6)]
    assert played.dropped == [0]


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (2, "a trial of 'digits-cnn' runs 2 processes, but --jobs is 1; use --jobs 2 or more"),
        ("many", "is 'many'; expected"),
    ],
)
def test_a_gang_that_does_not_fit_is_refused(play, size, said):
    executor, _, _ = play(finds=lambda number: replace(FOUND, info={"world_size": size}))
    with pytest.raises(UsageError, match=said):
        executor.establish_baseline()
