"""PVF cards: what is in them, that they can be measured again, and that nothing of a file is believed unchecked."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import sqlite3
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import pytest

from conftest import TINY, in_process
from unsilent.basics.errors import UsageError
from unsilent.outcomes.tallies import PvfEstimator
from unsilent.studies.pvf.analysis import analyse
from unsilent.studies.pvf.card import (
    KNOWN,
    MOST_BYTES,
    SCHEMA,
    CardFit,
    CardFitRow,
    CardRow,
    PvfCard,
    card_json,
    card_text,
    is_card,
    make_card,
    read_card,
)
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.spec import PvfSpec

WORKLOAD = (
    TINY
    + """

def made(scale=1.0):
    def run(model, batch):
        return model(batch * scale)

    return unsilent.Workload(Tiny().eval(), batches(), run=run, name="made", info={"accuracy": 0.5, "rows": [1, 2]})
"""
)

COMMANDS = {
    "plain": ("tiny.py:make", "--trials", 30, "--flips", "1,8"),
    "asked": (
        *("tiny.py:made", "--with", "scale=2", "--trials", 20, "--fault", "bitflip:bits=exponent", "--at", "last.*"),
        *(
            "--at",
            "first.*",
            "--per",
            "layer",
            "--law",
            "per-tensor",
            "--judge",
            "topk:k=2",
            "--seed",
            5,
            "--dtype",
            "float64",
            "--samples",
            2,
        ),
    ),
    "precise": ("tiny.py:make", "--ci", "6%", "--confidence", 0.9),
    "exhaustive": ("tiny.py:make", "--trials", "all", "--at", "last.bias"),
    "list": ("tiny.py:make", "--faults", "faults.jsonl", "--per", "layer"),
    "values of a run": ("tiny.py:make", "--trials", 20, "--at", "op:*"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("cards")
    (found / "tiny.py").write_text(WORKLOAD)
    return found


@pytest.fixture(scope="module")
def made(folder):
    """A store, its card and the text of it."""
    done = in_process("pvf", *COMMANDS["plain"], "--store", "made.sqlite", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    with PvfStore(folder / "made.sqlite") as store:
        card = make_card(store, PvfEstimator())
    return folder / "made.sqlite", card, card_text(card)


def contents(path):
    with PvfStore(path) as store:
        return store.baseline.campaign, [row.reproducible_values() for row in store.rows()]


QUICK = ("plain", "list")
"""The others take their time in make claims."""


@pytest.mark.claim
@pytest.mark.parametrize("name", [c if c in QUICK else pytest.param(c, marks=pytest.mark.claim) for c in COMMANDS])
def test_the_command_of_a_card_makes_the_same_rows_and_the_same_card(folder, made, name):
    """On a fresh store, by the command line alone, from what the card says and nothing else."""
    first, again = f"{name[:4]}.sqlite", f"{name[:4]}-again.sqlite"
    if name == "list":
        with PvfStore(made[0]) as store:
            (folder / "faults.jsonl").write_text("".join(f"{row.faults}\n" for row in store.rows()))
    reading = ("--confidence", 0.9) if name == "precise" else ()
    done = in_process("pvf", *COMMANDS[name], "--store", first, "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    done = in_process("report", first, "--card", "-o", f"{name[:4]}.json", *reading, cwd=folder)
    assert done.returncode == 0, done.stderr

    told = json.loads((folder / f"{name[:4]}.json").read_text())
    words = shlex.split(told["command"])
    assert words[:2] == ["unsilent", "pvf"]
    done = in_process(*words[1:], "--store", again, "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    campaign, rows = contents(folder / again)
    assert campaign == told["campaign"]
    assert len(rows) == told["trials"] > 0
    assert rows == contents(folder / first)[1]
    with PvfStore(folder / again) as store:
        unit, confidence = told["unit"], told["confidence"]
        assert card_json(make_card(store, PvfEstimator(unit=unit, confidence=confidence))) == told


def test_it_says_all_that_was_asked_and_found(made):
    path, card, _ = made
    with PvfStore(path) as store:
        result, description = analyse(store, PvfEstimator()), store.baseline
    told = card_json(card)
    assert (told["schema"], told["version"]) == (SCHEMA, 3)
    assert told["fingerprint"] == dict(description.fingerprint)
    assert {"weights", "inputs", "golden", "code"} <= set(told["fingerprint"])
    assert told["spec"]["flips"] == [1, 8]
    assert (told["spec"]["fault"], told["spec"]["law"], told["spec"]["seed"]) == ("bitflip", "per-element", 0)
    assert (told["judge"], told["unit"], told["confidence"], told["trials"]) == ("top1", "sample", 0.95, 30 * 3 * 2)
    assert (told["device"], told["dtype"], told["threads"]) == ("cpu", "float32", 1)
    rows = {(r.level, r.parent, r.target, r.flips): r for r in result.rows}
    assert len(told["rows"]) == len(rows)
    for row in told["rows"]:
        of = rows[row["level"], row["parent"], row["target"], row["flips"]]
        assert all(
            row[name] == getattr(of, name) for name in ("estimate", "low", "high", "n", "method", "elements", "bits")
        )
    text = json.dumps(told)
    assert str(path.parent) not in text, "no path of this machine"
    assert "seconds" not in text


def test_the_checksum_is_that_of_the_canonical_json(made):
    """As docs/reference/card.md says it, without a line of the product."""
    told = json.loads(made[2])
    stated = told.pop("sha256")
    text = json.dumps(told, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert stated == hashlib.sha256(text.encode("ascii")).hexdigest()


def test_round_trip(made, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(made[2])
    assert is_card(path)
    assert read_card(path) == made[1]
    path.write_text(json.dumps(json.loads(made[2])))  # other blanks
    assert read_card(path) == made[1]


def refused(path, content):
    """The one line said of a file."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as error:
        read_card(path)
    said = str(error.value)
    assert str(path) in said
    assert said.isprintable(), said
    assert len(said) < 500
    return said


