"""Sound checkpoints of every known format, from which damaged ones are made; a new format adds one row to `MAKERS`."""

from __future__ import annotations

import contextlib
import io
import json
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
    torch.save(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)), folder / "module.pt")
    torch.save([torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]).state_dict()] * 2, folder / "optimizers.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.script(torch.nn.Linear(3, 2)).save(str(folder / "script.pt"))
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
    scales = {"w": torch.ones(4, 4).to(torch.float8_e4m3fn), "scale": torch.full((4,), 0.5).to(torch.float8_e8m0fnu)}
    save_file(scales, folder / "scales.safetensors")
    fields = {"pairs": ("F4", [2, 6], 0, 6), "odd": ("F4", [2, 3], 6, 9), "six": ("F6_E2M3", [4], 9, 12)}
    header = {name: {"dtype": d, "shape": s, "data_offsets": [a, b]} for name, (d, s, a, b) in fields.items()}
    text = json.dumps(header).encode()
    (folder / "packed.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(12)))
    sharded = folder / "sharded"
    sharded.mkdir()
    save_file({"a": torch.ones(3, 3)}, sharded / "model-1-of-2.safetensors")
    save_file({"b": torch.zeros(5)}, sharded / "model-2-of-2.safetensors")
    index = '{"metadata": {}, "weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}'
    (sharded / "model.safetensors.index.json").write_text(index)


def _trainer(folder: Path) -> None:
    """What a Trainer writes, with safetensors and with the model in ``pytorch_model.bin``."""
    from safetensors.torch import save_file

    state = training()
    model = {name: torch.ones(4, 3) * n for n, name in enumerate(("a.weight", "b.weight"))}
    for name in ("safetensors", "bin"):
        own = folder / name
        own.mkdir()
        if name == "safetensors":
            save_file(model, own / "model.safetensors", metadata={"format": "pt"})
        else:
            torch.save(model, own / "pytorch_model.bin")
        torch.save(state["optimizer"], own / "optimizer.pt")
        torch.save({"last_epoch": 4, "_last_lr": [0.5]}, own / "scheduler.pt")
        numpy_state = np.random.RandomState(1).get_state()
        torch.save({"numpy": numpy_state, "cpu": torch.zeros(50, dtype=torch.uint8)}, own / "rng_state.pth")
        torch.save({"args": Bomb()}, own / "training_args.bin")
        (own / "trainer_state.json").write_text('{"global_step": 4}')


def _dcp(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, state in (
            ("training", training()),
            ("views", {"w": torch.arange(12.0).reshape(3, 4).t(), "lr": 0.5}),
        ):
            writer = FileSystemWriter(folder / name, sync_files=False, thread_count=1)
            dcp.save(state, storage_writer=writer, no_dist=True)
    bomb = folder / "bomb"
    bomb.mkdir()
    (bomb / ".metadata").write_bytes(pickle.dumps(Bomb()))


def _legacy(folder: Path) -> None:
    torch.save(training(), folder / "training.pt", _use_new_zipfile_serialization=False)
    torch.save(views(), folder / "views.pt", _use_new_zipfile_serialization=False)
    (folder / "bomb.pt").write_bytes(pickle.dumps(Bomb()))


def _deepspeed(folder: Path) -> None:
    """Stage 2 and stage 3, two ranks each, one group of two parameters with six elements."""
    shapes = {"a": torch.Size((2, 2)), "b": torch.Size((2,))}
    for stage in (2, 3):
        own = folder / f"stage{stage}"
        own.mkdir()
        model = {"buffer_names": [], "param_shapes": [shapes], "global_steps": 12}
        if stage == 2:
            whole = {"module": {name: torch.ones(shape).bfloat16() for name, shape in shapes.items()}}
            torch.save(model | whole, own / "mp_rank_00_model_states.pt")
        for rank in range(2):
            if stage == 3:
                empty = {"module": {name: torch.zeros(0) for name in shapes}, "frozen_param_shapes": None}
                torch.save(model | empty, own / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            state = {key: torch.arange(3.0) + rank for key in ("exp_avg", "exp_avg_sq")}
            base = {"state": {0: {"step": torch.tensor(3.0)} | state}, "param_groups": [{"lr": 0.01, "params": [0]}]}
            masters = [torch.arange(3.0) - rank]
            zero = {"zero_stage": stage, "loss_scaler": Bomb()} | (
                {"partition_count": 2, "optimizer_state_dict": base, "fp32_flat_groups": masters}
                if stage == 3
                else {
                    "partition_count": [2], "base_optimizer_state": base, "single_partition_of_fp32_groups": masters,
                    "param_alignment_paddings": [[0, 0]],
                }
            )  # fmt: skip
            name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": zero, "ds_version": "0.19.8"}, own / name)


def _orbax(folder: Path) -> None:
    """What version 0.12.8 writes, without the elements: OCDBT, zarr, and a step of a manager."""
    value = {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": [3, 4]}
    keys = [{"key": key, "key_type": 2} for key in ("params", "fc", "kernel")]
    scalar = {"key_metadata": [{"key": "lr", "key_type": 2}], "value_metadata": {"value_type": "scalar"}}
    tree = {"('params', 'fc', 'kernel')": {"key_metadata": keys, "value_metadata": value}, "('lr',)": scalar}
    for name, inside, use_ocdbt in (("ocdbt", "", True), ("zarr", "", False), ("step", "default", True)):
        own = folder / name / inside
        own.mkdir(parents=True)
        (own / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "use_ocdbt": use_ocdbt}))
    (folder / "ocdbt" / "manifest.ocdbt").write_bytes(b"\x0c\xdb\x3a\x2a" + bytes(100))
    (folder / "zarr" / "params.fc.kernel").mkdir()
    (folder / "zarr" / "params.fc.kernel" / ".zarray").write_text('{"dtype": "<f4", "shape": [6, 4], "zarr_format": 2}')
    (folder / "step" / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {"default": "H"}}')


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
    "torch.save (legacy)": Maker(_legacy),
    "DeepSpeed": Maker(_deepspeed, 0.5),
    "transformers": Maker(_trainer, 0.5),
    "safetensors": Maker(_safetensors),
    "Orbax": Maker(_orbax, 0.3),
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
