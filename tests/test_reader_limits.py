"""Whatever its file holds, a reader reads or refuses it within 10 seconds of CPU time and 1 GiB of memory, in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reader_worst_files import MEMORY, READERS, SECONDS


@pytest.mark.claim
@pytest.mark.parametrize("name", READERS)
def test_no_file_costs_more_than_its_limits(name: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("reader_worst_files.py")
    done = subprocess.run(
        [sys.executable, str(script), name, str(tmp_path)], capture_output=True, text=True, check=False, timeout=1200
    )
    costs = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert len(costs) >= len(READERS[name].shapes), done.stderr
    for shape, said, memory, seconds in costs:
        print(f"{name}, {shape}: {said[:60]!r}, {memory >> 20} MiB, {seconds:.1f} s")
    wrong = [
        cost
        for cost in costs
        if not cost[1].startswith(("read", "refused: ")) or "\n" in cost[1] or cost[2] > MEMORY or cost[3] > SECONDS
    ]
    assert not wrong
