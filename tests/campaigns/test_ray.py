"""Campaigns on Ray: the same store as anywhere, and lost actors, nodes and clusters cost time alone. Real clusters and kills."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import TINY, command, unsilent_cli
from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.campaigns import TrialId, ray_bridge, ray_launch, ray_supervisor_pool
from unsilent.campaigns.executors import make_executor
from unsilent.campaigns.export import canonical_lines
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.ray_launch import Cluster
from unsilent.cli.main import run
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.pvf.spec import PvfSpec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

RAGGED = (
    TINY
    + """

def by_node():
    \"\"\"Other weights where the environment says so.\"\"\"
    model = Tiny().eval()
    with torch.no_grad():
        model.last.bias += float(os.environ.get("ODD", "0"))
    return unsilent.Workload(model, batches(), name="by_node")
"""
)
ASK = ("digits-cnn", "--with", "eval=128", "--engine", "plain", "--trials", 120, "--plain")
TRIALS = 480
"""Some seconds of them."""


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def canonical(path: str | Path) -> str:
    with PvfStore(path) as store:
        return "\n".join(canonical_lines(store))


def stored(path: str) -> int:
    """Trials in a store that is being written."""
    with contextlib.suppress(Exception), PvfStore(path) as store:
        return len(store.stored_trial_ids())
    return 0


def processes(name: str) -> dict[int, int]:
    """Processes whose command begins so, and their parents."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout.splitlines()[1:]
    rows = [line.split(None, 2) for line in found]
    return {int(pid): int(parent) for pid, parent, args in rows if args.startswith(name)}


def supervisors(cluster: Nodes) -> dict[int, int]:
    """Workers on this cluster and their parents; others may run beside it on this machine."""
    ours = set().union(*(descendants(node.pid) for node in cluster.nodes))
    return {pid: parent for pid, parent in processes("ray::Supervisor").items() if pid in ours}


def descendants(pid: int) -> set[int]:
    parents = processes("")
    found = {pid}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ragged.py").write_text(RAGGED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Canonical export of an undisturbed serial run."""
    store = tmp_path_factory.mktemp("whole") / "whole.sqlite"
    done = unsilent_cli("pvf", *ASK, "--executor", "serial", "--store", store)
    assert done.returncode == 0, done.stderr
    return canonical(store)


