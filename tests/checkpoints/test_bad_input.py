"""Checkpoints, undo records and manifests that are hostile, damaged or in use: one line of error, nothing run, nothing lost."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pickle
import subprocess
import sys
import textwrap
import time
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.comparing import compare
from unsilent.checkpoints.editing import apply_edit, edits_of, undo_edit, undo_record_of
from unsilent.checkpoints.manifest import SCHEMA, manifest_digest, manifest_path
from unsilent.checkpoints.stored_tensors import Patch
from unsilent.cli.main import run


@pytest.fixture
def path(tmp_path):
    result = tmp_path / "model.pt"
    torch.save({"model": {"w": torch.arange(24.0).reshape(4, 6), "b": torch.arange(6.0)}, "lr": 0.5}, result)
    return result


def read_all(path):
    with Checkpoint(path) as checkpoint:
        for tensor in checkpoint.tensors.values():
            for _ in checkpoint.content(tensor):
                pass


def refused(path, match):
    """The error of opening and reading all of a checkpoint."""
    with pytest.raises(UsageError, match=match) as raised:
        read_all(path)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000


def patches_of(path, name="w", count=3):
    """Patches that change some elements, far enough from each other not to be joined."""
    with Checkpoint(path) as checkpoint:
        block = checkpoint.tensor(f"model/{name}").blocks[0]
        offsets = [block.offset + 8 * n for n in range(count)]
        old = [checkpoint.files.read(block.file, offset, 4) for offset in offsets]
    return [Patch(block.file, o, b, bytes(x ^ 1 for x in b)) for o, b in zip(offsets, old, strict=True)]


def command(capsys, *arguments):
    """Exit code, what is printed, and the error of a command."""
    capsys.readouterr()
    code = run(["checkpoint", *map(str, arguments)])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert shown.err.count("\n") <= 1
    return code, shown.out, shown.err


def pickled_zip(path, content, **records):
    """A file like one of ``torch.save`` with a pickle of our own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
        for name, data in records.items():
            archive.writestr(f"archive/data/{name}", data)
    return path


# What files hold.


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_file_that_is_cut_off_is_refused_wherever_it_ends(kind, path, tmp_path):
    if kind == "safetensors":
        path = tmp_path / "model.safetensors"
        save_file({"w": torch.arange(24.0)}, path)
    whole = path.read_bytes()
    for length in sorted({*range(0, len(whole), 37), 1, 8, len(whole) - 1}):
        path.write_bytes(whole[:length])
        refused(path, ".")


def test_a_pickle_never_runs_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Bomb:
        def __reduce__(self):
            return os.system, ("touch went_off",)

    file = tmp_path / "bomb.pt"
    torch.save({"model": {"w": torch.ones(3)}, "optimizer": Bomb(), "path": [Bomb()]}, file)
    with Checkpoint(file) as checkpoint:
        assert [t.name for t in checkpoint.tensors.values() if not t.is_object] == ["model/w"]
        assert "system is not read" in checkpoint.tensor("other/optimizer").obstacle
    assert run(["checkpoint", "corrupt", str(file)]) == 0
    assert run(["checkpoint", "undo", str(file)]) == 0
    assert not (tmp_path / "went_off").exists()


def get(n):
    return b"h" + bytes([n])


def put(n):
    return b"q" + bytes([n])


