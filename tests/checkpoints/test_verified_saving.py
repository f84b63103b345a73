"""`verified_save` and `verified_load`: kills at every call, threads, processes, links, full disks, and unusual states."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import threading
import warnings

import pytest
import torch
from torch.distributed.checkpoint import load as dcp_load

import unsilent
from checkpoints.killed_saves import SYSTEM_CALLS, leftovers, run_killed, run_killed_by_system_call
from unsilent.basics.errors import UsageError
from unsilent.checkpoints import replacing, verified_saving, writing
from unsilent.checkpoints.manifest import manifest_path
from unsilent.checkpoints.verified_saving import CheckpointDamaged, verify_saved
from unsilent.cli.main import run

NAMES = ("w.pt", "w.safetensors", "w")


def state(value):
    return {"w": torch.full((3,), float(value))}


def loaded(path):
    """The value that is loaded from a verified checkpoint."""
    result = unsilent.verified_load(path)
    if path.is_dir():
        result = state(-1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a single process
            dcp_load(result, checkpoint_id=str(path), no_dist=True)
    return int(result["w"][0])


def check_kills(path, run_killed, numbers):
    """Kill a save before each of the numbered calls: a verified checkpoint is there, of the save or the one before."""
    unsilent.verified_save(state(0), path)
    values = [0]
    for number in numbers:
        ended = run_killed(number, lambda value=number + 1: unsilent.verified_save(state(value), path))
        values.append(loaded(path))
        assert values[-1] in (number + 1, values[-2])
        if ended:
            break
    assert ended
    assert len(values) > 8
    assert values[-1] == number + 1
    assert len(set(values)) > 2, "some kills are early, and some after the new checkpoint is in place"
    assert run(["checkpoint", "verify", str(path)]) == 0
    assert leftovers(path.parent) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_kill_before_any_third_call_leaves_a_verified_checkpoint(name, tmp_path):
    check_kills(tmp_path / name, run_killed, range(0, 1000, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_kill_before_any_call_leaves_a_verified_checkpoint(name, tmp_path):
    check_kills(tmp_path / name, run_killed, range(1000))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
@pytest.mark.parametrize("name", NAMES)
def test_a_kill_at_any_system_call_leaves_a_verified_checkpoint(name, tmp_path):
    path, values = tmp_path / name, [0]
    unsilent.verified_save(state(0), path)
    for call in SYSTEM_CALLS:
        for number in range(1, 1000):
            value = len(values)
            ended = run_killed_by_system_call(
                call, number, lambda value=value: unsilent.verified_save(state(value), path)
            )
            values.append(loaded(path))
            assert values[-1] in (value, values[-2])
            if ended:
                break
        assert ended
    assert len(values) > 60
    assert len(set(values)) > len(SYSTEM_CALLS) + 5, "some kills are after the new checkpoint is in place"
    unsilent.verified_save(state(0), path)
    assert leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_kill_of_one_of_two_processes_leaves_a_verified_checkpoint(name, tmp_path):
    path = tmp_path / name
    unsilent.verified_save(state(0), path)
    for number in range(1000):
        other = os.fork()
        if other == 0:
            try:
                unsilent.verified_save(state(1000 + number), path)
            finally:
                os._exit(0)
        ended = run_killed(number, lambda value=number + 1: unsilent.verified_save(state(value), path))
        os.waitpid(other, 0)
        assert loaded(path) in (number + 1, 1000 + number)
        if ended:
            break
    assert number > 15


def test_the_next_save_removes_what_a_kill_left(tmp_path):
    path = tmp_path / "w.pt"
    unsilent.verified_save(state(0), path)
    assert not run_killed(8, lambda: unsilent.verified_save(state(1), path))
    assert len(leftovers(tmp_path)) == 1
    unsilent.verified_save(state(2), tmp_path / "other.pt")
    assert leftovers(tmp_path) == []


def test_threads_save_to_one_path(tmp_path):
    path, errors = tmp_path / "w.pt", []

    def save(value):
        try:
            unsilent.verified_save(state(value), path)
            loaded(path)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(value,)) for value in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert loaded(path) in range(24)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.pt", "w.pt.manifest.json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_link_stays_one(name, tmp_path):
    (tmp_path / "store").mkdir()
    path, link = tmp_path / "store" / name, tmp_path / f"latest-{name}"
    unsilent.verified_save(state(1), path)
    link.symlink_to(path)
    assert unsilent.verified_save(state(2), link, format_name="dcp" if name == "w" else None) == manifest_path(path)
    assert link.is_symlink()
    assert (loaded(link), loaded(path)) == (2, 2)


@pytest.mark.parametrize("failing", ["write", "fsync", "rename"])
def test_a_full_disk_leaves_the_older_checkpoint(failing, tmp_path, monkeypatch):
    path = tmp_path / "w.pt"
    unsilent.verified_save(state(1), path)

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "write":
        monkeypatch.setattr(writing.HashingFile, "write", full)
    else:
        monkeypatch.setattr(os, failing, full)
    with pytest.raises(UsageError, match="No space left on device"):
        unsilent.verified_save(state(2), path)
    monkeypatch.undo()
    assert loaded(path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.pt", "w.pt.manifest.json"]


def test_a_folder_and_a_file_do_not_replace_each_other(tmp_path):
    unsilent.verified_save(state(1), tmp_path / "w")
    unsilent.verified_save(state(1), tmp_path / "w.pt")
    with pytest.raises(UsageError, match=r"is a folder, and torch\.save would write a file"):
        unsilent.verified_save(state(2), tmp_path / "w", format_name="torch.save")
    with pytest.raises(UsageError, match="is a file, and dcp would write a folder"):
        unsilent.verified_save(state(2), tmp_path / "w.pt", format_name="dcp")


def test_a_checkpoint_that_is_replaced_while_it_is_verified_is_verified_again(tmp_path, monkeypatch):
    path, plain = tmp_path / "w.pt", replacing.read_manifest
    unsilent.verified_save(state(1), path)

    def read_late(file):
        manifest = plain(file)
        if loaded_once.pop() if loaded_once else False:
            unsilent.verified_save(state(2), path)
        return manifest

    loaded_once = [True]
    monkeypatch.setattr(replacing, "read_manifest", read_late)
    assert loaded(path) == 2


# What is written differs from what was to be written.


@pytest.mark.parametrize("where", ["pickle", "elements"])
def test_bytes_that_change_on_their_way_to_the_disk_are_found(where, tmp_path, monkeypatch):
    path = tmp_path / "w.pt"
    unsilent.verified_save(state(1), path)
    plain = verified_saving.forget_cached_pages

    def change(draft):
        content = bytearray(draft.read_bytes())
        content[content.index(b"epoch" if where == "pickle" else torch.full((3,), 2.0).numpy().tobytes())] ^= 1
        draft.write_bytes(content)
        plain(draft)

    monkeypatch.setattr(verified_saving, "forget_cached_pages", change)
    with pytest.raises(CheckpointDamaged, match="as it was written"):
        unsilent.verified_save({**state(2), "epoch": 4}, path)
    monkeypatch.undo()
    assert loaded(path) == 1


def test_elements_that_change_between_memory_and_writing_are_found(tmp_path, monkeypatch):
    tensors, plain = {"w": torch.ones(3)}, verified_saving.write_state

    def change(state, *rest):
        state["w"][1] = 5
        return plain(state, *rest)

    monkeypatch.setattr(verified_saving, "write_state", change)
    with pytest.raises(CheckpointDamaged, match="model/w of .* as it was in memory"):
        unsilent.verified_save(tensors, tmp_path / "w.pt")
    assert list(tmp_path.iterdir()) == []


# States.


def quantised(value=1.0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and found in files
        return torch.quantize_per_tensor(torch.full((4,), value), 0.5, 3, torch.qint8)


COMPLEX = torch.tensor([1 + 2j, 3 - 4j])
SAVED = {
    "negative view": {"w": COMPLEX.conj().imag},
    "conjugate": {"w": COMPLEX.conj()},
    "quantised": {"w": quantised()},
    "scales": {"w": torch.full((4,), 0.5).to(torch.float8_e8m0fnu)},
    "view": {"w": torch.arange(12.0).view(3, 4).t()[1:]},
    "expanded": {"w": torch.ones(1).expand(7)},
    "empty": {"w": torch.ones(0, 3)},
    "number": {"w": torch.ones(()), "epoch": 3, "name": "x", "none": None},
    "bfloat16": {"w": torch.ones(3, dtype=torch.bfloat16)},
}


REFUSED = {(".safetensors", name) for name in ("quantised", "view", "expanded", "number")}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("ending", [".pt", ".safetensors", ""])
@pytest.mark.parametrize("name", SAVED)
def test_healthy_states_are_saved_or_refused_in_one_line(name, ending, tmp_path):
    path = tmp_path / f"w{ending}"
    if (ending, name) in REFUSED:
        with pytest.raises(UsageError) as caught:
            unsilent.verified_save(SAVED[name], path)
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []
        return
    unsilent.verified_save(SAVED[name], path)
    result, wanted = unsilent.verified_load(path), SAVED[name]["w"]
    result = loaded_folder(result, wanted) if path.is_dir() else result["w"]
    assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
    if wanted.is_quantized:
        result, wanted = result.dequantize(), wanted.dequantize()
    assert torch.equal(result.to(torch.complex64), wanted.to(torch.complex64))


def loaded_folder(path, like):
    """The tensor ``w`` of a distributed checkpoint, loaded into memory that has other values."""
    state = {"w": quantised(0.0) if like.is_quantized else torch.zeros(like.shape, dtype=like.dtype)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed is disabled
        dcp_load(state, checkpoint_id=path, no_dist=True)
    return state["w"]


def cyclic():
    result = {"w": torch.ones(2)}
    result["itself"] = result
    return result


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: {"w": torch.eye(3).to_sparse()}, "sparse_coo"),
        (lambda: {"w": torch.ones(3, device="meta")}, "on the device meta"),
        (lambda: {"w": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}, "jagged"),
        (cyclic, "contains itself"),
    ],
)
@pytest.mark.parametrize("ending", [".pt", ".safetensors", ""])
def test_states_that_cannot_be_compared_are_refused_in_one_line(made, why, ending, tmp_path):
    with pytest.raises(UsageError) as caught:
        unsilent.verified_save(made(), tmp_path / f"w{ending}")
    assert "\n" not in str(caught.value)
    assert why in str(caught.value) or "is no tensor" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_is_refused_by_safetensors_in_one_line(tmp_path):
    memory = torch.ones(6)
    with pytest.raises(UsageError, match="safetensors cannot save this state") as caught:
        unsilent.verified_save({"a": memory[:4], "b": memory[2:]}, tmp_path / "w.safetensors")
    assert "\n" not in str(caught.value)


def test_tensors_of_several_ranks_are_refused_in_one_line(tmp_path):
    class Spread(torch.Tensor):
        def to_local(self):
            return self

    with pytest.raises(UsageError, match="spread over ranks"):
        unsilent.verified_save({"w": torch.ones(2).as_subclass(Spread)}, tmp_path / "w.pt")


def test_what_something_else_saved_is_compared_with_memory(tmp_path):
    torch.save(state(1), tmp_path / "w.pt")
    path = verify_saved(state(1), tmp_path / "w.pt")
    assert json.loads(path.read_text())["checkpoint"] == "w.pt"
    with pytest.raises(CheckpointDamaged, match="model/w"):
        verify_saved(state(2), tmp_path / "w.pt")


# What must not be lost, and what is refused.


@pytest.mark.parametrize("path", ["results", ".", "", "results/"])
def test_a_folder_with_other_files_is_never_replaced(path, tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.txt").write_text("precious")
    monkeypatch.chdir(tmp_path if path.startswith("results") else tmp_path / "results")
    with pytest.raises(UsageError):
        unsilent.verified_save(state(1), path)
    assert (tmp_path / "results" / "thesis.txt").read_text() == "precious"
    assert [p.name for p in tmp_path.iterdir()] == ["results"]


def test_a_checkpoint_with_a_file_of_somebody_is_never_replaced(tmp_path):
    unsilent.verified_save(state(1), tmp_path / "w")
    (tmp_path / "w" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        unsilent.verified_save(state(2), tmp_path / "w")
    assert (tmp_path / "w" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("path", ["a\0b.pt", "~nobody-at-all/w.pt", "/", "missing/w.pt", "w.unknown"])
@pytest.mark.parametrize("function", [lambda path: unsilent.verified_save(state(1), path), unsilent.verified_load])
def test_paths_that_cannot_be_are_refused_in_one_line(path, function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        function(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit", [0, 500, 1000, 1500, 5000])
def test_a_file_that_cannot_grow_is_one_line(name, limit, tmp_path):
    path = tmp_path / name
    unsilent.verified_save({"w": torch.ones(3)}, path)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            unsilent.verified_save({"w": torch.ones(5000)}, path)
        except UsageError as error:
            code = 3 if "\n" not in str(error) and "cannot write" in str(error) else 4
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 3
    assert loaded(path) == 1 if name != "w" else verified_saving.verified_load(path) == path
    assert leftovers(tmp_path) == []


def test_keys_that_are_no_names_are_refused_by_safetensors(tmp_path):
    with pytest.raises(UsageError, match="safetensors cannot save this state"):
        unsilent.verified_save({0: torch.ones(2)}, tmp_path / "w.safetensors")


def test_a_state_that_torch_does_not_load_without_trust_says_so(tmp_path):
    unsilent.verified_save({"w": torch.ones(2), "made": threading.Barrier}, tmp_path / "w.pt")
    with pytest.raises(UsageError, match="weights_only=False") as caught:
        unsilent.verified_load(tmp_path / "w.pt")
    assert "\n" not in str(caught.value)
    assert unsilent.verified_load(tmp_path / "w.pt", weights_only=False)["made"] is threading.Barrier


# Manifests next to each other.


def killed_between(tmp_path, monkeypatch):
    """A checkpoint of which a save was killed before its pending manifest was renamed."""
    path = tmp_path / "w.pt"
    unsilent.verified_save(state(1), path)
    plain = os.rename

    def stopped(old, new):
        if str(old).endswith(".pending"):
            raise KeyboardInterrupt
        plain(old, new)

    monkeypatch.setattr(os, "rename", stopped)
    with pytest.raises(KeyboardInterrupt):
        unsilent.verified_save(state(2), path)
    monkeypatch.undo()
    assert loaded(path) == 2
    return path, path.with_name(".w.pt.manifest.json.pending")


@pytest.mark.parametrize("how", ["command", "verify_saved"])
def test_a_newer_manifest_replaces_a_pending_one(how, tmp_path, monkeypatch):
    path, pending = killed_between(tmp_path, monkeypatch)
    older = path.read_bytes()
    torch.save(state(3), path)
    if how == "command":
        assert run(["checkpoint", "manifest", str(path)]) == 0
    else:
        verify_saved(state(3), path)
    assert not pending.exists()
    path.write_bytes(older)
    with pytest.raises(CheckpointDamaged):
        unsilent.verified_load(path)


def test_of_two_manifests_one_may_be_damaged(tmp_path, monkeypatch):
    path, pending = killed_between(tmp_path, monkeypatch)
    manifest_path(path).write_text("damaged")
    assert loaded(path) == 2
    path, pending = killed_between(tmp_path, monkeypatch)
    pending.write_text("damaged")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged):
        unsilent.verified_load(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_readers_while_something_saves(name, tmp_path):
    path = tmp_path / name
    unsilent.verified_save(state(0), path)
    child = os.fork()
    if child == 0:
        try:
            for value in range(200):
                unsilent.verified_save(state(value), path)
        finally:
            os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        unsilent.verified_load(path)
