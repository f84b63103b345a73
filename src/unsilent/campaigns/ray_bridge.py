"""The process that talks to Ray and relays messages between the driver and the actors on the cluster.

It is started as ``python -m unsilent.campaigns.ray_bridge FD``.

Ray takes control of the process that joins a cluster: it prints on stdout, replaces signal handlers and ends the process when
the head node is lost. None of this may happen in the process that writes a store, so a separate process joins the cluster.

Driver to bridge: ``("start", Cluster, Job, folder of a local Ray)``, ``("hire", number, cpus)``,
``("give", number, trials, asked)``, ``("drop", number)``, ``("look",)``. Bridge to driver: ``("connected",)``,
``("news", number, events, cpu, our cpu)``,
``("gone", number, why, unfit)``, ``("seen", nodes)``, ``("failed", error)``. Trials and events are pickled lists that are not
unpickled here. The bridge ends when the driver closes the connection.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.campaigns.process_connection import Message, ProcessConnection
from unsilent.campaigns.ray_launch import Cluster, remove_busy_folder
from unsilent.campaigns.ray_supervisor import CLOSE_SECONDS, Supervisor, SupervisorJob
from unsilent.campaigns.worker import as_picklable_error

LOOK_SECONDS = 0.05
"""Seconds within which a command of the driver is noticed while answers are awaited."""
PAUSE, PAUSE_EACH, LONGEST_PAUSE = 0.2, 0.002, 1.0
"""Seconds between two calls to one actor: least, per number of actors, and most, which is less than its queued work."""
SILENCE = 60.0
"""Seconds without an answer after which an actor counts as lost. It answers after every pause, even while trials run."""
STANDSTILL = 5.0
OBJECT_STORE = 80 * 2**20
"""Bytes, Ray's minimum. Many rows at once are transferred through it."""
ENDING_SECONDS = 20.0


@dataclass(eq=False)
class _Member:
    """An actor, with its open call and the trials and requests for the next call."""

    number: int
    handle: Any
    call: Any = None
    since: float = 0.0
    answered: bool = False
    trials: list[bytes] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