NESTED = {
    "shared": b"]" + put(0) + b"".join(b"](" + get(n) + get(n) + b"e" + put(n + 1) for n in range(50)),
    "itself": b"]" + put(0) + get(0) + b"a",
    "deep": b"]" * 3000 + b"a" * 2999,
    "deep key": b"}K\x01" + b"\x85" * 3000 + b"K\x01s",
    "shared key": b"}K\x01" + put(0) + b"".join(get(n) + b"\x86" + put(n + 1) for n in range(50)) + b"K\x01s",
    "itself as key": b"}" + put(0) + b"(" + get(0) + b"l" + put(1) + get(1) + b"a" + get(1) + b"\x85K\x01s",
    "parameters": b"".join([b"ctorch._utils\n_rebuild_parameter\n"] * 3000) + b"K\x01" + b"\x85R" * 3000,
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_pickles_end_soon(name, tmp_path):
    file = pickled_zip(tmp_path / "nested.pt", b"\x80\x02" + NESTED[name] + b".")
    begin = time.process_time()
    with contextlib.suppress(UsageError), Checkpoint(file) as checkpoint:
        assert len(checkpoint.tensors) < 100
    assert time.process_time() - begin < 2


def test_many_values_of_one_name_are_told_apart_in_time(tmp_path):
    keys = (b"a" * 300 + b"%05d" % n for n in range(20_000))
    pairs = b"".join(b"X" + len(key).to_bytes(4, "little") + key + b"K\x05" for key in keys)
    with Checkpoint(pickled_zip(tmp_path / "same.pt", b"\x80\x02}(" + pairs + b"u.")) as checkpoint:
        assert len(checkpoint.tensors) == 20_000
        assert max(map(len, checkpoint.tensors)) < 330


def test_a_view_that_repeats_its_bytes_without_end_is_only_listed(tmp_path):
    file = tmp_path / "views.pt"
    one = torch.ones(1)
    torch.save({"huge": one.expand(2**40), "usual": one.expand(1000), "last": torch.ones(3)}, file)
    with Checkpoint(file) as checkpoint:
        assert "repeats the bytes" in checkpoint.tensor("model/huge").reason_not_editable
        assert not checkpoint.tensor("model/usual").reason_not_editable
        assert sum(map(len, checkpoint.content(checkpoint.tensor("model/usual")))) == 4000
    assert run(["checkpoint", "manifest", str(file)]) == 0


@pytest.mark.parametrize(("name", "why"), [("archive/data.pkl", "compressed"), ("archive/data/0", "compressed")])
def test_compressed_members_are_never_unpacked(name, why, path, capsys):
    bomb = path.with_name("bomb.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(bomb, "w") as new:
        for entry in old.namelist():
            kept = old.read(entry)
            is_bomb = entry.endswith(name.removeprefix("archive"))
            content = bytes(50_000_000) if is_bomb and "data/" in name else kept
            new.writestr(entry, content, zipfile.ZIP_DEFLATED if is_bomb else zipfile.ZIP_STORED)
    if name.endswith(".pkl"):
        refused(bomb, why)
    else:
        with Checkpoint(bomb) as checkpoint:
            assert why in checkpoint.tensor("model/w").reason_not_editable
        code, _, error = command(capsys, "corrupt", bomb, "--at", "w")
        assert (code, why in error) == (2, True)


def header_file(path, header, data=b""):
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)
    return path


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "truncated"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [2**61, 2**61 + 8]}}, "truncated"),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "does not fit"),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}}, "damaged"),
        ({"w": {"dtype": "F32", "shape": [2**61, 4], "data_offsets": [0, 8]}}, "damaged"),
        ({"w": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}}, "damaged"),
        ({"w": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, "damaged"),
        ({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "vw"}, "overlap"),
    ],
)  # fmt: skip
def test_safetensors_headers_that_lie_are_refused(header, match, tmp_path):
    refused(header_file(tmp_path / "w.safetensors", header, bytes(8)), match)


def test_names_and_dtypes_from_files_are_shown_as_one_line(tmp_path):
    header = {
        "a\x1b[31m\n": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "y" * 5000: {"dtype": "U8", "shape": [0], "data_offsets": [8, 8]},
    }
    with Checkpoint(header_file(tmp_path / "w.safetensors", header, bytes(8))) as checkpoint:
        for tensor in checkpoint.tensors.values():
            assert (tensor.name + tensor.dtype + tensor.reason_not_editable).isprintable()
            assert len(tensor.name) <= 300
        with pytest.raises(UsageError) as raised:
            checkpoint.tensor("z" * 5000)
    assert len(str(raised.value)) < 1000
    header["a\x1b[31m\n"]["dtype"] = "\x1b[2J"
    refused(header_file(tmp_path / "w.safetensors", header, bytes(8)), "dtype")


def test_a_member_with_a_control_character_in_its_name_is_shown_as_one_line(tmp_path):
    path = tmp_path / "c.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("c\x1f/data.pkl", b"\xd8 not a pickle")
        archive.writestr("c\x1f/version", "3")
    with pytest.raises(UsageError, match="cannot be read") as error:
        Checkpoint(path)
    assert str(error.value).isprintable()


def test_a_name_with_a_bracket_is_taken_as_it_is(tmp_path):
    names = ("block[0].weight", "c[1]")
    torch.save({"model": {name: torch.ones(2) for name in names}}, tmp_path / "b.pt")
    for name in names:
        assert (
            run(
                ["checkpoint", "corrupt", str(tmp_path / "b.pt"), "--at", f"model/{name}", "--fault", "bitflip:bits=30"]
            )
            == 0
        )
    changed = torch.load(tmp_path / "b.pt", weights_only=True)["model"]
    assert all((changed[name] != 1).sum() == 1 for name in names)