def signed(told):
    """Text of a changed card with a checksum that fits: what a forger would do."""
    told = {k: v for k, v in told.items() if k != "sha256"}
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return json.dumps({**told, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def test_any_change_is_noticed(made, tmp_path):
    told = json.loads(made[2])
    for key in told:
        if key in ("schema", "version"):
            continue
        changed = {**told, key: "0" * 64 if key == "sha256" else [told[key]]}
        assert "checksum" in refused(tmp_path / "c.json", json.dumps(changed)), key
    row = {**told["rows"][0], "estimate": 0.5}
    assert "checksum" in refused(tmp_path / "c.json", json.dumps({**told, "rows": [row, *told["rows"][1:]]}))
    del told["notes"]
    assert "checksum" in refused(tmp_path / "c.json", json.dumps(told))


@pytest.mark.parametrize("version", [0, 1, 2, "3", 3.0, True, None, [1], 10**40])
def test_unknown_versions_are_refused_with_those_known(made, tmp_path, version):
    said = refused(tmp_path / "c.json", signed({**json.loads(made[2]), "version": version}))
    assert f"expected one of: {', '.join(map(str, KNOWN))}" in said


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"{}", b"null", b'"text"', b"\xff\xfe{", b"{" * 100_000, b"[" * 100_000, b'{"a":' * 60_000,
        b'{"schema": "another"}', b'{"schema": "unsilent/pvf/3"}', b'{"schema": NaN}', b'{"a": 1, "a": 2}', b'{"a": 1e999}',
        b'{"schema": "\\u001b[31m\\u202e"}', b'{"schema": "\\ud800"}', b'{"a": ' + b"1" * 10_000 + b"}",
        b"SQLite format 3\0", b'{"schema": {"deep": [1, 2, "\n"]}}', b'{"schema":"' + b"x" * 1_000_000 + b'"}',
    ],
)  # fmt: skip
def test_files_that_are_no_card(tmp_path, content):
    refused(tmp_path / "c.json", content)


def test_a_file_larger_than_any_card(tmp_path):
    assert "larger" in refused(tmp_path / "c.json", b'{"schema":"' + b"x" * MOST_BYTES)


def edited(told, **more):
    return {**told, **more}


def with_row(told, **more):
    return {**told, "rows": [{**told["rows"][0], **more}, *told["rows"][1:]]}


def with_spec(told, **more):
    return {**told, "spec": {**told["spec"], **more}}


