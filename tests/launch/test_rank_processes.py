"""Which devices ranks see, and that nothing that was started here outlives the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from unsilent.basics.errors import UsageError
from unsilent.launch.rank_processes import GPUS, check_slots, slots_environment

HEED = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
"""Tests that run in the background ignore the signal, and so would what they start."""
SCRIPT = """
import os, pathlib, time
pathlib.Path(f"rank{os.environ['LOCAL_RANK']}").write_text(f"{os.getpid()} {os.environ['UNSILENT_SLOT']}")
time.sleep(300)
"""


@pytest.mark.parametrize(
    ("given", "slots", "seen"),
    [
        (None, [0, 2], "0,2"),
        ("", [0, 2], ""),
        ("4,5,GPU-6a", [2, 0], "GPU-6a,4"),
    ],
)
def test_ranks_see_the_gpus_of_their_slots(given, slots, seen):
    environment = {} if given is None else {GPUS: given}
    assert slots_environment(slots, environment).get(GPUS) == seen


def test_fewer_visible_gpus_than_slots_are_refused():
    check_slots(3, {})
    check_slots(3, {GPUS: ""})
    check_slots(3, {GPUS: "1,2,3"})
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES lists 2, but --nproc and --spare ask for 3 devices"):
        check_slots(3, {GPUS: "1,2"})


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_ranks_end_with_the_command(tmp_path, number, code):
    (tmp_path / "wait.py").write_text(SCRIPT)
    words = ["--isolate", "--nproc", "2", "--checkpoints", "c", "--events", "e.jsonl", "--on-alarm", "stop", "wait.py"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "unsilent", "run", *words], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE, text=True, preexec_fn=HEED,
    )  # fmt: skip
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    wait_for(lambda: all(one.exists() and one.read_text() for one in files))
    ranks = [one.read_text().split() for one in files]
    assert [slot for _, slot in ranks] == ["0", "1"]
    assert all(is_running(pid) for pid, _ in ranks)
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert "Traceback" not in err
    wait_for(lambda: not any(is_running(pid) for pid, _ in ranks), 15)