def test_a_sign_at_the_end_of_the_range_is_a_change_of_two(tmp_path):
    for name, value in (("one", 1.7e308), ("other", -1.7e308)):
        torch.save({"w": torch.tensor([value], dtype=torch.float64)}, tmp_path / f"{name}.pt")
    with Checkpoint(tmp_path / "one.pt") as one, Checkpoint(tmp_path / "other.pt") as other:
        (difference,) = compare(one, other)
    assert difference.largest_relative_change == 2


def test_sparse_tensors_are_listed_and_verified(tmp_path):
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    for name, tensor in (("one", dense), ("other", 2 * dense)):
        torch.save({"model": {"coo": tensor.to_sparse()}}, tmp_path / f"{name}.pt")
    assert run(["checkpoint", "manifest", str(tmp_path / "one.pt")]) == 0
    manifest = str(tmp_path / "one.pt.manifest.json")
    assert run(["checkpoint", "verify", str(tmp_path / "one.pt")]) == 0
    assert run(["checkpoint", "verify", str(tmp_path / "other.pt"), "--manifest", manifest]) == 1
    assert run(["checkpoint", "diff", str(tmp_path / "one.pt"), str(tmp_path / "other.pt")]) == 1


def test_files_of_deepspeed_may_hold_a_bare_tensor(tmp_path):
    torch.save({"module": {"w": torch.ones(2)}}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save(torch.ones(3), tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with Checkpoint(tmp_path) as checkpoint:
        assert sorted(tensor.shape for tensor in checkpoint.tensors.values()) == [(2,), (3,)]


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "x" * 5000, "\ud800", "a\0b", "", "missing.safetensors"]
)
def test_an_index_cannot_lead_out_of_its_folder(name, tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    refused(folder, ".")


# What is no file, or cannot be written.


@pytest.mark.parametrize(
    "what", ["folder", "fifo", "/dev/zero", "/dev/null", "missing", "empty", "loop", "/", ".", "~nobody-at-all/x"]
)
def test_what_is_no_checkpoint_is_refused_by_every_command(what, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / what if what.isalpha() else what
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "loop":
        path.symlink_to(path)
    for verb in ("inspect", "corrupt", "undo", "manifest", "verify"):
        code, _, error = command(capsys, verb, path)
        assert (code, error.count("\n")) == (2, 1), verb
    assert command(capsys, "diff", path, path)[0] == 2


def test_a_link_to_a_file_is_edited_where_it_leads(path, tmp_path, capsys):
    before, folder = path.read_bytes(), tmp_path / "links"
    folder.mkdir()
    link = folder / "link.pt"
    link.symlink_to(path)
    assert command(capsys, "corrupt", link)[0] == 0
    assert undo_record_of(path).exists()
    assert path.read_bytes() != before
    assert command(capsys, "undo", path)[0] == 0
    assert path.read_bytes() == before
    assert link.is_symlink()


def test_a_link_inside_of_a_folder_is_refused(tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model.safetensors"}}')
    refused(folder, "symbolic link")


def test_a_manifest_goes_next_to_a_folder_that_is_named_by_dots(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    monkeypatch.chdir(folder)
    assert command(capsys, "manifest", ".")[0] == 0
    assert (tmp_path / "sharded.manifest.json").exists()
    assert command(capsys, "verify", ".")[0] == 0


def test_a_locked_file_is_left_alone(path, capsys):
    before = path.read_bytes()
    with open(path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, _, error = command(capsys, "corrupt", path)
    assert (code, "in use" in error) == (2, True)
    assert path.read_bytes() == before
    assert not undo_record_of(path).exists()


def test_a_locked_folder_is_left_alone(tmp_path, capsys):
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        code, _, error = command(capsys, "corrupt", folder)
    finally:
        os.close(descriptor)
    assert (code, "in use" in error) == (2, True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_must_not_be_written_is_left_alone(what, path, capsys):
    before = path.read_bytes()
    (path if what == "file" else path.parent).chmod(0o555)
    try:
        code, _, error = command(capsys, "corrupt", path)
    finally:
        path.parent.chmod(0o755)
    assert (code, "cannot write" in error) == (2, True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["open", "pwrite"])
@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_record_that_cannot_be_written_leaves_all_as_it_was(name, reason, path, monkeypatch):
    before, real = path.read_bytes(), getattr(os, name)
    record, descriptors = undo_record_of(path), set()

    def failing(target, *rest):
        if name == "open":
            if os.fspath(target) == str(record):
                raise OSError(reason, os.strerror(reason))
            return real(target, *rest)
        if os.readlink(f"/proc/self/fd/{target}") == str(record):
            raise OSError(reason, os.strerror(reason))
        return real(target, *rest)

    patches = patches_of(path)
    monkeypatch.setattr(os, name, failing)
    with pytest.raises(UsageError, match="cannot write the undo record"):
        apply_edit(path, patches, {})
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert not record.exists()
    assert not descriptors


# Edits that end in the middle.


def failing_after(count, error, on=""):
    """``os.pwrite`` that raises at the given call on a file whose name ends so; later calls work again."""
    real, calls = os.pwrite, []

    def pwrite(descriptor, content, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(on):
            calls.append(offset)
            if len(calls) == count:
                raise error
        return real(descriptor, content, offset)

    return pwrite


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "I/O error"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_edit_that_fails_in_the_middle_leaves_all_as_it_was(error, count, path, monkeypatch):
    before, patches = path.read_bytes(), patches_of(path)
    monkeypatch.setattr(os, "pwrite", failing_after(count, error, ".pt"))
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UsageError):
        apply_edit(path, patches, {})
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert not undo_record_of(path).exists()
    apply_edit(path, patches, {})
    undo_edit(path)


def test_a_record_that_cannot_be_finished_leaves_all_as_it_was(path, monkeypatch):
    before, patches = path.read_bytes(), patches_of(path)
    monkeypatch.setattr(os, "pwrite", failing_after(2, OSError(errno.ENOSPC, "No space left on device"), ".jsonl"))
    with pytest.raises(UsageError, match="undo record"):
        apply_edit(path, patches, {})
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert not undo_record_of(path).exists()


def test_earlier_edits_stay_where_a_later_one_fails(path, monkeypatch):
    before = path.read_bytes()
    apply_edit(path, patches_of(path, "b"), {})
    between = path.read_bytes()
    monkeypatch.setattr(os, "pwrite", failing_after(2, OSError(errno.ENOSPC, "No space left on device"), ".pt"))
    with pytest.raises(UsageError, match="as before"):
        apply_edit(path, patches_of(path), {})
    monkeypatch.undo()
    assert path.read_bytes() == between
    assert [edit.state for edit in edits_of(path)] == ["written"]
    undo_edit(path)
    assert path.read_bytes() == before


def test_a_disk_that_stays_broken_leaves_the_record(path, monkeypatch, capsys):
    before, patches, real = path.read_bytes(), patches_of(path), os.pwrite
    written = []

    def pwrite(descriptor, content, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".pt"):
            if written:
                raise OSError(errno.EIO, "I/O error")
            written.append(offset)
        return real(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(UsageError, match="unsilent checkpoint undo"):
        apply_edit(path, patches, {})
    monkeypatch.undo()
    assert path.read_bytes() != before
    assert [edit.state for edit in edits_of(path)] == ["interrupted"]
    assert command(capsys, "undo", path)[0] == 0
    assert path.read_bytes() == before


@pytest.mark.slow
def test_a_full_disk_for_the_whole_process(path):
    """No file may grow: the undo record is cut off, the checkpoint as before."""
    before = path.read_bytes()
    code = f"""
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    from unsilent.cli.main import run
    raise SystemExit(run(["checkpoint", "corrupt", {str(path)!r}]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cannot write the undo record" in done.stderr
    assert path.read_bytes() == before
    assert not undo_record_of(path).exists()


KILLED = """
import os, signal, sys
from unsilent.cli.main import run
real, calls = os.pwrite, []
def pwrite(descriptor, content, offset):
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith(sys.argv[2]):
        calls.append(offset)
        if len(calls) == int(sys.argv[1]):
            real(descriptor, content[: len(content) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
    return real(descriptor, content, offset)
os.pwrite = pwrite
raise SystemExit(run(sys.argv[3:]))
"""


def killed(count, on, *arguments):
    """Run a command that kills itself at a write, of which half is done."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(count), on, *map(str, arguments)], capture_output=True, check=False
    )
    assert done.returncode == -9, done.stderr


@pytest.mark.slow
def test_kill_in_the_middle_of_an_edit_can_be_undone(path, capsys):
    before = path.read_bytes()
    killed(3, ".pt", "checkpoint", "corrupt", path, "--fault", "bitflip:count=6,bits=23")
    assert path.read_bytes() != before
    for verb in ("corrupt", "manifest"):
        code, _, error = command(capsys, verb, path)
        assert (code, "interrupted" in error, "unsilent checkpoint undo" in error) == (2, True, True)
    code, shown, _ = command(capsys, "inspect", path, "--plain")
    assert code == 0
    assert "interrupted" in shown
    killed(2, ".pt", "checkpoint", "undo", path)
    assert command(capsys, "undo", path)[0] == 0
    assert path.read_bytes() == before
    assert not undo_record_of(path).exists()
    assert command(capsys, "corrupt", path)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_kill_while_the_record_is_written(count, path, capsys):
    """The first line is that of the edit, the second says that it is written; half of either is as good as none."""
    before = path.read_bytes()
    killed(count, ".jsonl", "checkpoint", "corrupt", path)
    if count == 1:
        assert path.read_bytes() == before
        assert edits_of(path) == []
        assert command(capsys, "undo", path)[0] == 2
        assert command(capsys, "corrupt", path)[0] == 0
    else:
        assert [edit.state for edit in edits_of(path)] == ["interrupted"]
    assert command(capsys, "undo", path)[0] == 0
    assert path.read_bytes() == before


@pytest.mark.slow
def test_kill_while_an_undo_is_noted(path, capsys):
    before = path.read_bytes()
    assert command(capsys, "corrupt", path)[0] == 0
    killed(1, ".jsonl", "checkpoint", "undo", path)
    assert command(capsys, "undo", path)[0] == 0
    assert path.read_bytes() == before


# Undo records and manifests of others.


def entry(**changes):
    return {"version": 1, "edit": 1, "patches": [["", 0, "50", "51"]], "injection": {}, **changes}


@pytest.mark.parametrize(
    "lines",
    [
        [b"\xff\xfe"], [b"[]"], [b"null"], [b"{}"], [b"{" * 100_000],
        [entry(version=2)], [entry(version=None)], [entry(edit="x")], [entry(edit=float("inf"))], [entry(patches=[[]])],
        [entry(patches=[["", -1, "50", "51"]])], [entry(patches=[["", 2**70, "50", "51"]])],
        [entry(patches=[["", 0, "50", "5152"]])], [entry(patches=[["", 0, "zz", "51"]])], [entry(patches=[["", 0, 1, 2]])],
        [entry(patches=[["", float("inf"), "", ""]])], [{"edit": 1, "state": "written"}], [entry(patches=5)],
    ],
)  # fmt: skip
def test_undo_records_that_are_none_are_refused(lines, path, capsys):
    before = path.read_bytes()
    undo_record_of(path).write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    for verb in ("undo", "corrupt"):
        code, _, error = command(capsys, verb, path)
        assert (code, "undo record" in error) == (2, True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("file", ["../other.pt", "/etc/passwd", "x" * 3000, "\ud800", "a\0b"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_undo_records_cannot_lead_to_other_files(file, is_folder, path, tmp_path, capsys):
    other = tmp_path / "other.pt"
    other.write_bytes(b"P")
    target = path
    if is_folder:
        target = tmp_path / "sharded"
        target.mkdir()
        save_file({"w": torch.ones(2)}, target / "model.safetensors")
    undo_record_of(target).write_text(json.dumps(entry(patches=[[file, 0, "51", "50"]])) + "\n")
    code, _, error = command(capsys, "undo", target)
    assert (code, error.isascii() and error.strip().isprintable()) == (2, True)
    assert other.read_bytes() == b"P"


@pytest.mark.parametrize("patch", [["", 0, "00", "01"], ["", 2**40, "00", "01"], ["", 10**7, "", ""]])
def test_undo_refuses_bytes_that_are_neither_old_nor_new(patch, path, capsys):
    before = path.read_bytes()
    undo_record_of(path).write_text(json.dumps(entry(patches=[patch])) + "\n")
    code, _, _ = command(capsys, "undo", path)
    assert code == 2
    assert path.read_bytes() == before


def test_an_undo_record_that_is_no_file_is_refused(path, tmp_path, capsys):
    undo_record_of(path).symlink_to(tmp_path / "elsewhere")
    for verb in ("corrupt", "undo", "inspect"):
        assert command(capsys, verb, path)[0] == 2
    assert not (tmp_path / "elsewhere").exists()
    undo_record_of(path).unlink()
    os.mkfifo(undo_record_of(path))
    assert command(capsys, "corrupt", path)[0] == 2


def test_a_changed_checkpoint_is_not_undone(path, capsys):
    assert command(capsys, "corrupt", path, "--at", "w[0,0]", "--fault", "bitflip:bits=3")[0] == 0
    torch.save({"model": {"w": torch.ones(4, 6), "b": torch.ones(6)}, "lr": 0.5}, path)
    saved = path.read_bytes()
    code, _, error = command(capsys, "undo", path)
    assert (code, "changed by something else" in error) == (2, True)
    assert path.read_bytes() == saved


def test_exit_codes_of_verify_and_diff(path, tmp_path, capsys):
    other = tmp_path / "other.pt"
    other.write_bytes(path.read_bytes())
    assert command(capsys, "verify", path)[0] == 2
    assert command(capsys, "manifest", path)[0] == 0
    assert command(capsys, "verify", path)[0] == 0
    assert command(capsys, "verify", path, "--fast")[0] == 0
    assert command(capsys, "diff", path, other, "--plain")[0] == 0
    assert command(capsys, "corrupt", path, "--seed", "5")[0] == 0
    code, shown, _ = command(capsys, "verify", path)
    assert (code, "has changed" in shown) == (1, True)
    assert command(capsys, "diff", path, other, "--plain")[0] == 1
    assert command(capsys, "diff", path, tmp_path / "none")[0] == 2
    assert command(capsys, "undo", path)[0] == 0
    assert command(capsys, "verify", path)[0] == 0
    torch.save({"something": torch.ones(2)}, other)
    code, shown, _ = command(capsys, "verify", other, "--manifest", manifest_path(path))
    assert (code, "none of the tensors of the manifest" in shown) == (1, True)


GOOD = {"": {"size": 1, "xxh3_128": "", "sha256": ""}}


def with_digest(values):
    """The values of a manifest that has its own checksum."""
    values.pop("xxh3_128", None)
    return {**values, "xxh3_128": manifest_digest(values)}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", b"[]", b"\xff", b"{" * 100_000, {"schema": "unsilent/manifest/9"}, {"tensors": []}, {"numbers": {"x": "y"}},
        {"tensors": {"model/w": {"dtype": "float32", "shape": [float("inf")], "xxh3_128": ""}}}, {"files": 5}, {"files": {}},
        {"files": {"": {"size": float("nan"), "xxh3_128": "", "sha256": ""}}},
    ],
)  # fmt: skip
def test_manifests_that_are_none_are_refused(content, path, capsys):
    if isinstance(content, dict):
        content = json.dumps(
            with_digest(
                {
                    "schema": SCHEMA,
                    "checkpoint": "x",
                    "files": GOOD,
                    "tensors": {},
                    "numbers": {},
                    "skipped": [],
                    **content,
                }
            )
        ).encode()
    manifest_path(path).write_bytes(content)
    code, _, error = command(capsys, "verify", path)
    assert (code, "manifest" in error) == (2, True)


def test_a_manifest_cannot_write_to_the_terminal(path, capsys):
    assert command(capsys, "manifest", path)[0] == 0
    values = json.loads(manifest_path(path).read_text())
    values["tensors"]["model/w"]["dtype"] = "\x1b[31mred"
    values["tensors"]["\x1b[2J"] = values["tensors"]["model/b"]
    values["files"]["\x1b[2J"] = values["files"][""]
    manifest_path(path).write_text(json.dumps(with_digest(values)))
    code, shown, _ = command(capsys, "verify", path)
    assert code == 1
    assert "\x1b" not in shown


def test_pickles_of_huge_numbers_are_listed(tmp_path, capsys):
    file = pickled_zip(tmp_path / "huge.pt", pickle.dumps({"n": 1 << 100_000, "x": float("nan"), "y": 2**63}, 4))
    for verb in ("inspect", "manifest", "verify"):
        assert command(capsys, verb, file)[0] == 0
    other = pickled_zip(tmp_path / "other.pt", pickle.dumps({"n": 1 << 100_001, "x": float("nan"), "y": 2**63}, 4))
    assert command(capsys, "diff", file, file, "--plain")[0] == 0
    assert command(capsys, "diff", file, other, "--plain")[0] == 1
