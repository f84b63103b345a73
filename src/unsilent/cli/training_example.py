"""``unsilent training-example CLASS``: show a stored fault and its effect on a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from unsilent.basics.options import Option, Request
from unsilent.command import MEASURE, Command, Result

NO_CLASS = "no class of outcomes was named; give one like low-test"


@dataclass(frozen=True)
class ExampleOptions:
    """Options of ``unsilent training-example``."""

    outcome_class: Annotated[str, Option(
        "Class of outcomes: masked, immediate-nan, short-term-nan, slow-degrade, sharp-degrade, sharp-slow-degrade or low-test.",
        "", "class", metavar="CLASS", missing_error=NO_CLASS)]  # fmt: skip


def training_example(request: Request) -> Result:
    """Show a training with and without one fault that ends in a given outcome class.

    Runs a short built-in training twice, in less than a minute, and reports losses and held-out accuracy of both runs. The fault
    is stored with this package, and so is the class that it ended in; on another CPU it can end in another class.
    """
    from unsilent.studies.training.example import run_example

    return run_example(request[ExampleOptions].outcome_class, request.observer and request.observer.loading)


COMMAND = Command(
    "training-example", MEASURE, "unsilent training-example low-test", (ExampleOptions,), training_example,
    has_report=True, is_long=True,
)  # fmt: skip