class Bridge:
    """Starts supervisors on the cluster and keeps one call open to each."""

    def __init__(self, line: ProcessConnection, cluster: Cluster, job: SupervisorJob) -> None:
        self._line, self._cluster, self._job = line, cluster, job
        self._crew: dict[int, _Member] = {}
        self._looked = time.monotonic()

    def serve(self) -> None:
        """Relay messages until the driver is gone, then raise ``EOFError``."""
        while True:
            message = self._line.receive(0.0 if self._crew else 1.0)
            while message is not None:
                self._obey(message)
                message = self._line.receive(0.0)
            self._relay()

    def _obey(self, message: Message) -> None:
        kind = message[0]
        if kind == "hire":
            self._hire(message[1], message[2])
        elif kind == "give" and message[1] in self._crew:  # otherwise it is lost, which the driver already knows
            member = self._crew[message[1]]
            member.trials.append(message[2])
            member.asked += message[3]
        elif kind == "drop" and message[1] in self._crew:
            self.end_actors(message[1])
        elif kind == "look":
            self._line.send("seen", _nodes())

    def _hire(self, number: int, cpus: int) -> None:
        import ray

        room = max((int(node["CPU"] // cpus) for node in _nodes()), default=1)
        sharers = max(1, min(self._job.worker_settings.jobs, room))  # of one node's memory
        job = replace(self._job, worker_settings=replace(self._job.worker_settings, jobs=sharers))
        actor: Any = ray.remote(Supervisor)
        handle = actor.options(
            num_cpus=cpus,
            num_gpus=1 if self._job.spec.device.startswith("cuda") else 0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        ).remote(job)
        self._crew[number] = member = _Member(number, handle)
        self._call(member)

    def _call(self, member: _Member) -> None:
        pause = min(LONGEST_PAUSE, max(PAUSE, PAUSE_EACH * len(self._crew)))
        member.call = member.handle.exchange.remote(member.trials, member.asked, pause)
        member.trials, member.asked, member.since = [], [], time.monotonic()

    def _relay(self) -> None:
        """Forward the answers of actors to the driver, and call the actors again."""
        import ray

        open_calls = {member.call: member for member in self._crew.values()}
        if not open_calls:
            return
        ready, _ = ray.wait(list(open_calls), num_returns=1, timeout=LOOK_SECONDS)
        if ready:
            ready, _ = ray.wait(list(open_calls), num_returns=len(open_calls), timeout=0)
        for call in ready:
            self._answer(open_calls.pop(call))
        self._give_up_silent(list(open_calls.values()))

    def _give_up_silent(self, members: list[_Member]) -> None:
        now, before = time.monotonic(), self._looked
        self._looked = now
        for member in members:
            if now - before > STANDSTILL:
                member.since += now - before  # this process was stopped
            elif member.answered and now - member.since > SILENCE:
                self._lose(member, f"the worker has not answered for {SILENCE:.0f} s")

    def _answer(self, member: _Member) -> None:
        import ray

        try:
            events, cpu = ray.get(member.call)
        except ray.exceptions.RayTaskError:
            raise  # a defect of this program
        except ray.exceptions.RayError as error:
            unfit = bool(getattr(error, "_actor_init_failed", False))
            self._lose(member, _why(error, unfit), unfit)
            return
        member.answered = True
        self._line.send("news", member.number, events, cpu, time.process_time())
        self._call(member)

    def _lose(self, member: _Member, why: str, unfit: bool = False) -> None:
        import ray

        del self._crew[member.number]
        ray.kill(member.handle)  # it may still run somewhere, and nothing reads its messages any more
        self._line.send("gone", member.number, why, unfit)

    def end_actors(self, number: int | None = None) -> None:
        """End one actor, or all of them if ``number`` is None, with their workers and all that these have started."""
        import ray

        numbers = list(self._crew) if number is None else [number]
        members = [self._crew.pop(each) for each in numbers]
        closing = [member.handle.close.remote() for member in members if member.answered]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS + 1)
        for member in members:
            ray.kill(member.handle)


def _nodes() -> list[dict[str, Any]]:
    """Address and number of CPUs of each node that is alive."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return [{"node": n["NodeManagerAddress"], "CPU": n["Resources"].get("CPU", 0.0)} for n in alive]


def _why(error: Exception, unfit: bool) -> str:
    """A short reason taken from an error of Ray."""
    if unfit:
        return str(error).strip().splitlines()[-1].strip()
    match = re.search(r"The actor is dead because ([^.\n]+)", str(error))
    return match[1].strip() if match else "the worker cannot be reached"


@contextmanager
def join_cluster(cluster: Cluster, folder: str | None) -> Iterator[None]:
    """Join a cluster for the duration of a ``with`` block.

    With a ``folder``, a new cluster on this machine, which ends with the block.
    """
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL"}
    try:
        if folder is None:
            ray.init(address=cluster.address, **quiet)
        else:
            ray.init(
                address="local",
                num_cpus=cluster.cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE,
                _temp_dir=os.path.join(folder, "r"),
                # As with other executors, the kernel ends the process that uses too much memory, which is the worker.
                _system_config={"memory_monitor_refresh_ms": 0},
                **quiet,
            )
        yield
    finally:
        ray.shutdown()
        if folder is not None:
            remove_busy_folder(folder)  # the driver also does this, unless it was killed


def _serve(line: ProcessConnection) -> None:
    message = line.receive(ENDING_SECONDS)
    assert message is not None
    _, cluster, job, folder = message
    with ExitStack() as stack:
        with user_error_on_join(cluster):
            stack.enter_context(join_cluster(cluster, folder))
        line.send("connected")
        bridge = Bridge(line, cluster, job)
        try:
            bridge.serve()
        finally:
            threading.Thread(target=_end_at_last, daemon=True).start()
            bridge.end_actors()


@contextmanager
def user_error_on_join(cluster: Cluster) -> Iterator[None]:
    """Convert errors of joining the cluster in a ``with`` block to ``UsageError``."""
    try:
        yield
    except (ConnectionError, RuntimeError, ValueError, ImportError) as error:
        raise UsageError(_refusal(cluster, error)) from None


def _refusal(cluster: Cluster, error: BaseException) -> str:
    said, cause = "", error.__cause__
    while cause is not None:  # they contain what Ray's last line lacks
        said += f"{cause}\n"
        cause = cause.__cause__
    if cluster.address is None:
        return f"cannot start Ray on this machine: {' '.join(str(error).split())}"
    if "token" in said.lower():
        advice = "the cluster requires another token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    elif "ray[client]" in str(error):
        advice = "a ray:// address needs an optional package; run: pip install 'ray[client]', or give the head node's host:port"
    else:
        advice = " ".join(str(error).split())
    return f"cannot join the Ray cluster at {cluster.address}: {advice}"


def _end_at_last() -> None:
    """Kill this process group after a while, in case Ray does not end by itself."""
    time.sleep(ENDING_SECONDS)
    os.killpg(0, signal.SIGKILL)


def main(fd: int) -> None:
    """Serve one driver until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides
    os.set_inheritable(fd, False)
    line = ProcessConnection(fd)
    try:
        _serve(line)
    except EOFError:
        pass  # the driver has closed the connection, or has ended
    except BaseException as error:
        line.send("failed", as_picklable_error(error))
    line.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
