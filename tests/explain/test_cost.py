"""What determinism costs in a loop: the turns of its steps, ratios that are known beforehand, and the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from unsilent.basics.errors import UsageError
from unsilent.cli.main import run
from unsilent.explain import measure_step_costs, step_timer
from unsilent.explain.optimizer_steps import StepLimitReached
from unsilent.explain.results import Machine
from unsilent.explain.running import Launcher
from unsilent.explain.step_costs import CPU, FREE, OVERRIDDEN, PINS, WALL, StepCosts
from unsilent.explain.step_timer import StepTimer
from unsilent.explain.switching import Mode, switched

STEP = {"seeds": 0.25, "kernels": 0.5, "fill": 1.0, "one thread": -0.125}
"""What a made-up step of one second takes longer by."""
ONE = "the loop runs with one thread"
RATIO = {"seeds": 1.25, "kernels": 1.5, "kernels+memory": 2.5, "threads": 0.875, "all": 2.625}
"""By hand."""


def settings() -> tuple[object, ...]:
    cudnn, memory = torch.backends.cudnn, torch.utils.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    own = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory, torch.get_num_threads()
    return (*deterministic, *own)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Two threads and a loop's own generators; what is set here is put back."""
    before, state = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    torch.random.set_rng_state(state)


@pytest.fixture
def made_up_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the loop and the seeding of generators move; the wall's runs twice as fast."""
    clock = [0.0]
    monkeypatch.setattr(step_timer, "_clocks", lambda: (clock[0], 2 * clock[0]))

    def seeded(seed: int) -> None:
        clock[0] += STEP["seeds"]

    monkeypatch.setattr(step_timer, "seed_generators", seeded)
    return clock


def endless(clock: list[float], optimizers: int = 1, kept: int | None = None, forced: int | None = None) -> None:
    """A loop whose steps take longer by what is switched, and 50 times as long just after something was.

    ``kept``: threads that are set at the end of a step; ``forced``: that are set within it, after its module was called.
    """
    made, module = (
        [torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1) for _ in range(optimizers)],
        nn.Identity(),
    )
    last = None
    while True:
        module(torch.zeros(1))
        if forced is not None:
            torch.set_num_threads(forced)
        now = settings()
        deterministic = torch.are_deterministic_algorithms_enabled()
        seconds = 1 + STEP["kernels"] * deterministic
        seconds += STEP["fill"] * (deterministic and torch.utils.deterministic.fill_uninitialized_memory)
        seconds += STEP["one thread"] * (torch.get_num_threads() == 1)
        clock[0] += seconds if now == last else 50
        last = now
        for one in made:
            one.step()
        if kept is not None:
            torch.set_num_threads(kept)


def costs_of(rounds: list[dict[str, tuple[float, float]]]) -> StepCosts:
    return StepCosts("train.py:loop", 1, tuple(rounds), {"tf32": "no"}, (), 9, Machine({}, 2, None), 1.0)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_ratios_are_those_of_a_loop_whose_times_are_known(made_up_clock: list[float], optimizers: int):
    before = settings()
    with StepTimer(rounds=6) as timer, pytest.raises(StepLimitReached):
        endless(made_up_clock, optimizers)
    assert settings() == before
    assert len(timer.rounds) == 6
    costs = costs_of(timer.rounds)
    for source, expected in RATIO.items():
        for measure in (CPU, WALL):
            found = costs.ratio(source, measure)
            assert (found.estimate, found.low, found.high, found.n) == (expected, expected, expected, 6)
    assert set(timer.rounds[0]) == {FREE, *RATIO}


def test_threads_that_are_put_back_after_every_step_are_set_again(made_up_clock: list[float]):
    """As built-in trainings do, whose steps leave the number of threads as it was."""
    with StepTimer(rounds=6) as timer, pytest.raises(StepLimitReached):
        endless(made_up_clock, kept=2)
    assert {source: costs_of(timer.rounds).ratio(source).estimate for source in RATIO} == RATIO


def test_a_source_that_the_loop_sets_itself_is_not_measured(made_up_clock: list[float]):
    with StepTimer(rounds=6) as timer, pytest.raises(StepLimitReached):
        endless(made_up_clock, forced=2)
    assert {name for name, why in timer.unmeasured.items() if why == OVERRIDDEN} == {"threads", "all"}


def test_every_turn_has_the_same_number_of_steps_and_the_order_changes(made_up_clock: list[float]):
    with StepTimer(rounds=4) as timer, pytest.raises(StepLimitReached):
        endless(made_up_clock)
    orders = [tuple(times) for times in timer.rounds]
    assert timer.done == step_timer.SETTLING + 4 * 6 * (step_timer.UNTIMED + step_timer.TIMED)
    assert len(set(orders)) > 1


def test_a_loop_with_one_thread_has_no_cost_of_threads(made_up_clock: list[float]):
    torch.set_num_threads(1)
    with StepTimer(rounds=1) as timer, pytest.raises(StepLimitReached):
        endless(made_up_clock)
    assert "threads" not in timer.rounds[0]
    assert timer.unmeasured["threads"] == ONE


def test_a_limit_of_steps_ends_a_run_and_leaves_nothing_switched(made_up_clock: list[float]):
    before = settings()
    with StepTimer(rounds=100, limit=11) as timer, pytest.raises(StepLimitReached):
        endless(made_up_clock)
    assert (timer.done, timer.rounds, settings()) == (11, [], before)


def test_operations_without_a_deterministic_form_run_and_are_named():
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    pooled, indices = F.max_pool2d(torch.rand(1, 1, 4, 4), 2, return_indices=True)

    def unpool() -> None:
        while True:
            F.max_unpool2d(pooled, indices, 2)
            optimizer.step()

    with StepTimer(rounds=1) as timer, pytest.raises(StepLimitReached):
        unpool()
    assert any("max_unpool" in name for name in timer.refused)
    assert len(timer.rounds) == 1


