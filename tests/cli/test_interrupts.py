"""Ctrl-C at any moment of a command ends it with one line and code 130: no traceback, whatever was running.

A process is one that has loaded the package: before that the interpreter itself answers.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

MOMENTS = 30
MOST_SECONDS = 6.0
"""To the last moment; then trials have run for a while."""
COMMANDS = {
    "pvf": "pvf tiny.py:make --trials 400 --flips 1,8 --jobs 1",
    "coverage": "coverage train-resnet --with steps=30 --with width=4 --only operation:* --follow 3 --trials 2 --clean-runs 1 "
    "--changed-runs 0 --jobs 1",
}
START = "import unsilent.__main__ as program, sys; print('loaded', flush=True); program.main()"
HEED = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
"""Tests that run in the background ignore the signal, and so would what they start."""


def interrupted(command: str, seconds: float | None) -> tuple[int, str, float]:
    """Exit code, stderr and duration of a command that gets SIGINT after so many seconds (None: never)."""
    for store in Path().glob("*.sqlite*"):
        store.unlink()
    words = [sys.executable, "-c", START, *command.split(), "--store", "s.sqlite", "--plain"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdout=pipe, stderr=pipe, text=True, preexec_fn=HEED, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
        begun = time.monotonic()
        if seconds is not None:
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        return process.returncode, err, time.monotonic() - begun


@pytest.mark.claim
@pytest.mark.parametrize("verb", COMMANDS)
def test_no_traceback_at_any_moment(verb, tiny, cache):
    code, err, whole = interrupted(COMMANDS[verb], None)
    assert code == 0, err
    draw = random.Random(verb)
    seen = []
    for number in range(MOMENTS):
        # A third of the moments while modules are imported and the worker is started; the others also while trials run.
        moment = draw.uniform(0, min(1.0 if number % 3 == 0 else MOST_SECONDS, whole))
        code, err, _ = interrupted(COMMANDS[verb], moment)
        seen.append(code)
        assert not re.search("Traceback|Exception ignored|internal error", err), (moment, err)
        assert code in (0, 130, -signal.SIGINT), (moment, code, err)  # the last: while the interpreter ends
        if code == 130:
            assert err.splitlines()[-1].startswith("unsilent: interrupted"), (moment, err)
    assert seen.count(130) > MOMENTS // 2
