"""Damaged checkpoints of every format: read, refused in one line, edited and restored, never anything else.

``python -m benchmarks.fuzz_checkpoints`` runs the same cases in bulk, in processes with limits.
"""

from __future__ import annotations

import os
import time

import pytest

from checkpoints.fuzz_mutations import mutated
from checkpoints.fuzz_seeds import MAKERS, write_seeds
from checkpoints.fuzzing import Fuzzer, install_audit, run_cases
from unsilent.checkpoints.formats.known import FORMATS

SLOW_TO_OPEN = {"HDF5", "Keras"}
"""A process is started for each of these."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    return write_seeds(tmp_path_factory.mktemp("seeds") / "seeds")


@pytest.fixture
def fuzzer(seeds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    install_audit()
    return lambda seed, formats=(): Fuzzer(seeds, tmp_path / "case", seed, formats, shares=not formats)


def test_every_format_has_seeds(seeds):
    assert {known.name for known in FORMATS} == set(MAKERS)
    assert set(seeds) >= {known.name for known in FORMATS} - SLOW_TO_OPEN


def test_sound_checkpoints_pass_every_operation(fuzzer):
    outcomes = fuzzer(0).run_seeds()
    assert {name for name, outcome in outcomes.items() if outcome == "refused"} == {
        "torch.save (legacy)/bomb.pt", "torch.distributed.checkpoint/bomb",
    }  # fmt: skip
    partly = {name for name, outcome in outcomes.items() if outcome == "partly"}
    assert {name for name in partly if not name.startswith(("torch.save (legacy)", "Orbax"))} == {
        "safetensors/packed.safetensors"
    }, "these are not edited"


@pytest.mark.parametrize("format_name", [known.name for known in FORMATS])
def test_damage_is_read_or_refused(format_name, fuzzer, seeds):
    if format_name not in seeds:
        pytest.skip("its library is missing")
    counts, findings = run_cases(fuzzer(5, [format_name]), range(2 if format_name in SLOW_TO_OPEN else 60))
    assert not findings, findings[0]
    assert counts


@pytest.mark.slow
@pytest.mark.parametrize("format_name", [known.name for known in FORMATS])
def test_much_damage_is_read_or_refused(format_name, fuzzer, seeds):
    if format_name not in seeds:
        pytest.skip("its library is missing")
    counts, findings = run_cases(fuzzer(6, [format_name]), range(60 if format_name in SLOW_TO_OPEN else 1000))
    assert not findings, findings[0]
    assert len(counts) > 1, "no damaged file can be read, or all can"


def test_cases_follow_from_their_number(fuzzer, monkeypatch):
    now = time.localtime()
    monkeypatch.setattr(time, "localtime", lambda *_: now)  # archives hold the time of their making

    def case(number):
        made = fuzzer(7)
        format_name, what, path = made.make(number)
        return format_name, what, [p.read_bytes() for p in sorted([path, *path.rglob("*")]) if p.is_file()]

    assert [case(n) for n in range(20)] == [case(n) for n in range(20)]


def test_any_content_can_be_damaged():
    import random

    draw = random.Random(0)
    for content in (b"a", b"PK", b"PK\x03\x04" + bytes(50), b"\x80\x02.", b"{}", bytes(8) + b"{", b'{"a": [1]}'):
        for _ in range(200):
            what, result = mutated(content, b"other", draw)
            assert isinstance(result, bytes), what
