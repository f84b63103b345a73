"""What the fast engine gains over plain trials, beside peers and beside what is possible; where it might lose; what it holds.

Run: ``python -m benchmarks cached_trial [--device cuda] [--rounds N]``; the parts have names of their own.
"""

from __future__ import annotations

import torch

from benchmarks import linearity, memory, site_classes, speedup
from benchmarks.subjects import SUBJECTS


def speedups(rounds: int, device: str) -> None:
    """Print the tables of speedups."""
    torch.set_num_threads(1)
    for subject in SUBJECTS.values():
        speedup.measure(subject, rounds, device)


PARTS = {
    "speedups": speedups,
    "site_classes": site_classes.main,
    "linearity": linearity.main,
    "held_memory": memory.main,
}


def main(rounds: int, device: str) -> None:
    """All parts."""
    for part in PARTS.values():
        part(rounds, device)
