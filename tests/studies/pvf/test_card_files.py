"""A card's campaign again, by ``--config CARD.json --find DIR``: the files it needs are found by their content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch

from conftest import TINY, in_process
from unsilent.basics.errors import UsageError
from unsilent.studies.pvf.card import card_json, card_text, checksum, read_card
from unsilent.studies.pvf.card_files import find_contents
from unsilent.studies.pvf.file_hashes import content_hash
from unsilent.studies.pvf.kind import PvfStore

WORKLOAD = (
    TINY
    + """

def loaded(weights, data, scale=1.0):
    model = Tiny().eval()
    model.load_state_dict(torch.load(weights))
    return unsilent.Workload(model, [x * scale for x in torch.load(data)], name="loaded")
"""
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder with the campaign of somebody else, its card c.json, and the files it needs."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "tiny.py").write_text(WORKLOAD)
    names: dict = {}
    exec(compile(TINY, "tiny.py", "exec"), names)
    torch.save(names["Tiny"]().state_dict(), folder / "w.pt")
    torch.save(names["batches"](), folder / "d.pt")
    words = (
        "tiny.py:loaded",
        "--weights",
        "w.pt",
        "--data",
        "d.pt",
        "--with",
        "scale=2",
        "--trials",
        20,
        "--flips",
        "1,3",
    )
    done = in_process("pvf", *words, "--store", "s.sqlite", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    done = in_process("report", "s.sqlite", "--card", "-o", "c.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def mine(shared, tmp_path):
    """A folder of one's own: the card, and the files in other places among others of their names."""
    for place in ("files/code", "files/model", "files/old"):
        (tmp_path / place).mkdir(parents=True)
    shutil.copy(shared / "c.json", tmp_path)
    shutil.copy(shared / "tiny.py", tmp_path / "files" / "code")
    for name in ("w.pt", "d.pt"):
        shutil.copy(shared / name, tmp_path / "files" / "model")
        (tmp_path / "files" / "old" / name).write_bytes(b"another")
    (tmp_path / "files" / "old" / "tiny.py").write_text("raise SystemExit('this is not the file of the card')")
    return tmp_path


def again(folder, *words, card="c.json"):
    return in_process("pvf", "--config", card, "--find", "files", "--store", "again.sqlite", *words, cwd=folder)


def rows(path):
    with PvfStore(path) as store:
        return store.baseline.campaign, sorted(str(row.reproducible_values()) for row in store.rows())


def test_the_hashes_in_a_card_are_those_of_its_files(shared):
    told = json.loads((shared / "c.json").read_text())
    names = {"workload": "tiny.py", "weights": "w.pt", "data": "d.pt"}
    assert told["files"] == {
        key: hashlib.sha256((shared / name).read_bytes()).hexdigest() for key, name in names.items()
    }


def test_the_same_trials_run_from_files_that_lie_elsewhere(shared, mine):
    done = again(mine, "--quiet")
    assert done.returncode == 0, done.stderr
    assert "the campaign is that of c.json" in done.stderr
    assert rows(mine / "again.sqlite") == rows(shared / "s.sqlite")
    with PvfStore(mine / "again.sqlite") as store:
        assert "--find" not in store.largest_budget()[1]
        assert "files/code/tiny.py:loaded" in store.largest_budget()[1]


def test_files_with_other_names_are_found(shared, mine):
    (mine / "files" / "model" / "w.pt").rename(mine / "files" / "model" / "renamed.pt")
    done = again(mine, "--quiet")
    assert done.returncode == 0, done.stderr
    assert "the campaign is that of c.json" in done.stderr
    assert rows(mine / "again.sqlite")[1] == rows(shared / "s.sqlite")[1]


def test_the_command_line_takes_precedence_and_what_differs_is_said(mine):
    done = again(mine, "--seed", 5, "--quiet")
    assert done.returncode == 0, done.stderr
    assert "not the campaign of c.json, as these differ: seed; compare estimates and intervals" in done.stderr
    with PvfStore(mine / "again.sqlite") as store:
        assert (store.spec.seed, store.spec.flips, store.spec.options) == (5, (1, 3), (("scale", "2"),))


