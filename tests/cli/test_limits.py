"""Numbers that are too large are refused in one line, before anything is loaded, and nothing unreadable is ever stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

import unsilent
from conftest import TINY, in_process
from unsilent.basics.errors import StoreError, UsageError
from unsilent.basics.options import LARGEST
from unsilent.campaigns.driver import plan_trials
from unsilent.campaigns.options import MOST_PARTS, Budget
from unsilent.campaigns.stored_values import MOST_THREADS, MOST_TRIALS, read_budget
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.spec import PvfBudget

LARGE = [
    ("pvf", "--trials", MOST_TRIALS),
    ("pvf", "--trials", MOST_TRIALS, "--ci", "20%"),
    ("pvf", "--trials", 10**23, "--dry-run"),
    ("pvf", "--threads", MOST_THREADS + 1),
    ("pvf", "--seed", 10**30),
    ("pvf", "--jobs", 10**9),
    ("pvf", "--shard", f"1/{MOST_PARTS + 1}"),
    ("training", "--trials", MOST_TRIALS),
    ("training", "--replicas", 10**9),
    ("training", "--steps", 10**8),
    ("training", "--horizon", 10**8),
    ("training", "--init", 10**30),
    ("noise", "--replicas", 10**9),
    ("noise", "--replicas", 10**30),
    ("noise", "--steps", 10**8),
    ("noise", "--every", 10**8),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limits")
    (folder / "tiny.py").write_text(TINY)
    words = ("tiny.py:make", "--at", "last.bias", "--trials", 2, "--store", "s.sqlite", "--quiet")
    assert in_process("pvf", *words, cwd=folder).returncode == 0
    return folder / "s.sqlite"


@pytest.mark.parametrize("words", LARGE, ids=lambda words: " ".join(map(str, words[:3])))
def test_large_numbers_are_refused(words, tmp_path):
    verb, *rest = words
    done = in_process(verb, "nothing.py:make", *rest, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"error: {words[1]} is " in done.stderr
    assert "expected" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ['threads = "5"', 'confidence = "0.9"', 'shard = ["1", "2"]', f"threads = {10**30}"])
def test_files_of_options_are_held_to_the_same(line, tmp_path):
    (tmp_path / "o.toml").write_text(f"{line}\n")
    done = in_process("pvf", "nothing.py:make", "--config", "o.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"o.toml: {line.split()[0]} is " in done.stderr


def test_python_is_held_to_the_same():
    for trials in ("five", "", 0, 10**12, 10**30, 10**5000):
        with pytest.raises(UsageError, match="trials= is .*; expected"):
            unsilent.pvf("nothing.py:make", trials=trials)
    with pytest.raises(UsageError, match="threads= is 1000000000; expected 1 or more, and at most 4096"):
        unsilent.pvf("nothing.py:make", threads=10**9)


@pytest.mark.parametrize("ci", [None, "20%"])
def test_what_a_budget_allows_can_be_read_again(ci):
    for trials in (1, 1000, MOST_TRIALS - 1, MOST_TRIALS, LARGEST, LARGEST + 1, 10**30, 10**5000):
        try:
            resolved = PvfBudget(trials, ci).resolve()
        except UsageError:
            assert not 1 <= trials < MOST_TRIALS
        else:
            assert read_budget(resolved.trials, "unsilent pvf") == (trials, "unsilent pvf")


@pytest.mark.parametrize(("trials", "command"), [(MOST_TRIALS, "x"), (-1, "x"), (5, "'"), (True, "x")])
def test_a_budget_that_cannot_be_read_is_not_written(store, trials, command):
    with PvfStore(store, write=True) as opened:
        with pytest.raises(StoreError, match="cannot hold this budget: .*; change what is asked"):
            opened.record_budget(trials, command)
        assert opened.largest_budget()[0] == 2


def test_a_campaign_that_cannot_be_read_is_not_written(store, tmp_path):
    with PvfStore(store) as opened:
        spec, baseline = opened.spec, opened.baseline
    with PvfStore(tmp_path / "new.sqlite", write=True) as opened:
        for threads in (0, MOST_THREADS + 1):
            with pytest.raises(
                StoreError, match="cannot hold this campaign: .*number of threads; change what is asked"
            ):
                opened.bind_campaign(replace(spec, threads=threads), baseline)
    assert not list(tmp_path.iterdir())


def test_more_trials_than_a_store_should_hold_are_not_listed(store):
    with PvfStore(store) as opened, pytest.raises(UsageError, match="lower --trials"):
        plan_trials(opened.spec, opened.baseline, Budget(10**9))
