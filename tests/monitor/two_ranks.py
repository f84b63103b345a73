"""Two gloo ranks of a script beside this file, started by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_two_ranks(script: str, folder: Path, seconds: float = 300) -> str:
    """What the ranks said on stderr; the script gets the folder, and has to end without an error."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *words, str(Path(__file__).parent / script), str(folder)],
        capture_output=True, text=True, timeout=seconds, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr
