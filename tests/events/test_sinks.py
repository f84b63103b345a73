"""What receives events: the log, JSON lines that cannot be written, a real Prometheus client, TensorBoard's own reader."""

from __future__ import annotations

import logging
import math
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from events import made_events as made
from unsilent.basics.errors import UsageError
from unsilent.events.event_files import read_events
from unsilent.events.event_kinds import LOGGER
from unsilent.events.run_history import OK, WARNING, health_after
from unsilent.events.sinks import make_sinks
from unsilent.events.sinks.json_lines import JsonLinesSink
from unsilent.events.sinks.logging_sink import MOST_ALARMS_PER_STEP, LoggingSink
from unsilent.events.sinks.prometheus import PrometheusSink
from unsilent.events.sinks.tensorboard import TensorBoardSink
from unsilent.monitor.settings import MonitorSettings

FULL = Path("/dev/full")


# -- health --------------------------------------------------------------------------------------------------------------


def test_health_follows_alarms_and_verdicts():
    assert health_after(OK, made.alarm(1)) == WARNING
    assert health_after(OK, made.alarm(1, level="warning")) == OK
    assert health_after(OK, made.verdict(1, rank=1)) == WARNING
    assert health_after(OK, made.verdict(1, rank=0)) == OK
    assert health_after(WARNING, made.sampling(1)) == WARNING
    assert health_after(WARNING, made.summary(1)) == OK


# -- log -----------------------------------------------------------------------------------------------------------------


def logged(caplog, events, **options):
    with caplog.at_level(logging.DEBUG, LOGGER):
        sink = LoggingSink(**options)
        for event in events:
            sink(event)
        sink.close()
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_every_event_is_one_line_of_the_log(caplog):
    events = [
        made.started(), made.summary(1), made.sampling(2), made.alarm(4),
        made.alarm(5, level="warning"), made.verdict(6), made.failed(7), made.ended(8),
    ]  # fmt: skip
    lines = logged(caplog, events)
    levels = ["INFO", "DEBUG", "INFO", "ERROR", "WARNING", "WARNING", "WARNING", "INFO"]
    assert [level for level, _ in lines] == levels
    assert not [text for _, text in lines if "\n" in text]
    assert lines[3][1].startswith(
        "alarm: step 4: gradient of model.layers.3.mlp.down_proj.weight (max) is 3.1e+08, baseline 0.021 (robust-z), in rank 0"
    )
    assert "rank 1 (node-7, cuda:1) is suspected" in lines[5][1]
    assert "abnormal" not in " ".join(text for _, text in lines)


def test_what_is_not_finite_is_an_element():
    said = str(made.alarm(4, statistic="l2", value=math.inf, baseline=math.nan, rule="nonfinite", tensor="w"))
    assert said.startswith("step 4: gradient of w has an element that is not finite (l2 is inf; nonfinite), in rank 0")
    said = str(
        made.alarm(
            4, feature="loss", tensor="", statistic="number", value=math.nan, baseline=math.nan, rule="nonfinite"
        )
    )
    assert said.startswith("step 4: loss (number) is nan (nonfinite), in rank 0")


def test_names_are_harmless_in_the_log(caplog):
    ((_, text),) = logged(caplog, [made.alarm(1, tensor="a\x1b[31m\nb")])
    assert text.isprintable()


def test_what_all_ranks_report_alike_is_logged_once(caplog):
    """Every rank has a log of its own, and all of them are often one file."""
    alike = [made.verdict, made.incident, made.explained, made.replicas_alarm]
    lines = logged(caplog, [make(9, rank) for rank in range(2) for make in alike])
    assert [level for level, _ in lines] == ["WARNING"] * 3 + ["ERROR"] + ["DEBUG"] * 4
    assert (
        "step 9, rank 1, fingerprint of fc.weight: the incident is recorded in runs/incidents/9-0a1b2c3d" in lines[1][1]
    )
    assert lines[2][1] == (
        "step 9: kind of fault: transient (UNSILENT-T01, minor), rank 1 (node-7, cuda:1); 5 clean replays (p < 0.6); go on"
    )


