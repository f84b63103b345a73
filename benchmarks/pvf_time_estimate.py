"""How well ``unsilent pvf`` with ``--ci`` or ``--rel`` tells its end after the pilot, in 30 short campaigns.

For each campaign: what the message after the pilot said, as a user reads it, and what happened. *Left* is the time from that
message to the result. *Whole* is the time from the call to the result; expected: the time to the message and what is left by it.
``load`` is the machine's average number of running processes in the last minute, at the message and at the end: where others
run, a campaign gets a part of the processor that nobody can foresee.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unsilent.campaigns.observer import Observer
from unsilent.studies.pvf.study import pvf

WITHIN = 1.5
Request = tuple[str, Mapping[str, Any]]
CASES: tuple[Request, ...] = (
    *(("digits-cnn", {"rel": "40%", "seed": seed}) for seed in (0, 1, 2)),
    *(("digits-cnn", {"rel": "30%", "per": "layer", "seed": seed}) for seed in (3, 4)),
    *(("digits-cnn", {"ci": "1%", "seed": seed}) for seed in (5, 6)),
    *(("digits-cnn", {"ci": "0.3%", "seed": seed}) for seed in (7, 8)),
    *(("digits-cnn", {"rel": "model=25%", "seed": seed}) for seed in (9, 10)),
    *(("digits-cnn", {"ci": "3%", "samples": "all", "seed": seed}) for seed in (11,)),
    *(("digits-cnn", {"rel": "30%", "at": ("head.*",), "seed": seed}) for seed in (12, 13)),
    *(("digits-cnn", {"ci": "2%", "flips": (1, 8), "seed": seed}) for seed in (14,)),
    *(("dlrm", {"ci": "1%", "seed": seed}) for seed in (0, 1)),
    *(("dlrm", {"ci": "0.5%", "seed": seed}) for seed in (2, 3)),
    *(("dlrm", {"rel": "50%", "seed": seed}) for seed in (4, 5)),
    *(("dlrm", {"ci": "1%", "strata": "none", "seed": seed}) for seed in (6,)),
    *(("digits-mobilenet", {"ci": "2%", "seed": seed}) for seed in (0, 1)),
    *(("digits-mobilenet", {"rel": "40%", "seed": seed}) for seed in (2, 3)),
    *(("digits-vit", {"ci": "2%", "seed": seed}) for seed in (0, 1)),
    *(("digits-vit", {"ci": "1%", "seed": seed}) for seed in (2, 3)),
)
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0}


@dataclass
class Watch(Observer):
    """Reads the first message about the end."""

    begun: float
    told_at: float = 0.0
    trials: int = 0
    seconds: float = 0.0
    load: float = 0.0

    def say(self, sentence: str) -> None:
        found = re.search(r"the end is expected after ([\d,]+) trials .*, in about ([\d.,]+) (s|min|h|days) ", sentence)
        if found and not self.told_at:
            self.told_at, self.load = time.monotonic() - self.begun, os.getloadavg()[0]
            self.trials, self.seconds = (
                int(found[1].replace(",", "")),
                float(found[2].replace(",", "")) * SECONDS[found[3]],
            )


def factor(expected: float, real: float) -> float:
    """How many times one is the other, 1 or more."""
    return max(expected / real, real / expected)


def main() -> None:
    """Run them, and print a row of Markdown for each."""
    print("| campaign | seed | trials expected | ran | left expected, s | was | whole expected, s | was | load |")
    print("|---|---|---|---|---|---|---|---|---|")
    inside = {"trials": 0, "left": 0, "whole": 0}
    for number, (workload, request) in enumerate(CASES, 1):
        begun = time.monotonic()
        watch = Watch(begun)
        result = pvf(workload, observer=watch, jobs=1, **request)
        whole = time.monotonic() - begun
        left, ran = whole - watch.told_at, result.trials_done
        pairs = {
            "trials": (watch.trials, ran),
            "left": (watch.seconds, left),
            "whole": (watch.told_at + watch.seconds, whole),
        }
        for name, pair in pairs.items():
            inside[name] += factor(*pair) <= WITHIN
        words = " ".join(f"{k}={v}" for k, v in request.items() if k != "seed")
        times = " | ".join(f"{expected:.1f} | {real:.1f}" for expected, real in list(pairs.values())[1:])
        load = f"{watch.load:.1f}, {os.getloadavg()[0]:.1f}"
        print(
            f"| {workload} {words} | {request['seed']} | {watch.trials:,} | {ran:,} | {times} | {load} |",
            flush=True,
        )
        print(f"{number} of {len(CASES)}", file=sys.stderr)
    print(f"\nWithin a factor of {WITHIN}, of {len(CASES)}: " + ", ".join(f"{name} {n}" for name, n in inside.items()))


if __name__ == "__main__":
    main()