def test_other_weights_are_said_to_differ(mine):
    model = torch.load(mine / "files" / "model" / "w.pt")
    torch.save({name: value + 1 for name, value in model.items()}, mine / "other.pt")
    done = again(mine, "--weights", "other.pt", "--quiet")
    assert done.returncode == 0, done.stderr
    assert "not the campaign of c.json, as these differ: golden, weights; compare" in done.stderr


def test_a_file_that_is_not_there_is_named(mine):
    (mine / "files" / "model" / "w.pt").write_bytes(b"changed")
    done = again(mine)
    assert done.returncode == 2
    assert "no file in files has the content of w.pt (SHA-256 " in done.stderr
    assert "give --weights to use another one" in done.stderr
    assert done.stderr.count("\n") == 1


def forged(folder, **changes):
    """A changed card with a checksum that fits."""
    card = replace(read_card(folder / "c.json"), **changes)
    (folder / "forged.json").write_text(card_text(replace(card, sha256=checksum(card_json(card)))))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"command": "unsilent.pvf(workload, trials=20)"}, "its command is a Python call"),
        ({"command": "unsilent pvf 'x"}, "its command cannot be read"),
        ({"command": "unsilent merge a b"}, "its command is no unsilent pvf"),
        ({"files": {}}, "has no hash of tiny.py"),
    ],
)
def test_a_card_that_cannot_be_run_is_refused(mine, changes, said):
    forged(mine, **changes)
    done = again(mine, card="forged.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_card_does_not_choose_where_anything_is_written_or_what_is_imported(mine):
    card = read_card(mine / "c.json")
    elsewhere = "--store stolen.sqlite -o stolen.html --jobs 7 --config x.toml --assert 'a<=1' --faults stolen.jsonl"
    forged(mine, command=f"{card.command} {elsewhere}")
    done = again(mine, "--quiet", card="forged.json")
    assert done.returncode == 0, done.stderr
    assert not list(mine.glob("stolen*"))
    for workload in ("os:system", "evil.py", "/bin/evil"):
        spec = replace(card.spec, workload=workload, options=())
        forged(mine, spec=spec, command=f"unsilent pvf {workload} --with command=x")
        done = again(mine, card="forged.json")
        assert done.returncode == 2
        assert f"names the workload {workload}, which is neither built in nor a file; name it on" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pvf", "--config", "c.json"), "needs files; give the folder that has them: --find DIR"),
        (("pvf", "digits-cnn", "--find", "files"), "--find is only used with a card: --config CARD.json"),
        (("noise", "--config", "c.json"), "c.json is a card of unsilent pvf; give it to unsilent pvf --config"),
        (("pvf", "--config", "c.json", "--find", "nowhere"), "--find is 'nowhere'; expected a folder"),
    ],
)
def test_cards_are_taken_by_pvf_alone(mine, words, said):
    done = in_process(*words, cwd=mine)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_folder_has_the_hash_of_what_is_in_it(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "x").write_text("x")
        (tmp_path / name / "y").write_text("y")
    assert content_hash(tmp_path / "a") == content_hash(tmp_path / "b")
    (tmp_path / "b" / "y").rename(tmp_path / "b" / "z")
    assert content_hash(tmp_path / "a") != content_hash(tmp_path / "b")
    wanted = content_hash(tmp_path / "b")
    assert find_contents(tmp_path, wanted, tmp_path / "elsewhere" / "b", is_folder=True) == tmp_path / "b"


def test_what_is_no_file_is_passed_over(tmp_path):
    (tmp_path / "x.py").write_text("x")
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "gone.py").symlink_to(tmp_path / "missing.py")
    assert find_contents(tmp_path, content_hash(tmp_path / "x.py"), tmp_path / "pipe.py") == tmp_path / "x.py"
    assert find_contents(tmp_path, "0" * 64, tmp_path / "x.py") is None
    with pytest.raises(UsageError, match="cannot read"):
        content_hash(tmp_path / "missing")
