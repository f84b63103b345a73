"""``unsilent triage collect``: an incident folder from what a job left on the disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed

from conftest import in_process
from triage import made_triage as made
from unsilent import verified_save
from unsilent.basics.errors import UsageError
from unsilent.triage import job_files, parts
from unsilent.triage.bundle import Bundle
from unsilent.triage.collect import collect
from unsilent.triage.findings import FindingKind, Outcome, Query
from unsilent.triage.queries.table import execute

TRACES = Path(__file__).parents[1] / "timeline" / "data"


def write(folder, **files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def bytes_below(folder):
    return {str(one): hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.rglob("*") if one.is_file()}


@pytest.fixture
def job(tmp_path):
    folder = tmp_path / "job"
    (folder / "traces").mkdir(parents=True)
    for rank in range(2):
        shutil.copy(TRACES / f"ddp-rank{rank}of2.json.gz", folder / "traces" / f"trace-rank{rank}.json.gz")
        shutil.copy(made.DUMPS / "stop" / "json" / f"flight-rank{rank}.json", folder / "traces")
    error = "step 41 loss 0.2\nRuntimeError: mine\n"
    write(folder, **{
        "logs/x_none/attempt_0/1/stderr.log": "RuntimeError: of the first attempt\n",
        "logs/x_none/attempt_1/0/stdout.log": "step 41 loss 0.2\n", "logs/x_none/attempt_1/1/stderr.log": error,
        ".hydra/config.yaml": "lr: 0.5\nmodel: {width: 8}\n", "model/config.json": '{"hidden": 3}', ".git/config.json": "{}",
        "before.json": '{"lr": 0.1, "model": {"width": 8}}',
    })  # fmt: skip
    verified_save({"model": {"w": torch.ones(8)}}, folder / "40.pt", step=40)
    return folder


def test_what_lies_in_the_folder_of_a_job_becomes_an_incident(job, tmp_path):
    before = bytes_below(job)
    result = collect(job, tmp_path / "out", earlier=job / "before.json", report="it is slow")
    bundle = Bundle(tmp_path / "out")
    assert bytes_below(job) == before
    assert (bundle.incident.step, bundle.incident.world_size, bundle.incident.suspect) == (41, 2, -1)
    assert [(one.step, Path(one.path).name) for one in bundle.incident.checkpoints] == [(40, "40.pt")]
    assert bundle.report() == ("it is slow", ())
    assert bundle.times()[0].ranks == (0, 1)
    found = {name: execute(bundle, Query(name)) for name in ("read-log", "read-flight-record", "compare-settings")}
    assert (found["read-log"].outcome, found["read-log"].ranks, found["read-log"].step) == (Outcome.LOCALISED, (1,), 41)
    assert "mine" in found["read-log"].text
    assert found["read-flight-record"].kind is FindingKind.ABSENT_RANK
    assert found["compare-settings"].tensor == "lr"
    assert execute(bundle, Query("find-straggler")).outcome is not Outcome.LOCALISED
    assert execute(bundle, Query("verify-checkpoints")).outcome is Outcome.NOTHING
    assert not [one for one in result.parts if one.problem]


def test_a_recorded_incident_is_copied_and_added_to(tmp_path):
    path = made.folder(tmp_path / "job", 2)
    write(tmp_path / "job", **{"rank1.log": "ValueError: x\n"})
    before = bytes_below(tmp_path / "job")
    for given in (tmp_path / "job", path):
        out = tmp_path / f"out{given == path}"
        collect(given, out)
        bundle = Bundle(out)
        assert (bundle.incident.step, sorted(bundle.series()[0]), sorted(bundle.states()[0])) == (90, [0, 1], [0, 1])
        assert list(bundle.logs()[0]) == [1]
    assert bytes_below(tmp_path / "job") == before
    with pytest.raises(UsageError, match="--step"):
        collect(tmp_path / "job", tmp_path / "x", step=3)


def test_links_pipes_and_pickles_are_not_taken(tmp_path):
    job = tmp_path / "job"
    write(job, **{"secret.txt": "ValueError: secret\n"})
    (job / "rank0.log").symlink_to(job / "secret.txt")
    (job / "elsewhere").symlink_to("/")
    shutil.copy(made.DUMPS / "stop" / "pickle" / "dump_0", job / "dump_0")
    result = collect(job, tmp_path / "out")
    assert sorted(one.name for one in (tmp_path / "out").rglob("*")) == ["incident.json"]
    assert "no JSON" in next(one.problem for one in result.parts if one.name == parts.FLIGHT_FOLDER)


def test_a_log_without_a_rank_is_that_of_rank_0_where_it_is_the_only_one(tmp_path):
    write(tmp_path / "job", **{"train.log": "step 7\nKilled\n"})
    collect(tmp_path / "job", tmp_path / "out")
    assert list(Bundle(tmp_path / "out").logs()[0]) == [0]
    write(tmp_path / "job", **{"other.log": "step 8\n"})
    result = collect(tmp_path / "job", tmp_path / "two")
    assert not Bundle(tmp_path / "two").logs()[0]
    assert "2 logs" in next(one.problem for one in result.parts if one.name == parts.LOG_FILE)


@pytest.mark.parametrize(
    "text", ["a: [", "a: &x [1]\nb: *x\n", "[1, 2]", "a: !!python/object:os.system x", "\x00", "a: " + "[" * 200]
)
def test_configurations_that_are_no_settings_are_not_taken(tmp_path, text):
    write(tmp_path / "job", **{"config.yaml": text})
    result = collect(tmp_path / "job", tmp_path / "out")
    assert next(one.problem for one in result.parts if one.name == parts.CONFIGURATION_FILE)
    assert not (tmp_path / "out" / parts.CONFIGURATION_FILE).exists()


def test_numbers_in_names_and_logs_make_no_incident_that_cannot_be_read(tmp_path):
    write(tmp_path / "job", **{"rank999999999.log": "step 1\n", "rank9999.log": "step 999999999999\n", "dump_99999.json": "{}",
                               "attempt_1/99999/stdout.log": "step 2\n"})  # fmt: skip
    collect(tmp_path / "job", tmp_path / "out")
    assert Bundle(tmp_path / "out").incident.step >= 0


def test_more_files_than_a_job_has_are_not_looked_through(tmp_path, monkeypatch):
    monkeypatch.setattr(job_files, "MOST_FILES", 2)
    write(tmp_path / "job", **{f"rank{rank}.log": "" for rank in range(3)})
    with pytest.raises(UsageError, match="more than 2 files"):
        collect(tmp_path / "job", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_of_files_are_shown_without_control_characters(tmp_path):
    write(tmp_path / "job", **{"rank0\x1b[2J.log": "step 7\n", "config\x1b[2J.json": "{"})
    done = in_process("triage", "collect", tmp_path / "job", "-o", tmp_path / "out", "--plain")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr


def test_a_configuration_whose_package_is_missing_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    write(tmp_path / "job", **{"config.yaml": "lr: 1\n"})
    result = collect(tmp_path / "job", tmp_path / "out")
    problem = next(one.problem for one in result.parts if one.name == parts.CONFIGURATION_FILE)
    assert "pip install" in problem
    assert "\n" not in problem


def test_damaged_traces_and_manifests_are_said(tmp_path):
    write(tmp_path / "job", **{"trace-rank0.json": "{", "a.pt": "x", "a.pt.manifest.json": "{"})
    result = collect(tmp_path / "job", tmp_path / "out")
    problems = {one.name: one.problem for one in result.parts}
    assert "trace-rank0.json" in problems[parts.TIMELINE_FILE]
    assert "a.pt.manifest.json" in problems["checkpoints"]


# -- the command --------------------------------------------------------------------------------------------------------


def test_an_empty_folder_says_what_to_record_and_so_does_triage(tmp_path):
    (tmp_path / "job").mkdir()
    done = in_process("triage", "collect", tmp_path / "job", "-o", tmp_path / "out", "--plain")
    assert (done.returncode, done.stderr) == (0, "")
    assert "holds no files that debugging queries read" in done.stdout
    for more in ((), ("--run",)):
        shown = in_process("triage", tmp_path / "out", "--plain", *more).stdout
        for command in (
            "unsilent run",
            "unsilent timeline record",
            "unsilent checkpoint manifest",
            "unsilent triage collect",
        ):
            assert command in shown, (command, shown)
            assert command in done.stdout or command == "unsilent triage collect"


def test_what_was_taken_is_printed(job, tmp_path):
    done = in_process("triage", "collect", job, "-o", tmp_path / "out", "--report", "disk?", "--step", 30, "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["folder"] == str(tmp_path / "out")
    assert {one["part"] for one in shown["results"]} >= {
        "report.txt",
        "log.txt",
        "flight",
        "timeline.json",
        "checkpoints",
    }
    assert Bundle(tmp_path / "out").incident.step == 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no folder was given"),
        (("nowhere", "-o", "out"), "nowhere"),
        (("job",), "add -o DIR"),
        (("job", "-o", "job/out"), "lies in job"),
        (("job", "-o", "full"), "full is not empty"),
        (("job", "-o", "out", "--step", "-1"), "--step is -1"),
        (("job", "-o", "out", "--earlier", "nothing.json"), "nothing.json"),
        (("job", "-o", "out", "--report", "x" * 70_000), "--report"),
    ],
)
def test_mistakes_are_one_line(tmp_path, words, message):
    write(tmp_path, **{"job/train.log": "", "full/a.txt": ""})
    done = in_process("triage", "collect", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_what_a_recorded_job_of_two_ranks_left_is_collected(tmp_path):
    job, script = tmp_path / "job", Path(__file__).parents[1] / "monitor" / "incident_ranks.py"
    job.mkdir()
    words = "torch.distributed.run --standalone --nproc-per-node=2 --redirects=3"
    done = subprocess.run(
        [sys.executable, "-m", *words.split(), "--log-dir", job / "logs", "-m", "unsilent", "timeline", "record", "-o",
         job / "traces",
         "--steps", "8", script, job],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = collect(job, tmp_path / "out")
    assert not [one.problem for one in result.parts if one.problem]
    bundle = Bundle(tmp_path / "out")
    assert (bundle.incident.step, bundle.incident.suspect) == (40, 1)
    assert [sorted(found) for found in (bundle.series()[0], bundle.logs()[0], bundle.dumps()[0])] == [[0, 1]] * 3
    assert (bundle.times()[0].ranks, len(bundle.times()[0].steps)) == ((0, 1), 8)
    for name in ("read-log", "read-flight-record", "find-straggler", "find-onset"):
        assert execute(bundle, Query(name)).outcome is not Outcome.UNANSWERED