CHANGES = (
    lambda t: edited(t, more=1),
    lambda t: with_spec(t, more=1),
    lambda t: with_row(t, more=1),
    lambda t: {k: v for k, v in t.items() if k != "notes"},
    lambda t: edited(t, rows=7),
    lambda t: edited(t, rows={}),
    lambda t: edited(t, trials="180"),
    lambda t: edited(t, trials=-1),
    lambda t: edited(t, samples=0),
    lambda t: edited(t, unit="box"),
    lambda t: edited(t, measure="PVF of mine"),
    lambda t: edited(t, confidence=1.0),
    lambda t: edited(t, command=["rm"]),
    lambda t: edited(t, fingerprint={"weights": 7}),
    lambda t: edited(t, threads=True),
    lambda t: with_row(t, estimate=0.9, high=0.5),
    lambda t: with_row(t, low=-0.1),
    lambda t: with_row(t, high=1.5),
    lambda t: with_row(t, level="planet"),
    lambda t: with_row(t, n=-1),
    lambda t: with_row(t, n=0.5),
    lambda t: with_row(t, flips=0),
    lambda t: with_row(t, silent_share=2.0),
    lambda t: with_row(t, bits=0),
    lambda t: with_row(t, estimate="0.1"),
    lambda t: with_spec(t, flips="1"),
    lambda t: with_spec(t, at="param:*"),
    lambda t: with_spec(t, options=[["a"]]),
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_fitting_checksum_is_not_enough(made, tmp_path, change):
    assert "not a valid PVF card" in refused(tmp_path / "c.json", signed(change(json.loads(made[2]))))


def test_what_is_a_card_and_what_is_a_store(made, tmp_path):
    assert not is_card(made[0])
    renamed = tmp_path / "store.json"
    renamed.write_bytes(made[0].read_bytes())
    assert not is_card(renamed)
    for name, content in (("a", b" \n{}"), ("b.json", b"oops"), ("c", b"\xef\xbb\xbf{")):
        (tmp_path / name).write_bytes(content)
        assert is_card(tmp_path / name)
    (tmp_path / "text").write_text("hello")
    os.mkfifo(tmp_path / "pipe.json")
    assert not any(is_card(tmp_path / name) for name in ("text", "pipe.json", "missing.json", "."))


def test_half_a_campaign_has_no_card(made, tmp_path):
    part = tmp_path / "part.sqlite"
    part.write_bytes(made[0].read_bytes())
    with closing(sqlite3.connect(part)) as db, db:
        db.execute("DELETE FROM trial WHERE k = 29")
    with (
        PvfStore(part) as store,
        pytest.raises(
            UsageError, match="174 of 180 planned trials.*finish it first: unsilent pvf .*--store .*part.sqlite"
        ),
    ):
        make_card(store, PvfEstimator())


@pytest.mark.claim
def test_a_part_is_merged_before_it_has_a_card(folder, made, tmp_path):
    words, parts = COMMANDS["plain"], [str(tmp_path / f"{i}.sqlite") for i in (1, 2)]
    for number, part in enumerate(parts, 1):
        done = in_process("pvf", *words, "--shard", f"{number}/2", "--store", part, "--quiet", cwd=folder)
        assert done.returncode == 0, done.stderr
    with PvfStore(Path(parts[0])) as store, pytest.raises(UsageError) as error:
        make_card(store, PvfEstimator())
    assert "the store is part 1 of 2; merge it with the other parts first" in str(error.value)
    assert f"unsilent merge {parts[0]} … -o ALL.sqlite" in str(error.value)
    with closing(sqlite3.connect(parts[1])) as db, db:
        db.execute("DELETE FROM trial WHERE k = 29")
    with PvfStore(Path(parts[1])) as store, pytest.raises(UsageError, match="finish it first: .*--shard 2/2 .*--store"):
        make_card(store, PvfEstimator())
    done = in_process("pvf", *words, "--shard", "2/2", "--store", parts[1], "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert in_process("merge", *parts, "-o", "all.sqlite", cwd=folder).returncode == 0
    done = in_process("pvf", *words, "--shard", "2/2", "--store", parts[0], "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    with PvfStore(folder / "all.sqlite") as joined, PvfStore(Path(parts[0])) as both, PvfStore(made[0]) as whole:
        assert make_card(joined, PvfEstimator()) == make_card(both, PvfEstimator()) == make_card(whole, PvfEstimator())


def test_a_campaign_planned_in_rounds_has_a_card(folder):
    done = in_process("pvf", "tiny.py:make", "--at", "last.bias", "--ci", "30%", "--store", "r.sqlite", cwd=folder)
    assert done.returncode == 0, done.stderr
    with PvfStore(folder / "r.sqlite") as store:
        assert make_card(store, PvfEstimator()).command == "unsilent pvf tiny.py:make --ci 30% --at last.bias --seed 0"


@pytest.mark.claim
def test_a_precise_campaign_is_read_as_it_was_planned(folder):
    done = in_process("pvf", "tiny.py:make", "--ci", "9%", "--store", "ci.sqlite", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    with PvfStore(folder / "ci.sqlite") as store:
        first = make_card(store, PvfEstimator())
        for other in (PvfEstimator(confidence=0.9), PvfEstimator(unit="batch")):
            with pytest.raises(
                UsageError, match=r"was planned for ±9 points at 0.95 per sample.*--confidence 0.95 --unit"
            ):
                make_card(store, other)
    for looser in (("--ci", "15%"), ("--rel", "90%", "--ci", "12%")):
        done = in_process("pvf", "tiny.py:make", *looser, "--store", "ci.sqlite", "--quiet", cwd=folder)
        assert done.returncode == 0, done.stderr
        with PvfStore(folder / "ci.sqlite") as store:
            assert make_card(store, PvfEstimator()) == first, "what runs nothing changes nothing"
    done = in_process("pvf", "tiny.py:make", "--ci", "4%", "--store", "ci.sqlite", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    with PvfStore(folder / "ci.sqlite") as store, pytest.raises(UsageError) as error:
        make_card(store, PvfEstimator())
    assert "was planned for ±9 points at 0.95 per sample, then for ±4 points at 0.95 per sample" in str(error.value)
    assert str(error.value).endswith("unsilent pvf tiny.py:make --ci 4% --seed 0 --store NEW.sqlite")


def test_numbers_are_told_to_the_last_bit(made):
    for row in json.loads(made[2])["rows"]:
        assert all(math.isfinite(row[key]) for key in ("low", "high"))
        assert float(repr(row["low"])) == row["low"]


# -- docs/reference/card.md ------------------------------------------------------------------------------------------------

FIT_KINDS = ("silent", "detectable", "incorrect")
TYPES = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list, "null": type(None),
}  # fmt: skip


def fits(schema, value):
    """The part of JSON Schema that the documented one is written in."""
    kinds = schema.get("type", list(TYPES))
    allowed = [TYPES[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    if not any(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for kind in allowed):
        return False
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            return False
        if value >= schema.get("exclusiveMaximum", math.inf):
            return False
    if ("const" in schema and value != schema["const"]) or ("enum" in schema and value not in schema["enum"]):
        return False
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return False
    if isinstance(value, list):
        return all(fits(schema.get("items", {}), item) for item in value)
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        if not set(schema.get("required", ())) <= set(value) or (rest is False and set(value) - set(known)):
            return False
        return all(fits(known.get(key, rest or {}), item) for key, item in value.items())
    return True


@pytest.fixture(scope="module")
def documented():
    """The example and the schema of docs/reference/card.md."""
    text = (Path(__file__).parents[3] / "docs" / "reference" / "card.md").read_text()
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]


def test_the_documented_card_is_one(documented, tmp_path):
    example, schema = documented
    (tmp_path / "c.json").write_text(json.dumps(example))
    card = read_card(tmp_path / "c.json")
    assert card.spec.workload == "digits-cnn"
    assert fits(schema, example)


def test_the_documented_schema_is_that_of_the_product(documented, made):
    _, schema = documented
    told = json.loads(made[2])
    assert fits(schema, told)
    for part, kind in (
        (schema, PvfCard),
        (schema["properties"]["spec"], PvfSpec),
        (schema["properties"]["rows"]["items"], CardRow),
        (schema["properties"]["memory_fit"]["items"], CardFitRow),
        *((schema["properties"]["memory_fit"]["items"]["properties"][k], CardFit) for k in FIT_KINDS),
    ):
        names = {field.name for field in fields(kind)}
        assert set(part["properties"]) == set(part["required"]) == names
        assert part["additionalProperties"] is False


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_refused_does_not_fit_the_schema_either(documented, made, change):
    """But for the order of limits, which no schema can say."""
    told = change(json.loads(made[2]))
    row = told["rows"][0] if isinstance(told["rows"], list) else {}
    disordered = isinstance(row.get("estimate"), float) and not row["low"] <= row["estimate"] <= row["high"]
    pairs = told["spec"]["options"] == [["a"]]
    assert fits(documented[1], told) == (disordered or pairs)