def test_a_batch_that_is_not_finite_accuses_no_device():
    said = str(made.explained(9, fault="data", code="UNSILENT-S01"))
    assert said.startswith("step 9: kind of fault: data (UNSILENT-S01, minor), batch of rank 1; 5 clean")


def test_later_alarms_and_verdicts_refer_to_the_incident():
    since = made.incident(90).since
    assert since == "step 90, rank 1, fingerprint of fc.weight"
    for event in (made.alarm(95, since=since), made.replicas_alarm(95, since=since), made.verdict(95, since=since)):
        assert str(event).endswith("; incident since step 90, rank 1, fingerprint of fc.weight")
    assert made.incident(90, suspect=-1, tensor="").since == "step 90, no rank named, fingerprint"


def test_many_alarms_of_a_step_are_not_all_logged(caplog):
    lines = logged(caplog, [made.alarm(step) for step in (7, 8) for _ in range(40)])
    assert len(lines) == 2 * (MOST_ALARMS_PER_STEP + 1)
    assert lines[-1][1] == "step 8: there are more alarms, which are not logged"


def test_compatibility_lines_carry_the_documented_fields(caplog):
    ((level, text),) = logged(caplog, [made.alarm(1)], compatibility=True)
    assert level == "ERROR"
    for words in (
        "accuracy sensitivity feature abnormal", "compatibility codes", "80818C00", "node type SoC",
        "sensor type Check Sensor", "event state check fail", "level minor", "model.layers.3",
    ):  # fmt: skip
        assert words in text


def test_compatibility_lines_of_faults_carry_the_same_code(caplog):
    for compatibility in (True, False):
        caplog.clear()
        ((level, text),) = logged(caplog, [made.explained(1)], compatibility=compatibility)
        assert level == "WARNING"
        assert ("event code 80818C00" in text) == compatibility


# -- JSON lines ----------------------------------------------------------------------------------------------------------


def test_ranks_write_files_of_their_own(tmp_path):
    for rank in range(2):
        JsonLinesSink(tmp_path / "e.jsonl", rank, 2)(made.started(rank, 2))
    JsonLinesSink(tmp_path / "one.jsonl")(made.started())
    names = {"e.rank0.jsonl", "e.rank1.jsonl", "one.jsonl"}
    assert {one.name for one in tmp_path.iterdir()} == names
    assert [one.rank for one in read_events(tmp_path / "e.jsonl")] == [0, 1]


def test_the_job_may_change_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = JsonLinesSink(Path("e.jsonl"))
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    sink(made.started())
    assert len(read_events(tmp_path / "e.jsonl")) == 1


def test_a_folder_that_is_gone_is_logged_once(tmp_path, caplog):
    (tmp_path / "sub").mkdir()
    sink = JsonLinesSink(tmp_path / "sub" / "e.jsonl")
    sink(made.started())
    (tmp_path / "sub").rename(tmp_path / "away")
    for step in range(3):
        sink(made.summary(step))
    (tmp_path / "away").rename(tmp_path / "sub")
    sink(made.summary(3))
    sink.close()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "No such file or directory; the job goes on" in texts[0]
    assert texts[1].startswith("3 events could not be written")
    assert [one.step for one in read_events(sink.path)] == [0, 3]


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_a_full_disk_is_logged_once(tmp_path, caplog):
    sink = JsonLinesSink(tmp_path / "e.jsonl")
    sink.path = FULL
    for step in range(3):
        sink(made.summary(step))
    assert [record.getMessage() for record in caplog.records] == [
        "cannot write events to /dev/full: No space left on device; the job goes on"
    ]


