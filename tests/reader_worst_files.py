"""Readers of outside files, and the worst files that each of them admits, in several shapes.

``python reader_worst_files.py READER FOLDER`` prints for every shape what the reader said, its memory and its CPU seconds, as
JSON lines. Each is read in a process of its own, which has what is imported already; there is a limit of `MEMORY` and `SECONDS`
on twice what is asked, so that a reader that goes beyond is ended.
"""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SECONDS = 10
MEMORY = 2**30


class Reader(NamedTuple):
    """A reader of outside files.

    Attributes:
        module: Where it is.
        read: What it does, given the module and the path.
        name: Of the file.
        most: Bytes of the hostile part that it admits, by a name of its module or as a number.
        shapes: Makes of a number of bytes the hostile part.
        wrap: What makes a file of the hostile part.
    """

    module: str
    read: Callable[[Any, Path], Any]
    name: str
    most: str | int
    shapes: dict[str, Callable[[int], bytes]]
    wrap: Callable[[bytes], bytes] = bytes


def as_header(content: bytes) -> bytes:
    content = content if content.startswith(b"{") else b'{"a":' + content + b"}"
    return struct.pack("<Q", len(content)) + content


def as_line(content: bytes) -> bytes:
    return content[:-1] + b"\n"


def as_torch_archive(pickle: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", pickle)
        archive.writestr("a/version", "3\n")
    return file.getvalue()


def as_recording(series: bytes) -> bytes:
    file = io.BytesIO()
    values = np.zeros((0, 0)) if series != b"[]" else np.zeros((2**25, 0))
    np.savez_compressed(
        file, series=np.frombuffer(series, np.uint8), values=values, seen=np.zeros(values.shape, bool),
        seconds=np.zeros(len(values)),
    )  # fmt: skip
    return file.getvalue()


def archive_directory(size: int) -> bytes:
    """A zip file of empty entries, with a directory of about ``size`` bytes."""
    count = size // 60
    names = [b"a/data.pkl", *(b"a/data/%07d" % n for n in range(count - 1))]
    local, central, at = [], [], 0
    for name in names:
        local.append(struct.pack("<4s5H3L2H", b"PK\3\4", *[0] * 8, len(name), 0) + name)
        central.append(struct.pack("<4s6H3L5H2L", b"PK\1\2", *[0] * 9, len(name), *[0] * 5, at) + name)
        at += len(local[-1])
    length = sum(map(len, central))
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, at)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at + length, 1)
    last = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return b"".join((*local, *central, end, locator, last))


def repeated(part: bytes, size: int, begin: bytes = b"[", end: bytes = b"]") -> bytes:
    """A text of at most ``size`` bytes that repeats a part."""
    count = (size - len(begin) - len(end)) // (len(part) + 1)
    return begin + b",".join([part] * count) + end


def numbered(part: str, size: int, begin: str = "", end: str = "", between: str = ",") -> bytes:
    """A text of at most ``size`` bytes that repeats a part with a number in place of each ``%d``."""
    length = len(part) + 7 * part.count("%d") + len(between)
    count = (size - len(begin) - len(end)) // length
    return (begin + between.join(part.replace("%d", str(n)) for n in range(count)) + end).encode()


