"""Signals that end the command line: a closed terminal is an interrupt, as SIGTERM is, unless nohup asks to ignore it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import in_process
from unsilent.cli import signals

ENDING = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in ENDING]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_it_interrupts(number):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signals.interrupt_on_ending()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_nohup_is_respected():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.interrupt_on_ending()
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_second_signal_does_not_interrupt_the_tidying(monkeypatch):
    """The kernel and the shell both send SIGHUP when a terminal is closed."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signals.interrupt_on_ending()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)
    later = time.monotonic() + signals.REPEATED_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "words",
    [
        ("export", "s.sqlite", "-o", "out.csv"),
        ("merge", "s.sqlite", "copy.sqlite", "-o", "out.sqlite"),
        ("report", "s.sqlite"),
    ],
    ids=lambda words: words[0],
)
def test_a_closed_terminal_leaves_no_temporary_file(stored, monkeypatch, words):
    """At the worst moment: all is written, and not yet in place."""
    shutil.copy(stored, "copy.sqlite")
    before = set(Path().iterdir())
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signals.interrupt_on_ending()
    monkeypatch.setattr(os, "replace", lambda *paths: os.kill(os.getpid(), signal.SIGHUP))
    done = in_process(*words)
    assert done.returncode == 130
    assert done.stderr == "unsilent: interrupted\n"
    assert set(Path().iterdir()) == before
