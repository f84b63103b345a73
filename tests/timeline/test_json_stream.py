"""Events of Chrome traces read one chunk at a time: the same with both decoders, and one line for what is no trace."""

from __future__ import annotations

import gzip
import json
import resource

import pytest

from unsilent.basics.errors import UsageError
from unsilent.timeline import json_stream
from unsilent.timeline.json_stream import TraceFile

EVENTS = [
    {"ph": "X", "cat": "cpu_op", "name": f"op {number} }},{{ \\ é", "pid": 7, "tid": 8 + number % 2, "ts": 1e12 + number,
     "dur": 0.5, "args": {"correlation": number, "Input Dims": [[number], []], "other": [{"a": 1}, {"b": {}}]}}
    for number in range(300)
]  # fmt: skip
FORMS = {
    "indented": lambda trace: json.dumps(trace, indent=2),
    "compact": lambda trace: json.dumps(trace, separators=(",", ":"), ensure_ascii=False),
    "list": lambda trace: json.dumps(trace["traceEvents"]),
}


@pytest.fixture(params=["msgspec", "standard library"])
def decoder(request, monkeypatch):
    if request.param == "msgspec":
        pytest.importorskip("msgspec")
    else:
        monkeypatch.setattr(json_stream, "_fast_decoder", lambda: None)


def write(path, text):
    content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read(path):
    trace = TraceFile(path)
    return [event for chunk in trace.chunks() for event in chunk], trace.fields


@pytest.mark.parametrize("chunk", [64, 1000, 2**22])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_events_and_fields_are_those_of_the_file(tmp_path, monkeypatch, decoder, name, form, chunk):
    monkeypatch.setattr(json_stream, "CHUNK", chunk)
    trace = {"distributedInfo": {"rank": 3}, "traceEvents": EVENTS, "baseTimeNanoseconds": 5}
    events, fields = read(write(tmp_path / name, FORMS[form](trace)))
    assert [(e.ph, e.cat, e.name, e.pid, e.tid, e.ts, e.dur) for e in events] == [
        (e["ph"], e["cat"], e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in EVENTS
    ]
    assert [e.args.correlation for e in events] == list(range(300))
    assert [json_stream.kept_arguments(e.args).input_dims for e in events[:2]] == [[[0], []], [[1], []]]
    assert fields == ({} if form == "list" else {"distributedInfo": {"rank": 3}, "baseTimeNanoseconds": 5})


WHOLE = json.dumps({"a": 1, "traceEvents": EVENTS, "b": [1, 2]})
DIGITS = "9" * 5000
BAD = {
    "empty": "",
    "blank": "  \n",
    "no JSON": "hello",
    "a number": "12",
    "a text": '"traceEvents"',
    "no events": '{"a": 1}',
    "cut off": WHOLE[:-1000],
    "cut off between events": WHOLE[: WHOLE.index(', {"ph"') + 1],
    "cut off after events": WHOLE[:-4],
    "no colon": '{"traceEvents" []}',
    "events are an object": '{"traceEvents": {"a": 1}}',
    "an event is a number": '{"traceEvents": [1]}',
    "twice": '{"traceEvents": [], "traceEvents": []}',
    "deep": '{"traceEvents": [{"args": ' + "[" * 200_000,
    "deep field": '{"a": ' + '{"a":' * 200_000,
    "deep key": '{"traceEvents": [{"ph": "X", "x": ' + "[" * 5000 + "]" * 5000 + "}]}",
    "many digits": '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": ' + DIGITS + "}]}",
    "no number": '{"traceEvents": [{"ph": X}]}',
    "no comma": '{"traceEvents": [{"ph": "X"} {"ph": "X"}]}',
    "a field of many digits": '{"a": ' + DIGITS + ', "traceEvents": []}',
    "text follows": '{"traceEvents": []} {"traceEvents": []}',
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, decoder, case):
    with pytest.raises(UsageError) as error:
        read(write(tmp_path / "t.json", BAD[case]))
    assert "t.json" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("left", [5, 30, 1000, -4])
def test_a_gzip_that_is_cut_off_is_refused_in_one_line(tmp_path, decoder, left):
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(WHOLE.encode())[:left])
    with pytest.raises(UsageError, match="cut off|damaged"):
        read(path)


def test_a_gzip_with_damaged_bytes_is_refused_in_one_line(tmp_path, decoder):
    content = bytearray(gzip.compress(WHOLE.encode()))
    content[len(content) // 2] ^= 255
    path = tmp_path / "t.json.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="t.json.gz"):
        read(path)


def test_bytes_that_are_no_text_and_numbers_that_are_none_are_read(tmp_path, decoder):
    text = '{"traceEvents": [{"ph": "X", "name": "\udcff", "ts": NaN, "dur": Infinity}, {"ph": "M", "name": "x"}]}'
    events, _ = read(write(tmp_path / "t.json", text))
    assert [event.name for event in events] == ["\udcff", "x"]


def test_one_value_has_a_limit(tmp_path, monkeypatch, decoder):
    monkeypatch.setattr(json_stream, "CHUNK", 1000)
    monkeypatch.setattr(json_stream, "MOST_VALUE", 10_000)
    for text in ('{"traceEvents": [{"name": "' + "x" * 50_000, '{"a": "' + "x" * 50_000):
        with pytest.raises(UsageError, match="value of more than"):
            read(write(tmp_path / "t.json", text))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    pytest.importorskip("msgspec")
    path = tmp_path / "t.json.gz"
    event = json.dumps({**EVENTS[0], "args": {"filler": "x" * 1000}}).encode()
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents": [' + event)
        for _ in range(200):
            file.write((b"," + event) * 1000)
        file.write(b"]}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(map(len, TraceFile(path).chunks())) == 200_001
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**27  # of 240 MB
