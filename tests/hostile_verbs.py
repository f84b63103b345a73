"""Sound stores of all three kinds, and every verb that reads one, run in this process under a watchdog."""

from __future__ import annotations

import resource
import shutil
import signal
import sqlite3
import time
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from unittest import mock

import conftest
from campaigns.faulty_loop import Here, running, write_loop
from replicas.subjects import LOOP
from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.campaigns.driver import Budget, run_campaign, run_trials
from unsilent.campaigns.spec import TrialId, campaign_hash
from unsilent.campaigns.stored_values import parse_record
from unsilent.cli import main
from unsilent.replicas import ReplicaSpec, ReplicaStore, Switches
from unsilent.replicas.kind import ReplicaRequest
from unsilent.replicas.noise_floor_records import NoiseFloors, ReplicaDifferences, store_noise_floors
from unsilent.replicas.runner import ReplicaRunner
from unsilent.studies.campaign_kinds import kind_of_store
from unsilent.studies.noise.study import NoiseQuestion, read_noise, steps_to_trace
from unsilent.studies.training.kind import TrainingStore
from unsilent.studies.training.spec import TrainingSpec

SECONDS, BYTES = 10, 2**30
"""Of the processor (six times as long by the clock, for other processes run as well), and memory beyond what was there."""
FLOOR = ReplicaDifferences(
    "within", tuple(0.01 * (i - 10) for i in range(20)), tuple(0.02 * (i - 9) for i in range(20)), (0.1,) * 20, (False,) * 20, 10,
    (0.3, 0.2),
)  # fmt: skip


def make_pvf(folder, *more):
    """A small campaign of the tiny workload, by the command line."""
    (folder / "tiny.py").write_text(conftest.TINY)
    words = ("pvf", "tiny.py:make", *(more or ("--trials", 5)), "--quiet", "--store", "s.sqlite", "--output", "s.html")
    done = conftest.in_process(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "s.sqlite"


def make_training(folder):
    """A small campaign of trainings, with a row under the guard."""
    spec = TrainingSpec(write_loop(folder), (("steps", "12"),), faults=(("RD", 1.0), ("bitflip", 1.0)))
    with running(spec) as runner, TrainingStore(folder / "s.sqlite", write=True) as store:
        executor = Here(runner)
        run_campaign(spec, Budget(8), executor, store, command="unsilent training …")
        run_trials([TrialId("guarded:random", None, 0)], executor, store)
        store_noise_floors(store, NoiseFloors(FLOOR, replace(FLOOR, switches="init+order+augment+dropout")))
    return folder / "s.sqlite"


def make_replicas(folder):
    """A few runs and looks; the store, and how it was asked."""
    (folder / "loop.py").write_text(LOOP)
    spec = ReplicaSpec(f"{folder}/loop.py:make", (("steps", "4"),))
    asked, runner = NoiseQuestion(spec, (Switches(), Switches.parse("within")), replicas=3), ReplicaRunner(spec)
    with ReplicaStore(folder / "s.sqlite", write=True) as store:
        store.bind_campaign(spec, trained := runner.establish_baseline())
        store.record_request(ReplicaRequest(tuple(map(str, asked.variants)), asked.replicas))
        store.add_rows(map(runner.run_replica, dict.fromkeys(asked.planned_runs(trained))))
        store.add_rows(map(runner.trace_step, dict.fromkeys(steps_to_trace(asked, store))))
        store.add_session_seconds(1.0, 2.0)
    return folder / "s.sqlite", asked


def repair(path):
    """The campaign's hash where spec or fingerprint were changed, so that what is behind that check is reached as well."""
    with closing(sqlite3.connect(path)) as db, db:
        kind = kind_of_store(path)
        spec, text = db.execute("SELECT spec, description FROM campaign").fetchone()
        spec, described = parse_record(kind.spec, spec, "spec"), parse_record(kind.baseline, text, "description")
        kind.check_spec(spec)
        kind.check_baseline(described)
        found = campaign_hash(spec, described.fingerprint)
        db.execute("UPDATE campaign SET hash = ?, description = json_set(description, '$.campaign', ?)", (found, found))


class Broken(AssertionError):
    """A verb that did not do as promised."""


class Watch:
    """Runs verbs and keeps figures: how many, the longest time, the most memory beyond what was there before."""

    def __init__(self):
        self.count, self.longest, self.codes = {}, 0.0, {}
        self.before = self._peak()

    @property
    def memory(self):
        return self._peak() - self.before

    def _peak(self):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def run(self, verb, call, told):
        """``call()`` gives (exit code, text on stderr)."""
        begun, limits = time.process_time(), resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        old = signal.signal(signal.SIGALRM, self._late)
        signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (now + 4 * BYTES, limits[1]))
        try:
            code, err = call()
        except BaseException as error:
            raise Broken(f"{verb} of {told}: {type(error).__name__}: {str(error)[:300]}") from error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
            resource.setrlimit(resource.RLIMIT_AS, limits)
        took = time.process_time() - begun
        self.longest = max(self.longest, took)
        self.count[verb] = self.count.get(verb, 0) + 1
        self.codes[code] = self.codes.get(code, 0) + 1
        if took > SECONDS:
            raise Broken(f"{verb} of {told} took {took:.1f} s")
        if self.memory > BYTES:
            raise Broken(f"{verb} of {told} took {self.memory >> 20} MiB")
        if code not in (0, 1, 2) or "Traceback" in err or (code and (err.count("\n") != 1 or len(err) > 2000)):
            raise Broken(f"{verb} of {told} ended with {code}: {err[-900:]!r}")
        if any(ord(c) < 32 and c != "\n" for c in err):
            raise Broken(f"{verb} of {told} prints control characters: {err[:300]!r}")
        return code

    def _late(self, number, frame):
        raise TimeoutError(f"more than {6 * SECONDS} s")