def test_tf32_is_switched_and_put_back_by_either_name_of_it():
    """The switches exist without a GPU; a program may have used the older name, or the newer one."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [(one, one.fp32_precision) for one in (matmul, cudnn.conv, cudnn.rnn)]
    try:
        for older in (True, False):
            if older:
                matmul.allow_tf32, cudnn.allow_tf32 = True, False
            else:
                matmul.fp32_precision = "tf32"
            kept = matmul.fp32_precision, cudnn.conv.fp32_precision
            for wanted in (True, False):
                mode = Mode(tf32=wanted)
                with switched(mode):
                    assert mode.is_set
                    assert not mode._replace(tf32=not wanted).is_set
                    assert {matmul.fp32_precision, cudnn.conv.fp32_precision} == {"tf32" if wanted else "ieee"}
                assert (matmul.fp32_precision, cudnn.conv.fp32_precision) == kept
            assert not older or (matmul.allow_tf32, cudnn.allow_tf32) == (True, False)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = False, True  # or torch refuses to read them in what runs afterwards
        for one, precision in before:
            one.fp32_precision = precision


# -- the command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def made_up_runs(monkeypatch: pytest.MonkeyPatch):
    """Runs with ratios 1.5 (kernels), 3 (kernels+memory), 1 (seeds) and 4 (all), so many rounds each."""

    def prepare(rounds: int, **unmeasured: str) -> None:
        times = {name: [factor, 10 * factor] for name, factor in
                 {FREE: 1.0, "seeds": 1.0, "kernels": 1.5, "kernels+memory": 3.0, "all": 4.0}.items()}  # fmt: skip

        def one_run(launcher, pinned, number, **asked):
            launcher.launched += 1
            launcher._plain = {"versions": {"torch": "x"}, "threads": 1}
            told = {"rounds": [times] * rounds, "unmeasured": {"threads": ONE, **unmeasured}}
            return told | {"refused": ["op"], "steps": 50}

        monkeypatch.setattr(Launcher, "run", one_run)

    return prepare


def test_the_command_reports_ratios_with_limits(made_up_runs, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    made_up_runs(4)
    page = tmp_path / "cost.html"
    assert run(["explain", "train.py:loop", "--cost", "--json", "--quiet", "-o", str(page)]) == 0
    told = json.loads(capsys.readouterr().out)
    cpu = {row["source"]: row for row in told["results"] if row["measure"] == CPU}
    assert {name: row["estimate"] for name, row in cpu.items()} == {
        "seeds": 1.0, "kernels": 1.5, "kernels+memory": 3.0, "all": 4.0,
    }  # fmt: skip
    assert {(row["n"], row["unit"], row["confidence"]) for row in told["results"]} == {(12, "round", 0.95)}
    assert {"threads", "order of sets (hash, addresses)"} <= {row["source"] for row in told["not_measured"]}
    assert (told["schema"], told["rounds"]) == ("unsilent/explain-cost/1", 12)
    assert "deterministic algorithms of torch" in page.read_text()
    assert run(["explain", "train.py:loop", "--cost", "--quiet"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "With all sources below pinned, a step takes 4.00 times the CPU time (95 % interval 4.00 to 4.00)" in text
    assert "torch has no deterministic form of op; it ran as it is" in text
    assert ONE in text
    assert run(["explain", "train.py:loop", "--cost", "--quiet", "--plain"]) == 0
    assert f"# not measured: threads: {ONE}" in capsys.readouterr().out.splitlines()


def test_too_few_steps_are_refused(made_up_runs):
    made_up_runs(1)
    with pytest.raises(
        UsageError, match="enough for 3 rounds of timing; expected 6 rounds or more, of up to 24 steps each"
    ):
        measure_step_costs("train.py:loop")


@pytest.mark.parametrize(
    ("limits", "said"),
    [({"runs": 0}, "--runs is 0;"), ({"steps": 0}, "--steps is 0;"), ({"deadline": 0}, "--deadline is 0 s;")],
)
def test_the_limit_that_is_too_small_is_named_alone(limits: dict[str, int], said: str):
    with pytest.raises(UsageError, match=f"^{said} expected"):
        measure_step_costs("train.py:loop", **limits)


def test_sources_that_the_loop_sets_itself_are_left_out(made_up_runs, capsys: pytest.CaptureFixture[str]):
    made_up_runs(2, all=OVERRIDDEN, kernels=OVERRIDDEN)
    costs = measure_step_costs("train.py:loop")
    assert {str(one.keys["source"]) for one in costs.estimates} == {"seeds", "kernels+memory"}
    assert costs.report().headline.startswith("With kernels+memory alone pinned, a step takes 3.00 times")
    made_up_runs(2, free=OVERRIDDEN)
    with pytest.raises(UsageError, match="set none of them in the loop"):
        measure_step_costs("train.py:loop")


def test_cost_and_check_only_exclude_each_other(capsys: pytest.CaptureFixture[str]):
    assert run(["explain", "train.py:loop", "--cost", "--check-only"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_every_source_that_can_be_measured_says_how_it_is_pinned():
    for cuda in (False, True):
        modes, unmeasured = step_timer.modes_of(2, cuda)
        assert set(modes) - {FREE} | set(unmeasured) == set(PINS)
        assert not set(modes) & set(unmeasured)


@pytest.mark.slow
def test_a_built_in_training_is_timed(capsys: pytest.CaptureFixture[str]):
    assert run(["explain", "train-chargpt", "--cost", "--runs", "1", "--json", "--quiet"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rounds"] >= 5
    assert all(0 < row["low"] <= row["estimate"] <= row["high"] for row in told["results"])