def test_half_a_line_is_taken_back(tmp_path, monkeypatch):
    """A disk that becomes full in the middle of a line: stood for by a limit on the size of files."""
    resource, signal = pytest.importorskip("resource"), pytest.importorskip("signal")
    sink = JsonLinesSink(tmp_path / "e.jsonl")
    sink(made.started())
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (sink.path.stat().st_size + 20, hard))
        sink(made.summary(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    sink(made.summary(2))
    assert [one.step for one in read_events(sink.path)] == [0, 2]


def test_a_file_of_somebody_else_is_not_touched(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    with pytest.raises(UsageError, match="something else than events; give another file"):
        JsonLinesSink(path)
    assert path.read_text() == "print('hello')\n"
    for wrong in (tmp_path, tmp_path / "no" / "e.jsonl"):
        with pytest.raises(UsageError, match="cannot write events to"):
            JsonLinesSink(wrong)


@pytest.mark.parametrize(
    "content",
    [
        '{"kind": "apple", "weight": 3}\n{"kind": "pear"',
        '{"kind": "started", "time": 1}\n{"kind": "st',
        '{"kind": "step"}\n',
        '{"kind": "',
        '{"kind": "started", "time": 17',
        "\n",
    ],
)
def test_a_file_that_only_begins_as_events_do_is_not_touched(content, tmp_path):
    path = tmp_path / "fruit.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match="something else than events; give another file"):
        JsonLinesSink(path)
    assert path.read_text() == content


@pytest.mark.parametrize("end", ["my notes", '{"kind": "apple", "time": 3', '{"kind": "step", "weight": '])
def test_a_last_line_that_is_none_of_ours_is_not_removed(end, tmp_path):
    path = tmp_path / "e.jsonl"
    JsonLinesSink(path)(made.started())
    with path.open("a") as file:
        file.write(end)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="last line is not finished, and is no event; give another file"):
        JsonLinesSink(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("end", ["", "{", '{"kind": "ste', '{"kind": "step", "time": 17'])
def test_events_of_an_earlier_run_stay(end, tmp_path):
    path = tmp_path / "e.jsonl"
    JsonLinesSink(path)(made.started())
    with path.open("a") as file:
        file.write(end)
    JsonLinesSink(path)(made.started())
    assert read_events(path) == [made.started()] * 2


# -- Prometheus ----------------------------------------------------------------------------------------------------------


def scraped(port):
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for one in samples}


def test_metrics_are_scraped_by_a_real_client():
    sink = PrometheusSink(0, rank=1, rules=settings().rule_names)
    try:
        rank = ("rank", "1")
        empty = scraped(sink.port)
        assert empty["unsilent_health", (rank,)] == 0
        assert math.isnan(empty["unsilent_loss", (rank,)])
        alarms = {labels: value for (name, labels), value in empty.items() if name == "unsilent_alarms_total"}
        assert set(alarms.values()) == {0}
        assert {dict(labels)["rule"] for labels in alarms} == {"robust-z", "nonfinite", "fingerprint", "replicas"}
        for event in (
            made.started(1, 2), made.sampling(3, 1), made.summary(9, 1, loss=2.5, gradient_norm=None, score=0.5, cost=0.004),
            made.alarm(11, 1), made.alarm(11, 1), made.alarm(11, 1, level="warning"), made.verdict(11, 1),
            made.incident(11, 1), made.explained(11, 1),
        ):  # fmt: skip
            sink(event)
        values = scraped(sink.port)
        assert values["unsilent_steps_total", (rank,)] == 12
        assert values["unsilent_alarms_total", (("level", "alarm"), rank, ("rule", "robust-z"))] == 2
        assert values["unsilent_alarms_total", (("level", "warning"), rank, ("rule", "robust-z"))] == 1
        assert values["unsilent_verdicts_total", (("action", "rerun"), rank)] == 1
        where = ("folder", "runs/incidents/11-0a1b2c3d"), rank, ("suspect", "1"), ("tensor", "fingerprint of fc.weight")
        assert values["unsilent_incident_step", where] == 11
        kind = ("code", "UNSILENT-T01"), ("fault", "transient"), rank, ("suspect", "1")
        assert values["unsilent_fault_verdict_step", kind] == 11
        assert values["unsilent_health", (rank,)] == 1
        assert values["unsilent_loss", (rank,)] == 2.5
        assert values["unsilent_score", (rank,)] == 0.5
        assert values["unsilent_cost_ratio", (rank,)] == 0.004
        assert values["unsilent_sampling_interval_steps", (rank,)] == 4
        assert values["unsilent_monitor_running", (rank,)] == 1
        assert math.isnan(values["unsilent_gradient_norm", (rank,)])
        sink(made.ended(20, 1))
        values = scraped(sink.port)
        assert values["unsilent_steps_total", (rank,)] == 20
        assert values["unsilent_monitor_running", (rank,)] == 0
    finally:
        sink.close()
    with pytest.raises(OSError, match="refused"):
        scraped(sink.port)


def test_metrics_are_served_to_this_machine_alone():
    sink = PrometheusSink(0)
    try:
        assert sink._server.server_address[0] == "127.0.0.1"
    finally:
        sink.close()


def settings(**more):
    return MonitorSettings(**more)


def test_a_port_that_is_taken_is_logged_and_the_job_goes_on(caplog):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        sinks = make_sinks(settings(metrics_port=other.getsockname()[1]), 0, 1)
        for sink in sinks:
            sink(made.summary(1))
            sink.close()
    (record,) = caplog.records
    assert "no Prometheus metrics: OSError: [Errno" in record.getMessage()
    assert record.getMessage().endswith("; the job goes on")


@pytest.mark.parametrize(
    ("package", "options", "extra"),
    [
        ("prometheus_client", {"metrics_port": 0}, "prometheus"),
        ("torch.utils.tensorboard", {"tensorboard": Path("t")}, "tensorboard"),
    ],
)
def test_a_missing_package_is_named(package, options, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"pip install 'unsilent\[{extra}\]'"):
        make_sinks(settings(**options), 0, 1)


# -- TensorBoard ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tensorboard_reads_what_is_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink(made.started())
    for step in range(3):
        sink(made.summary(step, loss=2.5 + step, gradient_norm=math.nan))
    sink(made.sampling(3))
    sink(made.alarm(3, tensor="fc.weight"))
    sink(made.verdict(3))
    sink(made.incident(3))
    sink(made.explained(3))
    sink.close()
    read = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("unsilent/loss")] == [(0, 2.5), (1, 3.5), (2, 4.5)]
    assert all(math.isnan(one.value) for one in read.Scalars("unsilent/gradient_norm"))
    assert [one.value for one in read.Scalars("unsilent/sampling_interval")] == [4]
    (text,) = read.Tensors("unsilent/alarms/text_summary")
    assert b"gradient of fc.weight (max) is 3.1e+08" in text.tensor_proto.string_val[0]
    assert text.step == 3
    assert read.Tensors("unsilent/verdicts/text_summary")
    assert read.Tensors("unsilent/incidents/text_summary")
    assert read.Tensors("unsilent/fault-verdicts/text_summary")


# -- all -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_settings_choose_sinks(tmp_path):
    for rank in range(2):
        sinks = make_sinks(
            settings(events=tmp_path / "e.jsonl", metrics_port=0, tensorboard=tmp_path / "t"),
            rank,
            2,
            compatibility=True,
        )
        assert len(sinks) == 4
        for sink in sinks:
            sink(made.started(rank, 2))
            sink(made.summary(1, rank))
            sink.close()
    assert {one.name for one in (tmp_path / "t").iterdir()} == {"rank0", "rank1"}
    assert len(read_events(tmp_path / "e.jsonl")) == 4
    assert len(make_sinks(settings(), 0, 1)) == 1


def test_a_sink_that_raises_ends_alone(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(PrometheusSink, "__call__", lambda self, event: 1 / 0)
    for sink in (sinks := make_sinks(settings(events=tmp_path / "e.jsonl", metrics_port=0), 0, 1)):
        for step in range(3):
            sink(made.summary(step))
    for sink in sinks:
        sink.close()
    (record,) = caplog.records
    assert "no Prometheus metrics: ZeroDivisionError" in record.getMessage()
    assert len(read_events(tmp_path / "e.jsonl")) == 3
