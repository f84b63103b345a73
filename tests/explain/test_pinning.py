"""What is pinned gives the same in each process, what is not goes on as ever; each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unsilent.explain.sources import SOURCES, candidates

READ = """
import datetime, glob, os, pickle, random, secrets, sys, time, uuid
import numpy as np, torch
from unsilent.explain.user_frames import UserFrameFinder
from unsilent.explain.pinning import SourceInterceptor
sources = SourceInterceptor(sys.argv[2:], int(sys.argv[1]), Frames())
print({
    "torch": (torch.rand(2).tolist(), torch.seed() and torch.rand(1).item()),
    "generator": (g := torch.Generator()) and (g.seed(), torch.rand(1, generator=g).item()),
    "numpy": (np.random.rand(), np.random.default_rng().random()),
    "random": (random.random(), random.Random().random()),
    "clock": (time.time(), time.monotonic_ns(), datetime.datetime.now(), datetime.date.today(), time.strftime("%S%H%d")),
    "entropy": (os.urandom(20), secrets.token_hex(3), uuid.uuid4(), uuid.uuid1(), np.random.RandomState().rand()),
    "process": os.getpid(),
    "listing": (os.listdir("."), sorted(glob.glob("*")) and [e.name for e in os.scandir(".")]),
}[os.environ["READ"]])
"""
CHECK = """
import copy, datetime, os, pickle, random, time
import torch
from unsilent.explain.user_frames import UserFrameFinder
from unsilent.explain.pinning import SourceInterceptor
sources = SourceInterceptor(["clock", "generator", "entropy"], 0, UserFrameFinder())
now = datetime.datetime.now(datetime.UTC)
assert isinstance(now, datetime.datetime) and isinstance(datetime.datetime(2020, 1, 2), datetime.datetime)
assert isinstance(datetime.datetime(2020, 1, 2), datetime.date) and not isinstance(datetime.date(2020, 1, 2), datetime.datetime)
assert pickle.loads(pickle.dumps(now)) == copy.deepcopy(now) == now
assert pickle.loads(pickle.dumps(datetime.date.today())) == datetime.date.today()
class Mine(datetime.datetime):
    pass
assert type(Mine(2020, 1, 2)) is Mine and not isinstance(now, Mine)
assert time.time() < time.time() and time.gmtime(0).tm_year == 1970 and time.strftime("%Y", time.gmtime(0)) == "1970"
assert isinstance(torch.default_generator, torch.Generator) and isinstance(torch.Generator(), torch.Generator)
class Holds:
    clock = time.time
assert Holds().clock() > 0
with os.scandir(".") as entries:
    assert [e.name for e in entries] == sorted(os.listdir("."))
assert {"clock", "listing"} <= sources.sources_read() and "process" not in sources.sources_read()
assert ("time.time" in {call for _, call, _, direct in sources.reads if direct}), sources.reads
"""


def read(folder: Path, source: str, number: int, *pinned: str) -> str:
    for i in range(4):
        (folder / f"{i}.txt").touch()
    words = [sys.executable, "-W", "error", "-c", READ, str(number), *pinned]
    ended = subprocess.run(words, cwd=folder, env={"READ": source}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


ALL = ("torch", "generator", "numpy", "random", "clock", "entropy", "process", "listing")


@pytest.mark.slow
@pytest.mark.parametrize("source", [pytest.param(s, marks=pytest.mark.claim) for s in ALL])
def test_a_source_differs_unless_it_is_pinned(tmp_path: Path, source: str):
    others = [key for key in SOURCES if key != source]
    if source == "numpy":
        others.remove("entropy")  # a generator without a seed asks the system for one
    assert read(tmp_path, source, 0, source) == read(tmp_path, source, 1, source)
    assert read(tmp_path, source, 0, *others) != read(tmp_path, source, 1, *others)


@pytest.mark.slow
def test_what_stands_for_a_clock_or_a_generator_is_taken_for_one(tmp_path: Path):
    (tmp_path / "check.py").write_text(CHECK)
    ended = subprocess.run([sys.executable, "-W", "error", "check.py"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_what_the_runs_never_read_is_not_tried():
    assert candidates("kernel", "", set()) == ["kernels", "threads", "memory"]
    assert candidates("random", "global", {"torch"})[0] == "torch"
    assert candidates("random", "own", set())[0] == "generator"
    assert candidates("data", "", {"clock", "torch"}) == ["clock", "hash", "addresses", "torch", "memory"]
    data = candidates("path", "", {"clock", "random", "memory"})
    assert data == ["clock", "random", "memory", "hash", "addresses"]
    assert all(SOURCES[key].advice for key in data)


@pytest.mark.slow
@pytest.mark.parametrize("pinned", [False, True])
def test_pandas_can_be_imported_where_dates_are_replaced(tmp_path: Path, pinned: bool):
    pytest.importorskip("pandas")
    (tmp_path / "check.py").write_text(
        "from unsilent.explain.clocks import replace_clocks\n"
        f"replace_clocks(lambda source, holder, name, call: call and setattr(holder, name, call), {pinned}, 0)\n"
        "import datetime, pandas\n"
        "assert pandas.Timestamp(datetime.datetime(2020, 1, 2)).year == 2020\n"
    )
    ended = subprocess.run([sys.executable, "check.py"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