def command(*words):
    """A verb in this process; its workers are not started."""

    def call():
        out, err = StringIO(), StringIO()
        with (
            mock.patch("unsilent.campaigns.executors.ProcessExecutor", _none),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            code = main.run(list(map(str, words)))
        return code, err.getvalue()

    return call


def _none(*args, **kwargs):
    raise UsageError("no worker is started here")


def attack(watch, told, path, kind, sound, trial, turn=0, asked=None):
    """Every verb on one damaged store, of their forms the one whose ``turn`` it is; raises ``Broken``."""
    folder = path.parent
    reports = [
        ("-o", folder / "r.html", "--plain"),
        ("-o", folder / "r.html", "--json", "--canonical"),
        None,
    ]
    exports = [(), ("--canonical",), *(("-o", folder / f"e.{ending}") for ending in ("csv", "json", "parquet"))]
    new = ("-o", folder / "out.sqlite")
    merges = [(path, *new), (sound, "-o", path), (sound, path, *new)]
    replays = [(), ("--workload", "tiny.py:make")]
    if kind == "pvf":
        reports += [("--card", "-o", folder / "c.json")]
        replays += [("--workload", "tiny.py:make", "--trace", "-o", folder / "t.html")]
        resume = ("pvf", "tiny.py:make", "--trials", 6, "--quiet", "--store", path, "--output", folder / "s.html")
    turns = [turn + 7 * (turn // 2), turn, turn // 3, turn // 5]
    report, export, merge, replay = (
        forms[n % len(forms)] for forms, n in zip((reports, exports, merges, replays), turns, strict=True)
    )
    shown = command("diff", path, sound, "--plain") if report is None else command("report", path, *report)
    watch.run("report", shown, told)
    watch.run("export", command("export", path, *export), told)
    watch.run("merge", command("merge", *merge), told)
    watch.run("replay", command("replay", path, trial, *replay), told)
    if kind == "pvf" and turn % 4 == 0:
        watch.run("resume", command(*resume), told)
    if asked is not None:
        watch.run("noise", lambda: _noise(path, asked, write=turn % 4 == 0), told)
    victim = folder / "victim.txt"
    if victim.exists() or " super" in told:
        assert victim.read_text() == "precious", f"{told} removed another file"


def _noise(path, asked, write=False):
    """What ``unsilent noise`` asks of a store."""
    from unsilent.replicas import StepTraceId

    def call():
        with ReplicaStore(path, write=write) as store:
            for replica in store.replicas():
                for row in store.runs_with_switches(replica.switches, 9, weights=True):
                    for step in range(store.baseline.steps):
                        store.find_step_trace(StepTraceId(row.replica, step))
            store.total_session_seconds()
            read_noise(asked, store)
        return 0

    err = StringIO()
    with redirect_stderr(err):
        try:
            return call(), ""
        except UnsilentError as error:
            return main._fail(str(error), 2), err.getvalue()


def copy(path, folder):
    """A store in a folder of its own."""
    folder.mkdir(exist_ok=True)
    return shutil.copy(path, folder / path.name)
