"""Folders of torch.distributed.checkpoint: one bit changes one element for torch's own loader, and nothing hostile runs."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.state_dict import get_state_dict

from checkpoint_checks import (
    DTYPES,
    assert_cut_files_are_refused,
    assert_damage_raises_usage_errors,
    assert_one_word_differs,
    bits_of,
    bytes_of,
    content,
    flipped,
    one_of_each_dtype,
    only_usage_errors,
    refused,
    words,
)
from unsilent.checkpoints.checkpoint import Checkpoint


@contextlib.contextmanager
def alone():
    """In one process, of which torch warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def save(state, path, **options):
    writer = FileSystemWriter(path, sync_files=False, **options)
    with alone():
        dcp.save(state, storage_writer=writer)


def loaded(path, state):
    empty = {key: torch.zeros_like(value) for key, value in state.items()}
    with alone():
        dcp.load(empty, checkpoint_id=path)
    return empty


def metadata_of(path):
    return pickle.loads((path / ".metadata").read_bytes())


def archives(path):
    """All archives of a folder, cut out at the places that torch's metadata give."""
    for index, info in metadata_of(path).storage_data.items():
        with open(path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            yield index.fqn, zipfile.ZipFile(io.BytesIO(file.read(info.length)))


@pytest.fixture(scope="module")
def each_dtype(tmp_path_factory):
    path = tmp_path_factory.mktemp("dcp") / "each"
    save(one_of_each_dtype(), path)
    return path


@pytest.fixture
def small(tmp_path):
    save({"model": {"w": torch.arange(6.0).reshape(2, 3)}, "lr": 0.5}, tmp_path / "small")
    return tmp_path / "small"


def edited_metadata(path, change):
    metadata = metadata_of(path)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


class TestEditing:
    @pytest.mark.parametrize("checksums", ["stale", "fixed"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_one_bit_changes_one_element_for_torchs_loader(self, each_dtype, dtype, checksums):
        state = one_of_each_dtype()
        for element, bit in zip((0, 13, 29), bits_of(dtype), strict=True):
            with flipped(each_dtype, f"model/{dtype}", element, bit, checksums):
                new = loaded(each_dtype, state)
                assert_one_word_differs(new[dtype], state[dtype], element, bit)
                assert all((words(new[other]) == words(state[other])).all() for other in state if other != dtype)
                bad = {name: archive.testzip() for name, archive in archives(each_dtype)}
                assert {name for name, entry in bad.items() if entry} == ({dtype} if checksums == "stale" else set())

    def test_a_number_is_edited_where_it_is_pickled(self, small):
        with flipped(small, "other/lr", 0, 52):
            state = {"lr": 0.0}
            with alone():
                dcp.load(state, checkpoint_id=small)
            assert state["lr"] == 1.0

    def test_strided_tensors(self, tmp_path):
        image = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
        save({"image": image, "turned": torch.arange(6.0).reshape(2, 3).t()}, tmp_path / "a")
        assert content(tmp_path / "a", "model/image") == image.contiguous().numpy().tobytes()
        assert (
            content(tmp_path / "a", "model/turned")
            == torch.arange(6.0).reshape(2, 3).t().contiguous().numpy().tobytes()
        )
        with flipped(tmp_path / "a", "model/image", 77, 30, "fixed"):
            assert_one_word_differs(loaded(tmp_path / "a", {"image": image})["image"], image, 77, 30)


class TestReading:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_content_is_the_tensors(self, each_dtype, dtype):
        assert content(each_dtype, f"model/{dtype}") == words(one_of_each_dtype()[dtype]).tobytes()

    @pytest.mark.parametrize("of_optimizer", ["named", "numbered"])
    def test_names_are_those_of_torch_save(self, tmp_path, of_optimizer):
        model, optimizer = trained()
        weights, named = get_state_dict(model, optimizer)
        state = {
            "model": weights,
            "optim": named if of_optimizer == "named" else optimizer.state_dict(),
            "sched": {"last_epoch": 3},
            "rng": torch.get_rng_state(),
            "note": "text",
            "parts": [1, 2.5, torch.arange(3)],
        }
        save(state, tmp_path / "folder")
        torch.save(state, tmp_path / "file.pt")
        with Checkpoint(tmp_path / "folder") as folder, Checkpoint(tmp_path / "file.pt") as file:
            assert list(folder.tensors) == list(file.tensors)
            assert "optimizer/0.weight/exp_avg" in folder.tensors
            for name, tensor in file.tensors.items():
                other = folder.tensors[name]
                assert (other.dtype, other.shape, other.value) == (tensor.dtype, tensor.shape, tensor.value)

    def test_several_files_of_one_rank(self, tmp_path):
        state = one_of_each_dtype()
        save(state, tmp_path / "a", single_file_per_rank=False)
        save(state, tmp_path / "b", thread_count=2)
        for path in (tmp_path / "a", tmp_path / "b"):
            assert len(list(path.glob("*.distcp"))) > 1
            assert all(content(path, f"model/{dtype}") == words(state[dtype]).tobytes() for dtype in DTYPES)

    def test_scalars_and_empty_tensors(self, tmp_path):
        save({"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}, tmp_path / "a")
        assert content(tmp_path / "a", "model/scalar") == torch.tensor(2.5).numpy().tobytes()
        assert content(tmp_path / "a", "model/empty") == b""

    def test_what_torch_cannot_load_is_listed_only(self, tmp_path):
        save({"w": torch.ones(2, 3)}, tmp_path / "a", serialization_format=SerializationFormat.SAFETENSORS)
        with pytest.raises(dcp.api.CheckpointException, match="weights_only"):
            loaded(tmp_path / "a", {"w": torch.ones(2, 3)})
        with Checkpoint(tmp_path / "a") as checkpoint:
            tensor = checkpoint.tensor("model/w")
            assert (tensor.dtype, tensor.shape, tensor.is_readable) == ("float32", (2, 3), False)
            assert "TORCH_SAVE" in tensor.reason_not_editable

    def test_parts_that_an_extension_transformed_are_listed_only(self, small):
        def change(metadata):
            for info in metadata.storage_data.values():
                info.transform_descriptors = ["stream.zstd/1"]

        edited_metadata(small, change)
        with Checkpoint(small) as checkpoint:
            assert checkpoint.tensor("model/w").shape == (2, 3)
            assert all("extension" in tensor.reason_not_editable for tensor in checkpoint.tensors.values())


class TestHostile:
    def test_a_place_outside_of_the_folder(self, small):
        torch.save(torch.ones(2, 3), small.parent / "secret.distcp")
        for name in (
            "../secret.distcp",
            "/etc/passwd",
            "a/../../secret.distcp",
            "",
            "a\0b",
            ".",
            "link",
            "x" * 5000,
            "\ud800",
        ):

            def change(metadata, name=name):
                for info in metadata.storage_data.values():
                    info.relative_path = name

            if name == "link":
                (small / "link").symlink_to(small.parent / "secret.distcp")
            edited_metadata(small, change)
            refused(small, "not inside|not a regular file|no file, offset|cannot read|symbolic link")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("offset", 10**9),
            ("offset", -1),
            ("length", 10**12),
            ("length", -5),
            ("length", 2**70),
            ("offset", 1),
            ("length", 30),
        ],
    )
    def test_places_beyond_the_file(self, small, field, value):
        def change(metadata):
            for info in metadata.storage_data.values():
                setattr(info, field, value)

        edited_metadata(small, change)
        refused(small, "ends at byte|no file, offset|overlap|zip file")

    def test_one_part_for_two_tensors(self, tmp_path):
        save({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "x")

        def change(metadata):
            places = list(metadata.storage_data)
            metadata.storage_data[places[0]] = metadata.storage_data[places[1]]

        edited_metadata(tmp_path / "x", change)
        refused(tmp_path / "x", "overlap")

    def test_metadata_that_do_not_fit_the_parts(self, small):
        def wrong_size(metadata):
            metadata.state_dict_metadata["model.w"].size = torch.Size([3, 2])

        def wrong_dtype(metadata):
            metadata.state_dict_metadata["model.w"].properties.dtype = torch.float64

        def no_place(metadata):
            metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != "model.w"}

        def twice(metadata):
            metadata.state_dict_metadata["model.w"].chunks *= 2

        original = bytes_of(small)[".metadata"]
        for change in (wrong_size, wrong_dtype, no_place, twice):
            (small / ".metadata").write_bytes(original)
            edited_metadata(small, change)
            refused(small, "leave elements out|does not hold|does not say")

    def test_nothing_is_unpickled(self, small, tmp_path):
        class Bomb:
            def __reduce__(self):
                return os.system, (f"touch {tmp_path}/executed",)

        original = metadata_of(small)
        for place in ("state_dict_metadata", "planner_data", "storage_meta"):
            edited_metadata(small, lambda metadata, place=place: setattr(metadata, place, Bomb()))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "system", lambda *_: pytest.fail("a pickle ran"))
                only_usage_errors(small)
            (small / ".metadata").write_bytes(pickle.dumps(original))
        assert not (tmp_path / "executed").exists()

    def test_folders_that_are_incomplete(self, small):
        (small / "__0_0.distcp").rename(small / "away")
        refused(small, "cannot read")
        (small / "away").rename(small / "__0_0.distcp")
        (small / ".metadata").unlink()
        refused(small, "no .metadata")

    def test_cut_off_anywhere(self, small):
        assert_cut_files_are_refused(small / ".metadata", small)
        assert_cut_files_are_refused(small / "__0_0.distcp", small)

    @pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
    def test_flipped_bits(self, small, file):
        assert_damage_raises_usage_errors(small / file, small, 200)


RANK = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

out, kind = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
if kind == "fsdp":
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(torch.randn(4, 5)).square().mean().backward()
optimizer.step()
weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{out}/folder")
from torch.distributed.checkpoint.state_dict import StateDictOptions
full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    torch.save({"model": full[0], "optim": full[1]}, f"{out}/file.pt")
dist.barrier()
os._exit(0)  # threads of gloo that are still alive would abort an orderly end
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_two_ranks(tmp_path, kind):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run([*command, str(script), str(tmp_path), kind], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folder, file = tmp_path / "folder", tmp_path / "file.pt"
    with Checkpoint(folder) as sharded, Checkpoint(file) as whole:
        assert set(sharded.tensors) == set(whole.tensors)
        for name, tensor in whole.tensors.items():
            if tensor.is_readable:
                assert content(folder, name) == content(file, name), name
        files = {block.file for block in sharded.tensor("model/0.weight").blocks}
        assert len(files) == (2 if kind == "fsdp" else 1)
    state = torch.load(file)["model"]
    for element in (0, 34):  # the first rank's and the last
        with flipped(folder, "model/0.weight", element, 30, "fixed"):
            new = {"model": {key: torch.zeros_like(value) for key, value in state.items()}}
            with alone():
                dcp.load(new, checkpoint_id=folder)
            assert_one_word_differs(new["model"]["0.weight"], state["0.weight"], element, 30)
            assert all(archive.testzip() is None for _, archive in archives(Path(folder)))
