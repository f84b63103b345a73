"""Files of events: what is written is read again, and what others wrote is an error in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events import made_events as made
from unsilent.basics.errors import UsageError
from unsilent.basics.printable import escape_unprintable
from unsilent.events import event_files
from unsilent.events.event_files import EventFile, find_event_files, has_events, parse_event, read_events
from unsilent.events.event_kinds import EVENTS
from unsilent.events.sinks.json_lines import JsonLinesSink

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WHOLE = st.integers(0, 2**19)
VALUES = {
    "float": st.floats(),
    "float | None": st.none() | st.floats(),
    "int": WHOLE,
    "int | None": st.none() | WHOLE,
    "str": TEXT,
    "bool": st.booleans(),
    "tuple[str, ...]": st.lists(TEXT, max_size=3).map(tuple),
    "tuple[int, ...]": st.lists(WHOLE, max_size=3).map(tuple),
    "Mapping[str, Any]": st.dictionaries(
        TEXT, st.none() | st.booleans() | WHOLE | TEXT | st.floats(allow_nan=False, allow_infinity=False), max_size=3
    ),
    "Mapping[str, int]": st.dictionaries(TEXT, WHOLE, max_size=3),
    "Mapping[str, str]": st.dictionaries(TEXT, TEXT, max_size=3),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def drawn_event(kind):
    fields = {one.name: VALUES[str(one.type)] for one in dataclasses.fields(EVENTS[kind])}
    return st.builds(EVENTS[kind], **{**fields, "time": st.floats(0, 2e9), "rank": st.integers(0, 2**16 - 1)})


def printable(value):
    """What is read of a value: its texts without control characters."""
    if isinstance(value, str):
        return escape_unprintable(value)
    if isinstance(value, dict):
        return {printable(key): printable(one) for key, one in value.items()}
    return tuple(map(printable, value)) if isinstance(value, tuple) else value


def same(a, b):
    """Equal, where NaN equals NaN."""
    return repr(a) == repr(b)


@pytest.mark.parametrize("kind", EVENTS)
def test_what_is_written_is_read_again(kind, tmp_path_factory):
    path = tmp_path_factory.mktemp("events") / "e.jsonl"

    @given(event=drawn_event(kind))
    def check(event):
        path.unlink(missing_ok=True)
        JsonLinesSink(path)(event)
        (read,) = read_events(path)
        shown = {one.name: printable(getattr(event, one.name)) for one in dataclasses.fields(event)}
        assert same(read, dataclasses.replace(event, **shown))
        json.loads(path.read_text(), parse_constant=pytest.fail)  # strict JSON: no NaN literal

    check()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(value, tmp_path):
    sink = JsonLinesSink(tmp_path / "e.jsonl")
    sink(made.alarm(3, value=value, baseline=value, score=value))
    sink(made.summary(4, loss=value, gradient_norm=None))
    alarm, summary = read_events(tmp_path / "e.jsonl")
    assert repr((alarm.value, alarm.baseline, alarm.score)) == repr((value,) * 3)
    assert repr((summary.loss, summary.gradient_norm)) == repr((value, None))


def texts_of(value):
    """All texts in a value."""
    if isinstance(value, dict):
        return [text for one in value.items() for text in texts_of(one)]
    return (
        [value]
        if isinstance(value, str)
        else [t for one in value for t in texts_of(one)]
        if isinstance(value, tuple)
        else []
    )


@pytest.mark.parametrize("kind", EVENTS)
def test_no_text_of_a_file_reaches_a_terminal_as_it_is(kind):
    hostile = "\x1b]0;title\x07\x1b[2J\u202e\n" + "x" * 5000
    values = {
        "str": hostile, "tuple[str, ...]": [hostile], "Mapping[str, Any]": {hostile: {hostile: [hostile]}},
        "Mapping[str, int]": {hostile: 1}, "Mapping[str, str]": {hostile: hostile},
    }  # fmt: skip
    fields = dataclasses.fields(EVENTS[kind])
    record = {one.name: values.get(str(one.type), 1) for one in fields if one.type != "tuple[int, ...]"}
    event = parse_event(json.dumps({"kind": kind, **record, "ranks": [1]}).encode())
    texts = [text for one in fields for text in texts_of(getattr(event, one.name))]
    assert all(text.isprintable() and len(text) < 1100 for text in (*texts, str(event)[:1000]))


def line_of(event, **changes):
    return json.dumps({**event.to_json(), **changes}).encode()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"rubbish", "Expecting value"),
        (b"[1]", 'expected an object with a "kind"'),
        (b'{"kind": 3}', 'expected an object with a "kind"'),
        (b'{"kind": "alarm"}', "missing"),
        (b"\xff\xfe", "decode"),
        (b"[" * 100_000, "recursion"),
        (b'{"kind": "step", "loss": ' + b"9" * 5000 + b"}", "digits"),
        (line_of(made.summary(1), score="1.5"), "score is '1.5'; expected a number"),
        (line_of(made.summary(1), score=10**400), "expected a number"),
        (line_of(made.summary(1), step=True), "step is 'True'; expected a whole number"),
        (line_of(made.summary(1), step=10**30), "expected a whole number"),
        (line_of(made.summary(1), health=None), "health is 'None'; expected a text"),
        (line_of(made.summary(1), time=-1), "time is -1"),
        (line_of(made.summary(1), time="nan"), "time is nan"),
        (line_of(made.summary(1), rank=-1), "rank -1"),
        (line_of(made.verdict(1), ranks=[1, "2"]), "ranks is '2'; expected a whole number"),
        (line_of(made.verdict(1), ranks={"a": 1}), "expected a list or an object"),
        (line_of(made.started(), series=[1]), "expected a list or an object"),
        (line_of(made.started(), settings={"a": [[[[[[[[[[1]]]]]]]]]]}), "settings is "),
    ],
)
def test_a_line_that_is_no_event_is_named(line, words, tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(line_of(made.started()) + b"\n" + line + b"\n")
    with pytest.raises(UsageError) as raised:
        read_events(path)
    assert f"line 2 of {path} is not an event" in str(raised.value)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@given(kind=st.sampled_from(sorted(EVENTS)), record=st.dictionaries(st.text(max_size=8), JSON), data=st.data())
def test_any_json_is_an_event_or_an_error(kind, record, data):
    names = list(get_type_hints(EVENTS[kind]))
    known = {
        name: data.draw(JSON | st.sampled_from(["nan", 1, 0.5, "x"])) for name in names if data.draw(st.booleans())
    }
    try:
        event = parse_event(json.dumps({**record, **known, "kind": kind}).encode())
    except (ValueError, RecursionError):
        return
    assert type(event) is EVENTS[kind]
    assert str(event)
    json.dumps(event.to_json(), allow_nan=False)


@given(content=st.binary(max_size=300))
def test_any_bytes_are_events_or_an_error(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "e.jsonl"
    path.write_bytes(line_of(made.started()) + b"\n" + content)
    with contextlib.suppress(UsageError):
        assert read_events(path)[0] == made.started()


def test_kinds_and_fields_of_later_versions_are_skipped(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(line_of(made.summary(1), kind="later") + b"\n" + line_of(made.summary(2), later=[1]) + b"\n")
    file = EventFile(path)
    assert list(file.read_new()) == [made.summary(2)]
    assert file.unknown == 1


def test_a_file_that_grows(tmp_path):
    path = tmp_path / "e.jsonl"
    line = line_of(made.summary(1)) + b"\n"
    file = EventFile(path)
    path.write_bytes(line[:20])
    assert list(file.read_new()) == []
    path.write_bytes(line + line[:9])
    assert list(file.read_new()) == [made.summary(1)]
    path.write_bytes(line * 3)
    assert list(file.read_new()) == [made.summary(1)] * 2
    path.write_bytes(line)
    with pytest.raises(UsageError, match="became shorter"):
        list(file.read_new())


def test_sizes_are_limited(tmp_path, monkeypatch):
    path = tmp_path / "e.jsonl"
    JsonLinesSink(path)(made.started())
    monkeypatch.setattr(event_files, "MOST_BYTES", 10)
    with pytest.raises(UsageError, match="at most"):
        read_events(path)
    monkeypatch.setattr(event_files, "MOST_LINE", 10)
    with pytest.raises(UsageError, match="line 1 .* too long"):
        list(EventFile(path).read_new())


def test_files_of_a_job(tmp_path):
    for name in ("e.rank10.jsonl", "e.rank2.jsonl", "e.rank0.jsonl", "e.rankx.json"):
        (tmp_path / name).write_bytes(line_of(made.started()) + b"\n")
    names = ["e.rank0.jsonl", "e.rank2.jsonl", "e.rank10.jsonl"]
    assert [one.name for one in find_event_files(tmp_path / "e.jsonl")] == names
    assert [one.name for one in find_event_files(tmp_path)] == names
    assert [one.name for one in find_event_files(tmp_path / "e.rank2.jsonl")] == ["e.rank2.jsonl"]
    (tmp_path / "e.jsonl").write_bytes(line_of(made.started()) + b"\n")  # the same job again, with one rank
    os.utime(tmp_path / "e.jsonl", (2e9, 2e9))
    assert [one.name for one in find_event_files(tmp_path / "e.jsonl")] == ["e.jsonl"]
    os.utime(tmp_path / "e.jsonl", (0, 0))
    assert [one.name for one in find_event_files(tmp_path / "e.jsonl")] == names
    (tmp_path / "other.jsonl").touch()
    with pytest.raises(UsageError, match=r"several jobs; give one of e\.jsonl, other\.jsonl"):
        find_event_files(tmp_path)
    for nothing in (tmp_path / "f.jsonl", tmp_path / "no" / "e.jsonl"):
        with pytest.raises(UsageError, match="there are no events"):
            find_event_files(nothing)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match="regular file"):
        read_events(tmp_path / "pipe.jsonl")


def test_events_are_told_from_other_files(tmp_path):
    JsonLinesSink(tmp_path / "events")(made.started())
    (tmp_path / "card").write_text('{"schema": "x"}')
    assert has_events(tmp_path / "events")
    assert has_events(tmp_path / "not-there.jsonl")
    assert not has_events(tmp_path / "card")
    assert not has_events(tmp_path / "not-there")


KILLED = """
import sys
sys.path.insert(0, {tests!r})
import made_events as made
from pathlib import Path
from unsilent.events.sinks.json_lines import JsonLinesSink
sink = JsonLinesSink(Path({path!r}))
sink(made.started())
step = 0
while True:
    sink(made.summary(step))
    step += 1
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_its_events(tmp_path):
    path = tmp_path / "e.jsonl"
    code = KILLED.format(tests=str(Path(__file__).parent), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 60
        while (not path.exists() or path.stat().st_size < 50_000) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    _, *summaries = read_events(path)
    assert [one.step for one in summaries] == list(range(len(summaries)))
    assert len(summaries) > 100
    with path.open("ab") as file:  # as if it had been killed in the middle of a line
        file.write(line_of(made.summary(0))[:30])
    assert len(read_events(path)) == len(summaries) + 1
    JsonLinesSink(path)(made.ended(5))  # the job is started again
    assert read_events(path)[-1] == made.ended(5)
    assert len(read_events(path)) == len(summaries) + 2
