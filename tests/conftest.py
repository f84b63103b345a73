"""Shared by all tests: a tiny workload in a file of its own, and the command line as a real process."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

if hasattr(os, "sched_setaffinity"):
    # Two cores, on any machine: the default of --jobs is then 1, here and in every process that a test starts.
    _cores = sorted(os.sched_getaffinity(0))
    _first = 2 * int("".join(filter(str.isdigit, os.environ.get("PYTEST_XDIST_WORKER", ""))) or 0)
    os.sched_setaffinity(0, {_cores[(_first + i) % len(_cores)] for i in range(2)})

TINY = '''
import os, time
import torch
from torch import nn
import unsilent


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def batches():
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(7, 6, generator=generator) for _ in range(2)]


def make(sleep: float = 0.0):
    def run(model, batch):
        if sleep:
            time.sleep(sleep)
        return model(batch)

    return unsilent.Workload(Tiny().eval(), batches(), run=run, name="tiny")


def corrupted(model):
    return bool((model.last.bias.detach() != Tiny().last.bias).any())


def dies():
    """A workload whose process dies when the last bias is corrupted."""
    def run(model, batch):
        if corrupted(model):
            os.kill(os.getpid(), 9)
        return model(batch)

    return unsilent.Workload(Tiny().eval(), batches(), run=run, name="dies")


def hangs():
    """A workload that never returns when the last bias is corrupted."""
    def run(model, batch):
        while corrupted(model):
            pass
        return model(batch)

    return unsilent.Workload(Tiny().eval(), batches(), run=run, name="hangs")


def raises():
    """A model that raises when the last bias is corrupted."""
    def run(model, batch):
        if corrupted(model):
            raise ArithmeticError("the model itself raises")
        return model(batch)

    return unsilent.Workload(Tiny().eval(), batches(), run=run, name="raises")
'''


CLAIMS = Path(__file__).with_name("claims")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--shuffle SEED``: files, and tests within a file, in another order."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run tests in an order drawn with this seed")


def pytest_configure(config: pytest.Config) -> None:
    """Property tests try few examples in the fast tier, and run again with many in the slow one."""
    examples = 15 if "not slow" in config.getoption("markexpr") else 100
    hypothesis.settings.register_profile(
        "tier", max_examples=examples, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("tier")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Modules and tests stay for the whole run: the garbage collector does not go through their 1.8 million objects again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of ``claims`` are claims; property tests belong to both tiers; shuffled where asked."""
    for item in items:
        if CLAIMS in item.path.parents:
            item.add_marker("claim")
        if hasattr(getattr(item, "obj", None), "hypothesis") and "not slow" not in item.config.getoption("markexpr"):
            item.add_marker("slow")
    if items and (seed := items[0].config.getoption("shuffle")) is not None:
        draw = random.Random(seed)
        of_file = {path: draw.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: (of_file[item.path], draw.random()))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, without importing them, files whose tests the chosen tier has not."""
    wanted = config.getoption("markexpr")
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    if "not slow" in wanted:
        return True if re.search(r"^pytestmark = (\[\s*)?pytest\.mark\.slow", text, re.MULTILINE) else None
    return True if wanted.startswith("slow") and "mark.slow" not in text and "@given" not in text else None


def few(rows: Iterable[Any], *fast: Any, several: bool = False) -> list[Any]:
    """Rows of a parametrized test, of which the fast tier takes these alone; ``several``: each has several parameters."""
    slow = pytest.mark.slow
    return [row if row in fast else pytest.param(*(row if several else (row,)), marks=slow) for row in rows]


def spread(columns: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters (column, values): in the fast tier each column and each value once, in the slow one all pairs."""
    columns, values = list(columns), list(values)
    count = max(len(columns), len(values))
    once: dict[Any, list[Any]] = {column: [] for column in columns}
    for number in range(count):
        once[columns[number % len(columns)]].append(values[number % len(values)])
    fast = [pytest.param(column, own, id=f"{column}-some") for column, own in once.items()]
    return fast + [pytest.param(column, values, id=f"{column}-all", marks=pytest.mark.slow) for column in columns]


