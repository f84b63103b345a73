"""What is asked of campaigns of ``unsilent pvf`` beside their spec, and how the spec is made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unsilent.campaigns.options import SHARD, Budget
from unsilent.errors import UsageError
from unsilent.options import PRECISION, Asked, Option
from unsilent.studies.pvf.spec import LISTED, CampaignSpec

if TYPE_CHECKING:
    from unsilent.studies.pvf.precision import Precision

EACH, MOST = 1000, 200_000
"""Trials per target and number of flips: of a campaign that is planned at once, and at most where a precision is asked."""
OF_DRAWN = ("trials", "ci", "rel", "strata", "exhaustive", "one_batch", "flips", "fault", "at", "law")
"""Options that mean nothing where faults are given."""


@dataclass(frozen=True)
class PvfBudget:
    """How many trials: a number, or until every row is precise."""

    trials: Annotated[int | None, Option(
        "Trials per target and number of flips; with --ci or --rel the most there may be.", PRECISION,
        usual="1000; 200000 with --ci or --rel")] = None  # fmt: skip
    ci: Annotated[str | None, Option(
        "Run until every row's interval has this half-width, like 0.1%.", PRECISION, read=str)] = None  # fmt: skip
    rel: Annotated[str | None, Option(
        "The same relative to the estimate, like 20%; --ci (default 0.02%) is always enough.", PRECISION,
        read=str)] = None  # fmt: skip
    shard: Annotated[tuple[int, int], SHARD] = (1, 1)

    @property
    def precision(self) -> Precision | None:
        """What is asked of every row; raises ``UsageError``."""
        from unsilent.studies.pvf.precision import Precision

        return Precision.parse(self.ci, self.rel)

    def resolve(self) -> Budget:
        """The most trials there are to be; raises ``UsageError``."""
        most = EACH if self.precision is None else MOST
        return Budget(most if self.trials is None else self.trials, self.shard)


def resolve(asked: Asked) -> CampaignSpec:
    """A checked spec: fault model and flips are read together, texts are made canonical.

    Raises ``UsageError`` for what would be ignored, and where flips are given both here and in the fault model, are repeated or
    below 1.
    """
    from unsilent.faults import fault_model

    adaptive = asked.make(PvfBudget).precision is not None
    if asked["faults"] is not None:
        asked.refuse(OF_DRAWN, "--faults says which faults are tried, each once")
    elif asked["faults_as"] is not None:
        raise UsageError(
            f"--faults-as {asked['faults_as']} says how a list is read; give --faults FILE, or leave it out"
        )
    if asked["exhaustive"]:
        asked.refuse(("trials", "ci", "rel"), "--exhaustive runs every fault there is")
    if adaptive:
        asked.refuse(("shard",), "where --ci or --rel stop is decided from all trials")
    if asked["threads"] < 1:
        raise UsageError(f"--threads is {asked['threads']}; expected 1 or more")
    device = _device(asked["device"])
    if device != "cpu":
        asked.given["device"] = device  # a command for another machine has to name it
    spec = asked.make(CampaignSpec)
    if spec.faults is not None:
        from unsilent.faults.lists import kind_of_list

        at = (f"{kind_of_list(spec.faults, spec.faults_as)}:*",)
        return replace(spec, device=device, fault=LISTED, law=LISTED, flips=(None,), at=at)
    model = fault_model(spec.fault)
    flips = _flips(asked["flips"], model.counted, model.pattern.text)
    strata = asked["strata"]
    if strata is None:
        single = model.text == "bitflip" and flips == (1,) and spec.per != "bit"
        strata = "dtype" if spec.exhaustive else "bits" if adaptive and single else "none"
    return replace(spec, device=device, fault=model.text, flips=flips, strata=strata)


def _flips(asked: tuple[int, ...] | None, counted: bool, pattern: str) -> tuple[int | None, ...]:
    """Faults per trial, where the fault model says how many (``counted``, by its pattern) or does not."""
    if asked is None:
        return (None,) if counted else (1,)
    if counted:
        raise UsageError(f"--flips and the {pattern} of --fault both say how many; give one of them")
    if any(count < 1 for count in asked):
        raise UsageError(f"--flips has {min(asked)}; expected 1 or more")
    if len(set(asked)) != len(asked) or not asked:
        raise UsageError(f"--flips is {','.join(map(str, asked))!r}; expected different numbers, like 1,8,128")
    return asked


def _device(device: str) -> str:
    """``auto`` is decided without torch where that is possible: without a CUDA driver it is the CPU."""
    if device == "cpu" or (device == "auto" and not Path("/proc/driver/nvidia/version").exists()):
        return "cpu"
    from unsilent.engine.placement import resolve_device

    return resolve_device(device)
