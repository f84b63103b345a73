"""The options of ``unsilent plan``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.options import (
    CONFIDENCE,
    EXECUTION_PANEL,
    OUTPUT_PANEL,
    PRECISION_PANEL,
    WORKLOAD_PANEL,
    Option,
    check_confidence,
    check_count,
)
from unsilent.campaigns.options import DATA, WORKLOAD_OPTION
from unsilent.outcomes.pvf_options import UNITS

GRANULARITIES = ("tensor", "rows", "tensor-bits")
MEMORY_PANEL, VALIDATION_PANEL = "Protected memory", "Validation"
DEFAULT_BUDGETS = ("1%", "2%", "5%", "10%", "20%")
_CONFIRMED = "{} of the campaign, if it is not built in. Only with --validate."


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan and of its validation.

    Attributes:
        validation_seed: Seed of the validation; None for the seed of the stored campaign plus 1.
        validation_trials: Number of trials per component; None for about as many trials in total as the store has.
    """

    store: Annotated[Path, Option(
        "The store of a campaign of unsilent pvf, best with --per tensor --strata bits.", MEMORY_PANEL,
        missing_error="no store was named; give the store of a campaign of unsilent pvf --per tensor")]  # fmt: skip
    budget: Annotated[tuple[str, ...], Option(
        "Protected memory: a share of the parameters like 5%, or a size like 64kB. Repeat for more.", MEMORY_PANEL,
        default_text=" ".join(DEFAULT_BUDGETS), unset_value=None, is_repeatable=True)] = DEFAULT_BUDGETS  # fmt: skip
    accelerator: Annotated[str | None, Option(
        "Instead of budgets, the memories of an accelerator (TOML file or name): the plans with the fewest failures for their "
        "latency and energy.",
        MEMORY_PANEL, parser=str)] = None  # fmt: skip
    granularity: Annotated[str, Option(
        "What is protected as a whole: tensor, rows (a block of rows of a tensor, 8 or fewer for each tensor) or tensor-bits "
        "(one class of bits of a tensor).",
        MEMORY_PANEL)] = "tensor"  # fmt: skip
    unit: Annotated[str, Option("Unit in which incorrect outputs are counted: sample or batch.", PRECISION_PANEL)] = (
        "sample"
    )
    confidence: Annotated[float, CONFIDENCE] = 0.95
    fit_per_bit: Annotated[float | None, Option(
        "Raw FIT (failures per 1e9 hours) of one bit of memory; adds the FIT that remains.", OUTPUT_PANEL,
        default_text="that of the campaign's command")] = None  # fmt: skip
    truth: Annotated[Path | None, Option(
        "A store of the same workload, such as an exhaustive one, whose trials the oracle (the best possible plan) uses.",
        PRECISION_PANEL)] = None  # fmt: skip
    validate: Annotated[bool, Option(
        "Run a second campaign with another seed, correct the faults in protected memory, and compare.",
        VALIDATION_PANEL)] = False  # fmt: skip
    validation_trials: Annotated[int | None, Option(
        "Trials per component of the second campaign.", VALIDATION_PANEL,
        default_text="as many in all as the store has")] = None  # fmt: skip
    validation_store: Annotated[Path | None, Option(
        "File that stores the trials of the second campaign.", VALIDATION_PANEL,
        default_text="STORE.validation.sqlite")] = None  # fmt: skip
    validation_seed: Annotated[int | None, Option(
        "Seed of the second campaign.", VALIDATION_PANEL, default_text="that of the store plus 1")] = None  # fmt: skip
    workload: Annotated[str | None, Option(_CONFIRMED.format("The workload"), WORKLOAD_PANEL)] = None
    options: Annotated[tuple[tuple[str, str], ...], WORKLOAD_OPTION] = ()
    data: Annotated[str | None, DATA] = None
    weights: Annotated[str | None, Option(_CONFIRMED.format("The weights file"), WORKLOAD_PANEL)] = None
    jobs: Annotated[int, Option("Number of worker processes.", EXECUTION_PANEL)] = 1

    def __post_init__(self) -> None:
        """Raise ``UsageError`` for invalid values, and for options that would be ignored."""
        if self.granularity not in GRANULARITIES:
            raise unknown_name_error("--granularity", self.granularity, GRANULARITIES)
        if self.unit not in UNITS:
            raise unknown_name_error("--unit", self.unit, UNITS)
        check_confidence(self.confidence)
        check_count("--jobs", self.jobs, 1, 1024)
        if self.validation_trials is not None:
            check_count("--validation-trials", self.validation_trials, 2, 10**9)
        if len(set(self.budget)) != len(self.budget) or not self.budget:
            raise UsageError(f"--budget is given as {' '.join(self.budget)}; expected each budget once, like 1% 5%")
        ignored = {
            "--validation-trials": self.validation_trials, "--validation-store": self.validation_store,
            "--validation-seed": self.validation_seed,
            "--workload": self.workload, "--with": self.options or None, "--data": self.data, "--weights": self.weights,
        }  # fmt: skip
        given_names = [name for name, value in ignored.items() if value is not None]
        if given_names and not self.validate:
            raise UsageError(
                f"{given_names[0]} is only used with --validate; add --validate, or leave out {', '.join(given_names)}"
            )


@dataclass(frozen=True)
class PlanOutputOptions:
    """Options on where the plan is written."""

    output: Annotated[Path | None, Option(
        "Write the list of protected parameters to this file, .json or .toml.", OUTPUT_PANEL, short_flag="o")] = None  # fmt: skip
    page: Annotated[Path | None, Option(
        "Where to write the HTML page.", OUTPUT_PANEL, default_text="STORE.plan.html")] = None  # fmt: skip
