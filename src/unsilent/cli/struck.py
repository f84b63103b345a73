"""Stored campaigns of struck trainings: shown, set beside each other, and single trials run again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from unsilent.report.text import counted

if TYPE_CHECKING:
    from unsilent.studies.training.study import Example


def is_training(store: Path) -> bool:
    """Whether a file is the store of a training campaign."""
    from unsilent.studies.registered import kind_of
    from unsilent.studies.training.kind import TRAINING

    return kind_of(store) is TRAINING


def replay_training(
    store: Path, trial: str, given: Mapping[str, str | None], named: tuple[tuple[str, str], ...], as_json: bool
) -> int:
    """``unsilent replay`` of one trial; ``given`` and ``named`` (options of the workload): see `named_again`."""
    from unsilent.campaigns.executors import make_executor
    from unsilent.campaigns.named_again import named_again
    from unsilent.campaigns.spec import TrialId
    from unsilent.faults.hardware.reading import SHIPPED
    from unsilent.studies.training.kind import TrainingStore
    from unsilent.studies.training.study import Reading, repeat
    from unsilent.workloads.zoo import TRAININGS

    with TrainingStore(store) as opened:
        opened.row(wanted := TrialId.parse(trial))  # before the training is loaded
        spec = named_again(opened.spec, given, {"workload": TRAININGS, "accelerator": SHIPPED}, named)
        with make_executor("serial", spec) as executor:
            return tell_example(repeat(wanted, executor, opened, Reading()), as_json)


def tell_example(found: Example, as_json: bool) -> int:
    """One instance and its repetition; exit code 1 where that has other bits."""
    row, curve = found.row, found.curve
    how = (
        f"made by hand, after {found.tried - 1} others that ended in another class"
        if curve.made
        else "from the campaign"
    )
    if as_json:
        told = {
            "class": curve.outcome, "trial": curve.trial, "made_by_hand": curve.made, "same_bits": found.same,
            "step": row.struck.step, "site": row.struck.site, "fault_model": row.struck.model, "fault": json.loads(row.faults),
            "written": _number(row.written), "usual": _number(row.usual), "steps_run": row.ran, "reason": row.reason,
            "losses": list(curve.losses), "metric": list(curve.metric), "golden": list(curve.golden), "test": curve.test,
        }  # fmt: skip
        print(json.dumps(told, indent=2))
    else:
        test = "not reached" if curve.test is None else f"{100 * curve.test:.2f} %"
        losses = ", ".join("not finite" if x is None else f"{x:.3g}" for x in curve.losses[:6])
        lines = [
            f"{curve.outcome}: trial {curve.trial} ({how})",
            f"{curve.told}: wrote up to {row.written:.3g} where {row.usual:.3g} was the largest",
            f"losses from that step on: {losses} …; held-out accuracy at the end: {test}",
            f"ended: {row.reason}, after {counted(row.ran, 'step')}{f' ({row.error})' if row.error else ''}",
            "run again: the same bits" if found.same else "run again: OTHER BITS; the training is not repeatable here",
        ]
        print("\n".join(lines))
    return 0 if found.same else 1


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
