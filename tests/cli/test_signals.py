"""Signals that end the command line: a closed terminal is an interrupt, as SIGTERM is, unless nohup asks to ignore it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

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
