"""``unsilent attack WORKLOAD ADAPTER``: find inputs that only the adapted copy of a model gets wrong."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from unsilent.basics.errors import wrong_value_error
from unsilent.basics.options import (
    CONFIDENCE,
    EXECUTION_PANEL,
    FAULTS_PANEL,
    WORKLOAD_PANEL,
    Option,
    Request,
    check_confidence,
    check_count,
)
from unsilent.campaigns.options import DATA, WEIGHTS, WORKLOAD_OPTION
from unsilent.command import EXPLAIN, Command, Result

USAGE = "expected unsilent attack WORKLOAD ADAPTER, such as unsilent attack digits-cnn int4"


def read_fraction(text: str) -> float:
    """A number from a text such as ``0.5`` or ``8/255``; raises ``UsageError``."""
    try:
        return float(Fraction(text))
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        raise wrong_value_error("--eps", text, "a number or a fraction, like 8/255") from None


@dataclass(frozen=True)
class AttackOptions:
    """Options of ``unsilent attack``."""

    workload: Annotated[str, Option(
        "The workload: built in, file.py:name or package.module:name.", WORKLOAD_PANEL,
        missing_error=f"no workload was given; {USAGE}")]  # fmt: skip
    adapter: Annotated[str, Option(
        "How the copy is adapted, like int8 or prune:0.8+int8.", WORKLOAD_PANEL,
        missing_error=f"no adapter was given; {USAGE}")]  # fmt: skip
    attack: Annotated[str, Option(
        "diva, apgd-diva, pgd, apgd-ce, apgd-dlr, pgd-original or noise.", FAULTS_PANEL)] = "diva"  # fmt: skip
    loss: Annotated[str, Option("How DIVA measures how sure a model is: prob, logprob or margin.", FAULTS_PANEL)] = (
        "logprob"
    )
    c: Annotated[float, Option("Weight of the adapted model in DIVA's objective.", FAULTS_PANEL)] = 1.0
    temperature: Annotated[float, Option("DIVA divides class scores by this number.", FAULTS_PANEL)] = 1.0
    eps: Annotated[str, Option(
        "Largest change of each value of an input, as a share of the valid range.", FAULTS_PANEL)] = "8/255"  # fmt: skip
    steps: Annotated[int, Option("Steps of each restart.", FAULTS_PANEL)] = 20
    restarts: Annotated[
        int, Option("Runs of the attack; each further run takes the inputs that withstood.", FAULTS_PANEL)
    ] = 1
    random_start: Annotated[bool, Option("Begin at a random point within --eps of the input.", FAULTS_PANEL)] = False
    samples: Annotated[int | None, Option(
        "Inputs to attack.", EXECUTION_PANEL, default_text="those that all three models get right")] = None  # fmt: skip
    options: Annotated[tuple[tuple[str, str], ...], WORKLOAD_OPTION] = ()
    data: Annotated[str | None, DATA] = None
    weights: Annotated[str | None, WEIGHTS] = None
    confidence: Annotated[float, CONFIDENCE] = 0.95
    seed: Annotated[int, Option("Seed of random starts and of the noise.", EXECUTION_PANEL)] = 0

    def __post_init__(self) -> None:
        """Raise ``UsageError`` for a number out of range."""
        check_confidence(self.confidence)
        if self.samples is not None:
            check_count("--samples", self.samples, 1)
        check_count("--seed", self.seed, 0)


def attack(request: Request) -> Result:
    """Search for inputs that the original model answers rightly and an adapted copy wrongly; compare with PGD and noise.

    ADAPTER is int8, int4, prune:0.8, bf16, fp16 or compiled, or several joined by +.
    """
    options = request[AttackOptions]
    from unsilent.compare.attacks.attacking import attack_workload
    from unsilent.compare.attacks.evaluation import check_attack
    from unsilent.compare.attacks.objectives import diva
    from unsilent.compare.attacks.search import Budget
    from unsilent.workloads.registry import load

    check_attack(options.attack)
    objective = diva(options.loss, options.c, options.temperature)
    budget = Budget(
        read_fraction(options.eps),
        options.steps,
        random_start=options.random_start,
        restarts=options.restarts,
        seed=options.seed,
    )
    workload = load(options.workload, dict(options.options), data=options.data, weights=options.weights)
    return attack_workload(
        workload,
        options.adapter,
        options.attack,
        objective,
        budget,
        name=options.workload,
        samples=options.samples,
        confidence=options.confidence,
    )


COMMAND = Command(
    "attack", EXPLAIN, "unsilent attack digits-cnn int4 --eps 0.1", (AttackOptions,), attack, has_report=True,
)  # fmt: skip
