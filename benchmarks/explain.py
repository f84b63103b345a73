"""What the fast engine does for faults in a workload: how much of a run they re-execute, what is held, what runs plainly.

Run: ``python -m benchmarks explain WORKLOAD [--at ADDRESS]…``. Shares are upper bounds, before any fault dies out.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence

import torch

from benchmarks.bound import Bound
from benchmarks.subjects import draw
from unsilent.basics.sizes import human_bytes, parse_bytes
from unsilent.engine.cached import CachedEngine
from unsilent.faults.naming import parse_site
from unsilent.workloads import load


def main(words: Sequence[str]) -> None:
    """Print a line for each layer that has such faults, and one for all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks explain", description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--at", action="append", help="address of the faults, default param:*")
    parser.add_argument("--memory", type=parse_bytes, help="what may be held, like 2GB")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    engine = CachedEngine(load(asked.workload), device=asked.device, memory=asked.memory)
    regions = engine.select_regions(asked.at or ["param:*"])
    bound = Bound(engine, device=asked.device)
    layers = defaultdict(list)
    for region in regions:
        layers[parse_site(region.site).layer].append((region.eligible_count, bound.share(draw((region,), 1)[0])))
    layers["all"] = [part for parts in layers.values() for part in parts]
    print(f"{'layer':40}{'elements':>14}{'% of a run':>12}")
    for name, parts in layers.items():
        elements = sum(size for size, _ in parts)
        print(f"{name:40}{elements:14,}{100 * sum(size * share for size, share in parts) / elements:12.2f}")
    held, wanted = human_bytes(engine.plan.held), human_bytes(engine.plan.unlimited_bytes)
    on_tape = [replayer for replayer in engine.replayers if replayer is not None]
    print(f"{len(on_tape)} of {len(engine.batches)} batches on tape; golden values: {held} held, {wanted} wanted")
    print(f"operations that are computed in blocks of outputs: {sum(len(r.blocks) for r in on_tape)}")
    for batch, reason in engine.fallback_reasons.items():
        print(f"batch {batch} runs plainly: {reason}")