JSON = {
    "deep": lambda size: b"[" * size,
    "deep objects": lambda size: b'{"a":' * (size // 5),
    "lists": lambda size: repeated(b"[]", size),
    "lists of lists": lambda size: repeated(b"[[]]", size),
    "objects": lambda size: repeated(b'{"":{}}', size),
    "keys": lambda size: numbered('"%d":0', size, "{", "}"),
    "one key": lambda size: repeated(b'"a":0', size, b"{", b"}"),
    "long text": lambda size: b'{"schema":"' + b"x" * (size - 30) + b"\xf0\x9f\x98\x80" + b'"}',
    "long key": lambda size: b'{"' + b"x" * (size - 30) + b'":0}',
    "long numbers": lambda size: repeated(b"1" * 4300, size),
    "long fraction": lambda size: b"[0." + b"1" * (size - 10) + b"]",
    "zeros": lambda size: bytes(size),
    "line ends": lambda size: b"\n" * size,
}
TEXT = {
    "one line": lambda size: b"x" * size,
    "zeros": lambda size: bytes(size),
    "commas": lambda size: b"," * size,
    "quotes": lambda size: b'"' * size,
    "cells": lambda size: numbered("%d", size),
    "lines": lambda size: numbered("%d,a,1,1", size, "Injection,Layer,TensorIndex,Bit\n", "\n", "\n"),
    "line ends": lambda size: b"\n" * size,
    "long number": lambda size: b"stage," + b"1" * (size - 6),
}
TOML = {
    "deep": lambda size: b"a=" + b"[" * (size - 2),
    "one name": lambda size: b"x" * (size - 2) + b"=1",
    "dots": lambda size: b"a." * (size // 2 - 2) + b"a=1",
    "tables": lambda size: numbered("[t%d]", size, between="\n"),
    "arrays": lambda size: repeated(b"[[a]]", size, b"", b"").replace(b",", b"\n"),
    "keys": lambda size: numbered("k%d=0", size, between="\n"),
    "lists": lambda size: b"a=" + repeated(b"[]", size - 2),
    "long number": lambda size: b"a=" + b"1" * (size - 2),
    "inline": lambda size: b"a={" + b"b={" * (size // 3 - 2),
}
YAML = {
    "one name": lambda size: b"x" * (size - 3) + b": 1",
    "keys": lambda size: numbered("k%d: 0", size, between="\n"),
    "deep": lambda size: b"[" * size,
    "flow": lambda size: repeated(b"[]", size),
    "plain lines": lambda size: b"a: " + b"b\n  " * (size // 4 - 2),
    "dashes": lambda size: b"- " * (size // 2),
    "quotes": lambda size: b"a: '" + b"''" * (size // 2 - 5) + b"'",
    "escapes": lambda size: b'a: "' + b"\\x41" * (size // 4 - 5) + b'"',
    "colons": lambda size: b":" * size,
    "long number": lambda size: b"a: " + b"1" * (size - 3),
    "sixties": lambda size: b"a: 1" + b":1" * (size // 2 - 5),
    "comments": lambda size: b"#\n" * (size // 2),
    "question marks": lambda size: b"? " * (size // 2),
    "anchors": lambda size: numbered("- &a%d 1", size, between="\n"),
}
PICKLE = {
    "lists": lambda size: b"\x80\x02" + b"]" * size + b".",
    "dicts": lambda size: b"\x80\x02(" + b"}" * size + b"t.",
    "marks": lambda size: b"\x80\x02" + b"(" * size + b".",
    "sets": lambda size: b"\x80\x04(" + b"\x8f" * size + b"t.",
    "memo": lambda size: b"\x80\x04N" + b"\x94" * size + b".",
    "numbers": lambda size: b"\x80\x02(" + b"M\xff\xff" * (size // 3) + b"t.",
    "floats": lambda size: b"\x80\x02(" + (b"G" + bytes(8)) * (size // 9) + b"t.",
    "texts": lambda size: b"\x80\x04(" + b"\x8c\x02\xc4\x80" * (size // 4) + b"t.",
    "wide text": lambda size: b"\x80\x02X" + struct.pack("<I", size - 10) + b"x" * (size - 14) + b"\xf0\x9f\x98\x80.",
    "bytes": lambda size: b"\x80\x04(" + b"C\x00" * (size // 2) + b"t.",
    "most values": lambda size: b"\x80\x02(" + (b"G" + bytes(8)) * min(490_000, size // 9) + b"t.",
    "pops": lambda size: b"\x80\x02N" + b"N0" * (size // 2) + b".",
    "calls": lambda size: b"\x80\x02ca\nb\n" + b")R" * (size // 2) + b".",
    "copies": lambda size: b"\x80\x02]" + b"2" * (size - 10) + b".",
    "long text numbers": lambda size: b"(" + (b"L" + b"1" * 4000 + b"L\n") * (size // 4003) + b"t.",
    "names": lambda size: b"\x80\x02(" + b"ca\nb\n" * (size // 5) + b"t.",
    "keys above many": lambda size: (
        b"\x80\x02" + b"".join(b"}X\xf4\x01\x00\x00" + b"k" * 500 for _ in range(50)) + b"](" + b"\x88" * (size - 30000) + b"e"
        + b"s" * 50 + b"."
    ),
}  # fmt: skip
ONE_TENSOR = '"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
ONE_FAULT = {
    "version": 1, "site": "param:fc.weight", "dtype": "float32", "shape": [64, 10], "elements": [3], "operation": "xor",
    "operands": ["0x00000001"],
}  # fmt: skip
SAFETENSORS = {
    **JSON,
    "tensors": lambda size: numbered(ONE_TENSOR, size, "{", "}"),
    "shapes": lambda size: numbered('"%d":{"shape":[' + "1," * 60 + "0]}", size, "{", "}"),
    "equal names": lambda size: numbered(ONE_TENSOR.replace("t%d", "n" * 310 + "%d"), size, "{", "}"),
    "slashes": lambda size: numbered(ONE_TENSOR.replace("t%d", "a/" * 100 + "%d"), size, "{", "}"),
}
FAULTS = {
    **JSON,
    **TEXT,
    "faults": lambda size: (json.dumps(ONE_FAULT).encode() + b"\n") * (size // len(json.dumps(ONE_FAULT) + "\n")),
    "one line of faults": lambda size: repeated(json.dumps(ONE_FAULT).encode(), size),
    "sequence": lambda size: repeated(b"[[0],[1]]", size, b'{"a":[', b"]}"),
}
TOPOLOGY = {
    **TEXT,
    "matrix": lambda size: b"".join(
        f"GPU{row} ".encode() + b"SYS " * row + b"X " + b"SYS " * (500 - row) + b"\n" for row in range(501)
    )[:size],
    "many links": lambda size: b"GPU0 X NV" + b"9" * 5000 + b" \nGPU1 NV" + b"9" * 5000 + b" X \n",
    "spaces": lambda size: b"GPU0" + b" " * (size - 5) + b"x",
    "letters": lambda size: b"GPU0 " + b"A" * (size - 6) + b"-",
    "single rows": lambda size: b"GPU0 X \n" * (size // 8),
}
SWEEP = {
    **JSON,
    "counts": lambda size: (
        b'{"schema":"unsilent.placement.sweep/1","levels":[],"backend":"","rows":[],"counts":'
        + repeated(b"9" * 4000, size - 200) + b"}"
    ),
    "rows": lambda size: (
        b'{"schema":"unsilent.placement.sweep/1","levels":["a"],"backend":"","counts":[2],"rows":'
        + repeated(b'{"collective":"all-reduce","groups":[[0,1]],"payload":1,"seconds":1}', size - 200) + b"}"
    ),
}  # fmt: skip
MANIFEST = {
    **JSON,
    "tensors": lambda size: numbered(
        '"%d":{"dtype":"","shape":[],"xxh3_128":""}',
        size,
        '{"schema":"unsilent/manifest/2","xxh3_128":"","tensors":{',
        "}}",
    ),
}
EDITS = {
    **JSON,
    "one edit": lambda size: repeated(b'["",0,"00","01"]', size, b'{"version":1,"edit":1,"injection":0,"patches":[', b"]}\n"),
    "long patch": lambda size: (
        b'{"version":1,"edit":1,"injection":0,"patches":[["",0,"' + b"0" * (size // 2 - 100) + b'","' + b"1" * (size // 2 - 100)
        + b'"]]}\n'
    ),
    "many edits": lambda size: numbered('{"version":1,"edit":%d,"injection":0,"patches":[]}', size, end="\n", between="\n"),
    "wide injections": lambda size: numbered(
        '{"version":1,"edit":%d,"injection":' + repeated(b"[[]]", 2**20).decode() + ',"patches":[]}', size, end="\n", between="\n"
    ),
}  # fmt: skip
RECORDING = {**JSON, "values": lambda size: b"[]"}
BEGIN = '{"kind": "%s", "time": 1.0, "rank": 0, "step": 0, '
STARTED = (
    BEGIN % "started" + '"host": "", "device": "", "process": 1, "world_size": 1, "series": {}, "versions": {}, '
).encode()
EVENTS = {
    **{
        name: (
            lambda size, make=make: (STARTED + b'"settings": {"a": ' + make(2**20 - 400) + b"}}\n") * (size // 2**20)
        )
        for name, make in JSON.items()
    },
    "samplings": lambda size: repeated_line(BEGIN % "sampling" + '"interval": 1, "reason": ""}', size),
    "steps": lambda size: repeated_line(
        BEGIN % "step" + '"loss": 1.0, "gradient_norm": 1.0, "score": 1.0, "cost": 0.0}', size
    ),
}
LOG = {
    **TEXT,
    "lines": lambda size: b"\n" * size,
    "errors": lambda size: b"XError\n" * (size // 7),
    "long errors": lambda size: (b"XError " + b"/a/b " * 390 + b"\n") * (size // 1958),
    "steps": lambda size: b"step 1\n" * (size // 7),
}


def repeated_line(line: str, size: int) -> bytes:
    """As many lines as ``size`` bytes have."""
    return (line.encode() + b"\n") * (size // (len(line) + 1))


def open_checkpoint(module: Any, path: Path) -> None:
    module.Checkpoint(path)


PATH = "unsilent.checkpoints."
READERS = {
    "safetensors": Reader(PATH + "checkpoint", open_checkpoint, "a.safetensors", 100_000_000 - 6, SAFETENSORS, as_header),
    "torch.save": Reader(PATH + "checkpoint", open_checkpoint, "a.pt", 63 * 2**20, PICKLE, as_torch_archive),
    "archive-directory": Reader(
        PATH + "checkpoint", open_checkpoint, "a.pt", 2**26,
        {"most entries": lambda size: archive_directory(60 * 300_000), "more entries": archive_directory},
    ),
    "undo-record": Reader(
        PATH + "editing", lambda m, path: m.edits_of(path.with_name("a")), "a.undo.jsonl", "MOST_RECORD", EDITS, as_line
    ),
    "manifest": Reader(PATH + "manifest", lambda m, path: m.read_manifest(path), "a.json", "MOST_BYTES", MANIFEST),
    "injection": Reader(PATH + "injection_file", lambda m, path: m.read_injection(path), "a.jsonl", "MOST_BYTES", FAULTS),
    "fault-list": Reader(
        "unsilent.faults.lists.files", lambda m, path: list(m.read_entries(m.read_list_bytes(str(path)), "list")), "a.list",
        "MOST_BYTES", FAULTS,
    ),
    "published-injection": Reader(
        "unsilent.papers.isca23.injections", lambda m, path: m.read_injection(path), "a.csv", "MAX_FILE_BYTES", TEXT
    ),
    "settings": Reader(PATH + "hdf5_corrupter.settings", lambda m, path: m.read_settings(path), "a.yaml", "MOST_BYTES", YAML),
    "accelerator": Reader(
        "unsilent.faults.hardware.description_file", lambda m, path: m.load_accelerator(str(path)), "a.toml", "MOST_BYTES", TOML
    ),
    "system": Reader("unsilent.placement.system", lambda m, path: m.load_system(str(path)), "a.toml", "MOST_BYTES", TOML),
    "topology": Reader("unsilent.placement.system", lambda m, path: m.load_system(str(path)), "a.txt", "MOST_BYTES", TOPOLOGY),
    "sweep": Reader("unsilent.placement.measure", lambda m, path: m.load_sweep(str(path)), "a.json", "MOST_BYTES", SWEEP),
    "card": Reader("unsilent.studies.pvf.card", lambda m, path: m.read_card(path), "a.json", "MOST_BYTES", JSON),
    "recording": Reader(
        "unsilent.detectors.series", lambda m, path: m.load_recording(path), "a.npz", 2**28, RECORDING, as_recording
    ),
    "incident": Reader(
        "unsilent.events.incident_folder", lambda m, path: m.read_incident(path.parent), "incident.json", "MOST_BYTES", JSON
    ),
    "configuration": Reader(
        "unsilent.triage.optional_parts", lambda m, path: m.read_configuration(path), "a.json", "MOST_CONFIGURATION", JSON
    ),
    "step-seconds": Reader(
        "unsilent.triage.optional_parts", lambda m, path: m.read_times(path), "timeline.json", "MOST_TIMELINE", JSON
    ),
    "log": Reader("unsilent.triage.log_errors", lambda m, path: m.read_log_errors(path), "log.txt", "MOST_LOG", LOG),
    "events": Reader(
        "unsilent.events.event_files", lambda m, path: [1 for _ in m.iterate_events(path)], "a.jsonl", "MOST_BYTES", EVENTS
    ),
}  # fmt: skip


def cost_of(reader: Reader, make: Callable[[int], bytes], path: Path, scaled: bool) -> tuple[str, int, float]:
    """What a reader says of one shape, and its memory in bytes and CPU time in seconds.

    ``scaled``: The file is as large as the limit of what the values of a JSON text may take admits.
    """
    from unsilent.basics.errors import UsageError
    from unsilent.basics.plainfiles import MOST_JSON_MEMORY, json_memory

    module = import_module(reader.module)
    most = getattr(module, reader.most) if isinstance(reader.most, str) else reader.most

    def write() -> str:
        content = make(most)
        while scaled and (needed := json_memory(content)) > MOST_JSON_MEMORY:
            content = make(int(0.999 * len(content) * MOST_JSON_MEMORY / needed))
        path.write_bytes(reader.wrap(content))
        return ""

    def read() -> str:
        memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2 * MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (2 * SECONDS, 2 * SECONDS))
        try:
            reader.read(module, path)
        except UsageError as error:
            return f"refused: {error}"
        return "read"

    in_child(write)
    _, before, _ = in_child(lambda: "")
    said, memory, seconds = in_child(read)
    path.unlink()
    return said, memory - before, seconds


def in_child(function: Callable[[], str]) -> tuple[str, int, float]:
    """What a function returns in a process of its own, and the process's largest memory and its CPU time."""
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(theirs, function().encode("utf-8", "backslashreplace")[:2000])
        except BaseException as error:
            os.write(theirs, f"raised {error!r}"[:500].encode("utf-8", "backslashreplace"))
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read().decode()
    _, status, usage = os.wait4(child, 0)
    ended = f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else said
    return ended, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def costs(name: str, folder: Path, shapes: Iterator[str] | None = None) -> Iterator[tuple[str, str, int, float]]:
    """Shape, what was said, memory and CPU time of every shape of a reader."""
    reader = READERS[name]
    for shape in shapes or reader.shapes:
        for scaled in (False, True) if "lists of lists" in reader.shapes else (False,):
            said = f"{shape}, as large as JSON may be" if scaled else shape
            yield said, *cost_of(reader, reader.shapes[shape], folder / reader.name, scaled)


if __name__ == "__main__":
    for cost in costs(sys.argv[1], Path(sys.argv[2]), iter(sys.argv[3:]) if sys.argv[3:] else None):
        print(json.dumps(cost), flush=True)
