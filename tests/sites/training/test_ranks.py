"""Several real processes under DDP and FSDP2: a fault corrupts one rank, before the reduction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]
WEIGHT = "op:0#addmm.0/grad_wt/out"
FORWARD = "op:2#addmm.0/fwd/out"
PAYLOAD = {"ddp": "comm:all_reduce.0/in", "fsdp": "comm:reduce_scatter_tensor.1/in"}


def run(folder: Path, kind: str, world: int) -> list[dict]:
    script = Path(__file__).parent / "ranks.py"
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world}",
        script,
        kind,
        folder,
        WEIGHT,
        FORWARD,
        PAYLOAD[kind],
    ]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp", 4)])
def test_one_rank_is_corrupted_before_the_reduction(tmp_path, kind, world):
    check(tmp_path, kind, world)


def check(tmp_path, kind, world):
    """Faults of the last rank land there alone; what they change reaches all ranks through the reduction."""
    ranks = run(tmp_path, kind, world)
    golden = ranks[0][""]["gradients"]
    for site in (WEIGHT, FORWARD, PAYLOAD[kind]):
        assert [r[site]["hits"] for r in ranks] == [0] * (world - 1) + [1]
        assert all(r[site]["gradients"] == ranks[0][site]["gradients"] for r in ranks)  # reduced: the same for all
    found = ranks[0][WEIGHT]["gradients"]
    changed = [
        (name, i) for name in golden for i, (a, b) in enumerate(zip(golden[name], found[name], strict=True)) if a != b
    ]
    ((name, element),) = changed
    assert name == "0.weight"
    # one of the ranks' gradients is 1e10, and they are averaged
    assert found[name][element] == pytest.approx(1e10 / world, rel=1e-6)
    assert ranks[0][FORWARD]["gradients"] != golden
    paid = ranks[0][PAYLOAD[kind]]["gradients"]
    assert sum(a != b for name in golden for a, b in zip(golden[name], paid[name], strict=True)) == 1
