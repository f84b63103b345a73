"""``python -m benchmarks [NAME …] [--device cuda] [--rounds N]``: run benchmarks and print their tables."""

from __future__ import annotations

import argparse
import platform

import torch

from benchmarks import plain_trial

BENCHMARKS = {"plain_trial": plain_trial.main}


def main() -> None:
    """Run what was asked, or everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    for name in asked.names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    print(f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, one thread")
    for name in asked.names or BENCHMARKS:
        BENCHMARKS[name](asked.rounds, asked.device)


if __name__ == "__main__":
    main()