@pytest.fixture(scope="session")
def cuda() -> bool:
    """Whether there is a CUDA device; from now on it is ready, whatever the environment says to child processes."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def _without_device(cuda: bool) -> Iterator[None]:
    """Fixtures of a module or session, and their processes, take the CPU."""
    with _hidden_device() if cuda else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _hidden_device() -> Iterator[None]:
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of tests is the CPU, but for those that are marked ``gpu``, which skip without one."""
    if request.node.get_closest_marker("gpu") is None:
        return
    if not cuda:
        pytest.skip("no CUDA device")
    import torch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Threads of several test processes on few cores wait for each other, and do it busily."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder: the one of the environment, else one that all tests of a run share."""
    given = os.environ.get("UNSILENT_CACHE")
    return Path(given) if given else tmp_path_factory.getbasetemp().parent / "cache"


@pytest.fixture(scope="session", autouse=True)
def _one_cache(cache: Path) -> None:
    """Fixtures of a whole module run before those of a test: they are to find the same trained weights."""
    os.environ.setdefault("UNSILENT_CACHE", str(cache))


@pytest.fixture(autouse=True)
def _cache_in_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSILENT_CACHE", str(cache))


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of the tiny workloads, in the current folder."""
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    return "tiny.py"


Made = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Made:
    """``made_once(name, make)``: the folder that ``make(folder)`` filled, once for all test processes; copy before a change."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, finished = base / f"once-{name}", base / f"once-{name}.made"
        with (base / f"once-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not finished.exists():
                folder.mkdir()
                make(folder)
                finished.touch()
        return folder

    return get


def _campaign(folder: Path) -> None:
    (folder / "tiny.py").write_text(TINY)
    words = ("--trials", 40, "--flips", "1,8", "--store", "s.sqlite", "--json")
    done = in_process("pvf", "tiny.py:make", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "printed.json").write_text(done.stdout)


@pytest.fixture(scope="session")
def pvf_campaign(made_once: Made) -> Path:
    """A folder with a campaign of ``unsilent pvf``: tiny.py, s.sqlite, s.html, and what --json printed (printed.json)."""
    return made_once("pvf", _campaign)


@pytest.fixture
def stored(pvf_campaign: Path, tiny: str) -> Path:
    """The store of that campaign and its report, in the current folder."""
    for file in pvf_campaign.glob("s.*"):
        shutil.copy(file, ".")
    return Path("s.sqlite")


def command(*words: object) -> list[str]:
    """``unsilent words…`` with this interpreter."""
    return [sys.executable, "-W", "error", "-m", "unsilent", *map(str, words)]


def unsilent_cli(*words: object, seconds: float = 300, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would and wait for it."""
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=seconds, **kwargs)


@contextlib.contextmanager
def inline_campaigns() -> Iterator[None]:
    """Campaigns of every kind run in this process, which has torch already, instead of in workers."""
    from unsilent.basics.user_code import user_module_name
    from unsilent.campaigns import code, executors
    from unsilent.campaigns.inline import InlineExecutor
    from unsilent.replicas import runner

    def here(job: Any, jobs: int, observer: Any, **rest: Any) -> InlineExecutor:
        return InlineExecutor(job, observer)

    # A workload that a test loaded by itself stays in this process, and would have been loaded anew in another one.
    of_users = user_module_name(Path())
    before = {name for name in sys.modules if not name.startswith(of_users)}
    modules = code._user_modules

    def loaded_since() -> dict[str, Path]:
        return {name: path for name, path in modules().items() if name not in before}

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        stack.callback(lambda: [sys.modules.pop(name) for name in loaded_since()])  # a new process has none of them
        patch.setattr(code, "_user_modules", loaded_since)
        patch.setattr(executors, "ProcessExecutor", here)
        patch.setattr(runner, "SECOND_TWIN", None)  # no process for it alone
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sys, "argv", list(sys.argv))
        yield


def campaign_run(kind: Any, spec: Any, store: Any, executor: Any, command: str = "", **arguments: Any) -> Any:
    """A campaign of an executor that is open already; ``arguments``: those of its Python function."""
    from unsilent.basics.options import Request
    from unsilent.campaigns.campaign_run import CampaignRun

    request = Request.from_call(kind.option_classes, arguments)
    return CampaignRun(
        kind, request, spec, store, command, make_executor=lambda run, observer: contextlib.nullcontext(executor)
    )


def in_process(*words: object, cwd: Path | str = ".", workers: bool = False) -> subprocess.CompletedProcess[str]:
    """The same command line, and its campaigns (but with ``workers``), without the seconds that new interpreters take."""
    from unsilent.cli.main import run

    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.nullcontext() if workers else inline_campaigns(),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", ["unsilent", *map(str, words)])
        code = run(sys.argv[1:])
    return subprocess.CompletedProcess(list(words), code, out.getvalue(), err.getvalue())
