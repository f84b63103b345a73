"""Signals that end the command line: a closed terminal is an interrupt, as SIGTERM is, unless nohup asks to ignore it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
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


@pytest.mark.slow
def test_a_swallowed_interrupt_is_raised_again(monkeypatch, capsys):
    """In a destructor Python prints and forgets it."""

    class Interrupted:
        def __del__(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    signals.repeat_swallowed_interrupts()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5 if Interrupted() else 0)
    assert capsys.readouterr().err == ""


def test_an_error_that_an_interrupt_led_to_is_an_interrupt(monkeypatch):
    """As of numpy, whose extension modules import others."""

    def interrupted(arguments):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("numpy.core.multiarray failed to import") from None

    monkeypatch.setattr("unsilent.cli.main.make_app", interrupted)
    done = in_process("workloads")
    assert (done.returncode, done.stderr) == (130, "unsilent: interrupted\n")


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_the_end_of_the_interpreter_is_silent(before):
    usual = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, before)
        signals.end_silently_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is (signal.SIG_DFL if before is not signal.SIG_IGN else before)
    finally:
        signal.signal(signal.SIGINT, usual)


def test_an_interrupt_while_the_command_is_imported(monkeypatch, capsys):
    from unsilent import __main__ as program

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("unsilent.cli.main.main", interrupted)
    with pytest.raises(SystemExit, match="130"):
        program.main()
    assert capsys.readouterr().err == "unsilent: interrupted\n"


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
