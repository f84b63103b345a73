"""``python -m benchmarks [NAME …] [--device cuda] [--rounds N]``: run benchmarks and print their tables.

``python -m benchmarks explain WORKLOAD``: what the fast engine does for faults in a workload.
"""

from __future__ import annotations

import argparse
import platform
import sys

import torch

from benchmarks import (
    cached_trial,
    determinism,
    device_trials,
    explain,
    faulty_step,
    guard,
    guard_faults,
    plain_trial,
    time_to_answer,
    trial_parts,
)

BENCHMARKS = {
    "plain_trial": plain_trial.main,
    "cached_trial": cached_trial.main,
    "faulty_step": faulty_step.main,
    "determinism": determinism.main,
    "time_to_answer": time_to_answer.main,
    "trial_parts": trial_parts.main,
    "guard": guard.main,
}
PARTS = {
    **cached_trial.PARTS,
    "device_trials": device_trials.main,
    "device_campaigns": device_trials.campaigns,
    "guard_faults": guard_faults.main,
}
"""Parts of ``cached_trial``, and what is meant for a GPU; run only when they are named."""


def main() -> None:
    """Run what was asked, or everything."""
    if sys.argv[1:2] == ["explain"]:
        explain.main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join((*BENCHMARKS, *PARTS))}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, help="default 15 for plain_trial, 5 (some minutes) for the others")
    asked = parser.parse_args()
    known = BENCHMARKS | PARTS
    for name in asked.names:
        if name not in known:
            parser.error(f"no benchmark {name!r}; there are {', '.join(known)}")
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, one thread unless said"
    )
    for name in asked.names or BENCHMARKS:
        known[name](asked.rounds or (15 if name == "plain_trial" else 5), asked.device)


if __name__ == "__main__":
    main()