class Nodes:
    """A cluster on this machine, as an administrator would start it: ``ray start`` and a token; two nodes that work."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"{socket.gethostbyname('localhost')}:{port}"
        self.tokens = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._folder, self._port = folder, port
        self._started: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        """One node after the other: Ray's own start-up is in its way where two begin at once."""
        self.head = self.start(
            "--head", f"--port={self._port}", f"--temp-dir={self._folder}", "--include-dashboard=false", "--num-cpus=0"
        )
        self.nodes = [self.start(), self.start(ODD="1")]

    def start(self, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        """A node, not in the driver's folder; of one CPU where nothing else is said."""
        words = words or (f"--address={self.address}", "--num-cpus=1")
        node = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--block",
             "--disable-usage-stats", "--object-store-memory=80000000"],
            env={**os.environ, **self.tokens, **variables},
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._started.append(node)
        assert node.stdout is not None
        said = b""
        while b"Ray runtime started" not in said:
            line = node.stdout.readline()
            assert line, said.decode()
            said += line
        return node

    def stop(self, node: subprocess.Popen[bytes]) -> None:
        """Like a cut power cord."""
        for pid in [node.pid, *descendants(node.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()
        assert node.stdout is not None
        node.stdout.close()
        self._started.remove(node)

    @property
    def running(self) -> bool:
        return bool(self._started)

    def stop_all(self) -> None:
        for node in reversed(list(self._started)):
            self.stop(node)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    path = Path("/tmp") / f"ray-{secrets.token_hex(4)}"  # Ray's sockets need a short path
    path.mkdir()
    nodes = Nodes(path)
    try:
        yield nodes
    finally:
        nodes.stop_all()
        shutil.rmtree(path)


@pytest.fixture
def cluster(nodes: Nodes) -> Nodes:
    """One for all tests, begun again after the one that ends it."""
    if not nodes.running:
        nodes.begin()
    return nodes


@pytest.fixture
def member(cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """The cluster, with its token in the environment."""
    for key, value in cluster.tokens.items():
        monkeypatch.setenv(key, value)
    return cluster


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Begins the command line in a process that does not outlive the test."""
    begun: list[subprocess.Popen[str]] = []

    def begin(*words: object, **kwargs: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(*words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            **kwargs,
        )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        process.kill()
        if not (process.stdout and process.stdout.closed):
            process.communicate()


@pytest.mark.claim
def test_serial_processes_and_ray_give_the_same_store(folder, whole):
    for name in ("processes", "ray"):
        done = unsilent_cli(
            "pvf", *ASK, "--executor", name, "--jobs", 2, "--store", f"{name}.sqlite", "--json", "--quiet"
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert json.loads(done.stdout)["results"]
        assert canonical(f"{name}.sqlite") == whole
    assert whole.count("\n") == TRIALS


@pytest.mark.claim
def test_a_killed_actor_and_an_interrupt_lose_nothing(folder, member, whole, start):
    ask = ("pvf", *ASK, "--store", "s.sqlite", "--json")
    process = start(*ask, "--ray", member.address)
    wait_until(lambda: stored("s.sqlite") > 10)
    (actor,) = supervisors(member)
    os.kill(actor, signal.SIGKILL)
    wait_until(lambda: stored("s.sqlite") > 21)  # the tenth trial of the next worker
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=180)
    assert process.returncode == 130
    assert "was lost (its worker process has died);" in said
    assert said.strip().endswith("run the same command again to continue")
    assert out == ""
    assert 21 < stored("s.sqlite") < TRIALS
    done = unsilent_cli(*ask, "--executor", "serial")  # what one executor has begun another may finish
    assert done.returncode == 0, done.stderr
    assert canonical("s.sqlite") == whole


class Listening(Observer):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)


@pytest.mark.claim
def test_a_node_with_another_fingerprint_is_refused(folder, member):
    observer = Listening()
    spec = PvfSpec("ragged.py:by_node")
    with make_executor("ray", PVF.runner, spec, jobs=2, observer=observer, address=member.address) as executor:
        target = executor.establish_baseline().targets[0].name
        until_said = itertools.takewhile(
            lambda trial: not observer.said, (TrialId(target, 1, k) for k in itertools.count())
        )
        rows = [row for batch in executor.run(until_said) for row in batch]
        more = [TrialId(target, 2, k) for k in range(50)]
        rows += [row for batch in executor.run(more) for row in batch]
    assert observer.said == [
        f"node {socket.gethostname()} does not reproduce the golden run of the first worker (weights, golden differ): "
        "the campaign continues without this worker"
    ]
    assert sorted(r.trial.k for r in rows if r.trial.flips == 1) == list(range(len(rows) - 50))
    assert {r.worker for r in rows} == {0}


def test_no_room_is_said(folder, member, monkeypatch):
    monkeypatch.setattr(ray_supervisor_pool, "PLACEMENT_TIMEOUT", 1.0)
    spec = PvfSpec("ragged.py:make", threads=64)
    with (
        make_executor(None, PVF.runner, spec, address=member.address) as executor,
        pytest.raises(UnsilentError) as refused,
    ):
        executor.establish_baseline()
    assert str(refused.value) == (
        f"no worker could be placed on the Ray cluster at {member.address} for 1 s (3 nodes, the largest with 1 CPUs; "
        "a worker needs 64); stored results are safe: run the same command again when resources are free"
    )


@pytest.mark.claim
def test_a_lost_node_loses_nothing(folder, member, whole, start):
    process = start("pvf", *ASK, "--ray", member.address, "--store", "s.sqlite")
    wait_until(lambda: stored("s.sqlite") > 10)
    (parent,) = supervisors(member).values()
    (busy,) = [node for node in member.nodes if parent in descendants(node.pid)]
    member.stop(busy)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 0, said
    assert "was lost (" in said
    assert "unfinished trials run on other workers" in said
    assert canonical("s.sqlite") == whole


def test_another_token_is_refused(folder, cluster, capsys, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_NUM_REDIS_GET_RETRIES", "1")
    assert run(["pvf", "ragged.py:make", "--ray", cluster.address, "--quiet"]) == 2
    assert capsys.readouterr().err == (
        f"unsilent: error: cannot join the Ray cluster at {cluster.address}: the cluster requires another token; "
        "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH\n"
    )


def test_a_lost_cluster_is_one_line(folder, member, start):
    """It loses its head."""
    process = start(
        "pvf", *ASK, "--trials", 10_000, "--ray", member.address, "--store", "s.sqlite", "--quiet",
        env={**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "1"},
    )  # fmt: skip
    wait_until(lambda: stored("s.sqlite") > 10)
    member.stop(member.head)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 1
    assert said == (
        f"unsilent: error: the connection to the Ray cluster at {member.address} is lost; "
        "stored results are safe: run the same command again when the cluster is back\n"
    )
    assert stored("s.sqlite") > 10
    member.stop_all()


# -- a cluster of our own ------------------------------------------------------------------------------------------


def listening(pids: set[int]) -> set[str]:
    """Addresses on which these processes listen, in the kernel's hexadecimal."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            sockets |= {os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1].partition(":")[0])
    return found


@pytest.mark.claim
def test_a_local_cluster_listens_on_loopback_and_leaves_nothing(folder, monkeypatch, start):
    """Not even when the driver is killed."""
    monkeypatch.setenv("HOME", str(folder))
    before = set(Path("/tmp").glob("unsilent-ray-*"))
    process = start("pvf", *ASK, "--executor", "ray", "--store", "s.sqlite")
    wait_until(lambda: stored("s.sqlite") > 0)
    assert {stat.S_IMODE(path.stat().st_mode) for path in set(Path("/tmp").glob("unsilent-ray-*")) - before} == {0o700}
    ours = descendants(process.pid)
    assert listening(ours) == {"0100007F", "0000000000000000FFFF00000100007F"}
    process.kill()
    process.communicate()
    wait_until(lambda: not any(Path(f"/proc/{p}/exe").exists() for p in ours))
    assert set(Path("/tmp").glob("unsilent-ray-*")) == before
    assert not (folder / ".ray").exists()


@pytest.fixture
def temporary(monkeypatch) -> Iterator[Path]:
    """A folder of our own for temporary files, with a name short enough for the sockets of Ray."""
    path = Path(tempfile.mkdtemp(prefix="u", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield path
    shutil.rmtree(path)


def test_an_interrupt_while_ray_starts_leaves_no_process_and_no_folder(temporary, monkeypatch):
    begun: list[int] = []

    def interrupted(link: ray_launch.BridgeProcess, seconds: float) -> None:
        wait_until(lambda: any(temporary.iterdir()))
        (folder,) = temporary.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        begun.append(link._process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_launch.BridgeProcess, "_join", interrupted)
    with make_executor("ray", PVF.runner, PvfSpec("digits-cnn")) as executor, pytest.raises(KeyboardInterrupt):
        executor.establish_baseline()
    assert not Path(f"/proc/{begun[0]}").exists()
    assert not any(temporary.iterdir())


def test_only_we_can_enter_the_folder_of_ray(temporary, monkeypatch):
    """Ray makes all of its own folders open to everybody; the fake does it as Ray does."""
    asked: list[dict[str, object]] = []

    def init(**words: object) -> None:
        path = Path(str(words["_temp_dir"]))
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
        asked.append(words)

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=init, shutdown=lambda: None))
    with ray_launch.private_folder() as folder, ray_bridge.join_cluster(Cluster(None, 1), folder):
        (outer,) = temporary.iterdir()
        assert stat.S_IMODE(outer.stat().st_mode) == 0o700
        assert outer in Path(str(asked[0]["_temp_dir"])).parents
        longest = f"{asked[0]['_temp_dir']}/session_2026-11-22_13-47-43_955374_4194304/sockets/plasma_store"
        assert len(longest) - len(str(temporary)) + ray_launch.LONGEST_FOLDER < 108
    assert not any(temporary.iterdir())


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ray", "127.0.0.1:1"), "no Ray cluster answers at 127.0.0.1:1 (Connection refused); check the address"),
        (("--ray", "ray://127.0.0.1:1"), "no Ray cluster answers at ray://127.0.0.1:1"),
        (("--ray", "somewhere"), "--ray is 'somewhere'; expected the head node's host:port"),
        (("--ray", "127.0.0.1:99999"), "--ray is '127.0.0.1:99999'; expected the head node's host:port"),
        (("--ray", "127.0.0.1:1", "--executor", "serial"), "--ray 127.0.0.1:1 needs --executor ray"),
    ],
)
def test_a_wrong_address_is_one_line(capsys, folder, words, said):
    start = time.monotonic()
    assert run(["pvf", "ragged.py:make", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"unsilent: error: {said}")
    assert err.count("\n") == 1
    assert time.monotonic() - start < 10


def test_a_listener_that_is_no_cluster(monkeypatch):
    monkeypatch.setattr(ray_launch, "JOIN_SECONDS", 0.5)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with (
            make_executor("ray", PVF.runner, PvfSpec("digits-cnn"), address=address) as executor,
            pytest.raises(UsageError, match="check that a Ray cluster runs at that address"),
        ):
            executor.establish_baseline()


@pytest.mark.skipif(importlib.util.find_spec("grpc") is not None, reason="Ray's own extra is installed")
def test_the_extra_of_ray_itself_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"ray://127.0.0.1:{other.getsockname()[1]}"
        with (
            make_executor("ray", PVF.runner, PvfSpec("digits-cnn"), address=address) as executor,
            pytest.raises(
                UsageError, match="an optional package; run: pip install 'ray.client.', or give the head node's"
            ),
        ):
            executor.establish_baseline()


def test_a_missing_extra_is_one_line(capsys, folder, monkeypatch):
    monkeypatch.setattr(ray_launch, "find_spec", lambda name: None)
    assert run(["pvf", "ragged.py:make", "--executor", "ray"]) == 2
    assert (
        capsys.readouterr().err
        == "unsilent: error: --executor ray needs an optional package; install it with: pip install 'unsilent[ray]'\n"
    )
