"""``unsilent timeline``: what it prints, its JSON and page, and bad input."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from kineto_traces import ddp_job_files
from timeline.pipelines import Pipeline
from unsilent.cli.main import run


def slow_worker(data_rank, stage, direction, micro_batch, step):
    return (2 if (data_rank, stage) == (1, 0) else 1) * (1.0 if direction == "forward" else 2.0)


@pytest.fixture
def trace(tmp_path):
    return Pipeline(stages=3, seconds=slow_worker).write(tmp_path / "trace-x.parquet")


def answer(capsys, *words):
    code = run([str(word) for word in words])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def test_the_slow_rank_is_named(trace, capsys):
    out = " ".join(answer(capsys, "timeline", trace).split())
    assert "In a replay without idle gaps, a step takes 1." in out
    assert "if rank 1 took straggler-free durations, a step would take" in out
    assert "workers: slowdown that each causes alone rank slowdown" in out


def test_json_has_the_slowdown_in_its_results(trace, capsys):
    result = json.loads(answer(capsys, "timeline", trace, "--json"))
    assert result["schema"] == "unsilent/timeline/2"
    results = result["results"]
    assert results["slowdown"]["low"] <= results["slowdown"]["estimate"] <= results["slowdown"]["high"]
    assert results["workers"][0].pop("slowdown") > 1
    assert results["workers"][0] == {"rank": 1, "data_rank": 1, "stage": 0}
    assert results["steps"] == [0, 1, 2]
    assert len(results["recorded"]) == len(results["prediction_errors"]) == 3


def test_one_step_has_no_interval(tmp_path, capsys):
    trace = Pipeline(steps=1, seconds=slow_worker).write(tmp_path / "trace-x.parquet")
    assert "nan" not in answer(capsys, "timeline", trace).lower()
    results = json.loads(answer(capsys, "timeline", trace, "--json"))["results"]
    assert (results["slowdown"]["low"], results["slowdown"]["high"], results["prediction_errors"]) == (
        None,
        None,
        [None],
    )


def test_plain_output_and_the_page(trace, capsys, tmp_path):
    out = answer(capsys, "timeline", trace, "--plain", "-o", tmp_path / "t.html")
    assert "slowdown_with_gaps" in out
    assert "Timeline of trace-x.parquet" in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "no trace was named"), (["missing.parquet"], "cannot read missing.parquet"), (["x.txt"], "cannot read x.txt"),
     (["a.parquet", "b.parquet"], "expected one operation table"), (["bad.parquet"], "cannot be read as Parquet")],
)  # fmt: skip
def test_bad_input_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    assert run(["timeline", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


TRACES = Path(__file__).parents[1] / "timeline" / "data"


def test_traces_of_the_profiler(capsys, tmp_path):
    words = ("--what-if", "rank:1=+5ms", "--perfetto", tmp_path / "job.zip")
    out = " ".join(answer(capsys, "timeline", TRACES, *words).split())
    assert "time of all ranks: " in out
    assert "rank:1=+5ms: a step would take" in out
    assert zipfile.is_zipfile(tmp_path / "job.zip")
    results = json.loads(answer(capsys, "timeline", TRACES, *words, "--json"))["results"]
    (what_if,) = results["what_if"]
    assert sum(what_if["predicted"]) > sum(what_if["recorded"])
    assert [one["rank"] for one in results["ranks"]] == [0, 1]


def test_settings_for_ddp(capsys, tmp_path):
    results = json.loads(answer(capsys, "timeline", "optimise", ddp_job_files(tmp_path), "--json"))["results"]
    assert {one["precision"] for one in results["best"]} == {"fp32", "fp16"}
    assert min(sum(one["seconds"]) for one in results["best"]) <= sum(results["default"]["seconds"])


def test_an_empty_system_is_no_system(capsys):
    assert run(["timeline", "optimise", str(TRACES), "--system", ""]) == 2
    assert "--system is ''" in capsys.readouterr().err


def test_what_names_nothing_is_one_line(capsys):
    assert run(["timeline", str(TRACES), "--what-if", "scale:all_redcue=2"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_what_ifs_of_ddp_say_what_they_assume(capsys, tmp_path):
    traces, words = ddp_job_files(tmp_path), ("--what-if", "buckets=3", "--what-if", "server=1")
    out = " ".join(answer(capsys, "timeline", traces, *words, "--plain").split())
    assert "buckets=3: a step would take" in out
    assert "by the model of DDP" in out
    assert "(beyond the sizes that the cost was fitted to)" in out
    assert "buckets=3, server=1: with the recorded buckets, the mean step time by the model of DDP is" in out
    first, _ = json.loads(answer(capsys, "timeline", traces, *words, "--json"))["results"]["what_if"]
    assert first["is_extrapolated"]
    assert first["is_trusted"]
    assert first["notes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--system", ""], "--system is ''"), (["--system", "a100:2"], "ask one of these"),
     (["--system", "a100:2", "--what-if", "network=infinite"], "ask one of these"),
     (["--system", "a100:2", "--what-if", "buckets=1"], "32 devices, but the job has 2 ranks"),
     (["--system", "b100", "--what-if", "buckets=1"], "did you mean"), (["--what-if", "bucket=1"], "did you mean 'buckets'")],
)  # fmt: skip
def test_a_system_that_does_not_fit_is_one_line(words, message, capsys):
    assert run(["timeline", str(TRACES), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
