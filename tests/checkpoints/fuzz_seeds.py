"""Sound checkpoints of every known format, from which damaged ones are made; a new format adds one row to `MAKERS`."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from unsilent.checkpoints.formats.known import FORMATS

BOMB_COMMAND = "touch bomb_went_off"


class Maker(NamedTuple):
    """Seeds of one format.

    Attributes:
        write: Writes some checkpoints into a folder.
        share: How often the format is drawn; those that start a process for each file are slow.
    """

    write: Callable[[Path], None]
    share: float = 1.0


class Bomb:
    """Runs a command where it is unpickled."""

    def __reduce__(self):
        return os.system, (BOMB_COMMAND,)


def training() -> dict[str, object]:
    """What a training script saves: a model, an optimizer after a step, and numbers."""
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3).bfloat16())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.step()
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "loss": 0.25,
        "rng": torch.arange(40, dtype=torch.uint8), "cursor": [1, 2.5, (3, "four")],
    }  # fmt: skip


def views() -> dict[str, object]:
    """Tensors that share a storage, strided ones, scalars and empty ones, and dtypes without a codec."""
    base = torch.arange(60, dtype=torch.float32)
    return {
        "whole": base, "transposed": base.view(6, 10).t(), "every_third": base[1::3], "one": base[7], "again": base,
        "expanded": torch.ones(1).expand(50), "empty": torch.empty(0, 4), "complex": torch.ones(3, dtype=torch.complex64),
        "float8": torch.ones(9).to(torch.float8_e4m3fn), "bool": torch.ones(3, dtype=torch.bool), "half": torch.ones(9).half(),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)), "bytes": b"abc", "unsigned": torch.ones(2, dtype=torch.uint16),
    }  # fmt: skip


def _torch_zip(folder: Path) -> None:
    torch.save(training(), folder / "training.pt")
    torch.save(views(), folder / "views.pt")
    torch.save({"model": {"w": torch.ones(2, 3)}, "code": Bomb()}, folder / "bomb.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(4, 4), "lr": 0.5}, folder / "no_crc.pt")
    finally:
        torch.serialization.set_crc32_options(True)


def _safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = {
        "layer.weight": torch.arange(24.0).reshape(4, 6), "layer.bias": torch.arange(6).bfloat16(),
        "eight": torch.ones(10).to(torch.float8_e5m2), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3),
        "counter": torch.arange(5), "mask": torch.ones(4, dtype=torch.bool),
    }  # fmt: skip
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sharded = folder / "sharded"
    sharded.mkdir()
    save_file({"a": torch.ones(3, 3)}, sharded / "model-1-of-2.safetensors")
    save_file({"b": torch.zeros(5)}, sharded / "model-2-of-2.safetensors")
    index = '{"metadata": {}, "weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}'
    (sharded / "model.safetensors.index.json").write_text(index)


def _dcp(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, state in (("training", training()), ("views", {"w": torch.arange(12.0).reshape(3, 4).t(), "lr": 0.5})):
            writer = FileSystemWriter(folder / name, sync_files=False, thread_count=1)
            dcp.save(state, storage_writer=writer, no_dist=True)
    bomb = folder / "bomb"
    bomb.mkdir()
    (bomb / ".metadata").write_bytes(pickle.dumps(Bomb()))


def _hdf5_content() -> bytes:
    import h5py

    content = io.BytesIO()
    rng = np.random.default_rng(4)
    with h5py.File(content, "w") as file:
        file["layers/dense/vars/0"] = rng.normal(size=(6, 7)).astype("f4")
        file["layers/dense/vars/1"] = np.arange(7, dtype=">f8")
        file.create_dataset("chunked", data=rng.normal(size=(9, 9)).astype("f2"), chunks=(4, 4), fletcher32=True)
        zeros = np.zeros((40, 8), "f4")
        zeros[::9] = 1.5
        file.create_dataset("packed", data=zeros, chunks=(20, 8), compression="gzip", shuffle=True, fletcher32=True)
        file["scalar"], file["text"], file["count"] = 2.5, "abc", np.arange(3)
    return content.getvalue()


def _hdf5(folder: Path) -> None:
    (folder / "model.h5").write_bytes(_hdf5_content())


def _keras(folder: Path) -> None:
    with zipfile.ZipFile(folder / "model.keras", "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", '{"module": "keras"}')
        archive.writestr("model.weights.h5", _hdf5_content())


MAKERS: dict[str, Maker] = {
    "torch.save": Maker(_torch_zip),
    "torch.distributed.checkpoint": Maker(_dcp, 0.5),
    "safetensors": Maker(_safetensors),
    "HDF5": Maker(_hdf5, 0.02),
    "Keras": Maker(_keras, 0.01),
}


def write_seeds(folder: Path) -> dict[str, list[Path]]:
    """Write all seeds, those of a format in a folder of its own; those whose library is missing are left out.

    Returns:
        Paths of checkpoints by format.
    """
    result = {}
    for known in FORMATS:
        own = folder / known.name
        own.mkdir(parents=True)
        with contextlib.suppress(ImportError):
            MAKERS[known.name].write(own)
        if seeds := sorted(own.iterdir()):
            result[known.name] = seeds
    return result
