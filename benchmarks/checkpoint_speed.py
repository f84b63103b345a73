"""``python -m benchmarks.checkpoint_speed [--folder DIR] [--bytes N]``: how long 1 GB checkpoints take.

To open them, to flip one bit and undo it, and to hash them. With the files in the page cache, medians of several rounds;
waiting for the disk (fsync) is timed apart. A manifest (SHA-256 and xxh3-128, read from the file) is compared with
``hashlib.sha256`` over the same bytes in memory, and the fast hash alone with reading the file, in CPU time of one thread; each
pair is measured in turns.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import shutil
import statistics
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unsilent.checkpoints.checkpoint import CHECKSUMS, Checkpoint
from unsilent.checkpoints.editing import apply_edit, undo_edit
from unsilent.checkpoints.hashes import hash_files
from unsilent.checkpoints.manifest import make_manifest
from unsilent.faults.record import Fault

ROUNDS = 3
FLIPS = 15
TENSORS = 16


def _state(size: int) -> dict[str, torch.Tensor]:
    numel = size // TENSORS // 4
    generator = torch.Generator().manual_seed(0)
    return {f"layer{n}.weight": torch.randn(numel // 1024, 1024, generator=generator) for n in range(TENSORS)}


def _torch_save(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    torch.save({"model": state}, folder / "model.pt")
    return folder / "model.pt"


def _legacy(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    torch.save({"model": state}, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    return folder / "legacy.pt"


def _safetensors(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


def _dcp(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def _hdf5(folder: Path, state: dict[str, torch.Tensor], chunks: Any = None, compression: Any = None) -> Path:
    import h5py

    with h5py.File(folder / "model.h5", "w") as file:
        for name, tensor in state.items():
            options = {"chunks": chunks, "fletcher32": True, "compression": compression} if chunks else {}
            file.create_dataset(name, data=tensor.numpy(), **options)
    return folder / "model.h5"


def _keras(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    inner = _hdf5(folder, state)
    with zipfile.ZipFile(folder / "model.keras", "w") as archive:
        archive.write(inner, "model.weights.h5")
    inner.unlink()
    return folder / "model.keras"


WRITERS: dict[str, Callable[[Path, dict[str, torch.Tensor]], Path]] = {
    "torch.save": _torch_save,
    "safetensors": _safetensors,
    "torch.distributed.checkpoint": _dcp,
    "torch.save (legacy)": _legacy,
    "HDF5": _hdf5,
    "HDF5, chunks with Fletcher-32": lambda folder, state: _hdf5(folder, state, (1024, 256)),
    "HDF5, chunks with gzip": lambda folder, state: _hdf5(folder, state, (1024, 256), "gzip"),
    "Keras": _keras,
}


class _Waiting:
    """Seconds spent in fsync while it is entered."""

    def __enter__(self) -> _Waiting:
        self.seconds, self._real = 0.0, os.fsync
        os.fsync = self._timed
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync = self._real

    def _timed(self, descriptor: int) -> None:
        begin = time.perf_counter()
        self._real(descriptor)
        self.seconds += time.perf_counter() - begin


def _clocked(action: Callable[[], object]) -> tuple[float, float, object]:
    """Seconds of the clock without fsync, seconds in fsync, and the result."""
    with _Waiting() as waiting:
        begin = time.perf_counter()
        result = action()
        total = time.perf_counter() - begin
    return total - waiting.seconds, waiting.seconds, result


def _flips(path: Path) -> str:
    """Milliseconds to plan and write one flip after the checkpoint is open, and to undo it."""
    rng, cells = np.random.default_rng(0), []
    with Checkpoint(path) as checkpoint:
        tensors = [t for t in checkpoint.tensors.values() if not t.reason_not_editable]
        if not tensors:
            return "read only"
        for checksums in CHECKSUMS:
            flips, undos, waits = [], [], []
            for number in range(FLIPS):
                tensor = tensors[number % len(tensors)]

                def flip(tensor=tensor, checksums=checksums):
                    element = np.array([rng.integers(tensor.numel)])
                    mask = np.array([1 << 30], tensor.codec.word_dtype)
                    fault = Fault(tensor.site, tensor.dtype, tensor.shape, element, "xor", mask)
                    patches, receipt = checkpoint.plan([fault], checksums)
                    return apply_edit(path, patches, receipt.to_json())

                seconds, waited, _ = _clocked(flip)
                flips.append(seconds)
                waits.append(waited)
                undos.append(_clocked(lambda: undo_edit(path))[0])
            cells.append(
                f"{checksums} {statistics.median(flips) * 1e3:6.2f} ms (most {max(flips) * 1e3:.1f}), fsync "
                f"{statistics.median(waits) * 1e3:5.1f} ms, undo {statistics.median(undos) * 1e3:5.2f} ms"
            )
    return "; ".join(cells)


def _cpu(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def _read(path: Path) -> None:
    """Read all files, 4 MiB at a time into the same memory."""
    memory = bytearray(4 << 20)
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(memory):
                pass


def measure(name: str, folder: Path, size: int, state: dict[str, torch.Tensor]) -> None:
    """Print the lines of one format."""
    path = WRITERS[name](folder, state)
    os.sync()
    content = [tensor.numpy() for tensor in state.values()]
    _read(path)
    opened = statistics.median(_clocked(lambda: Checkpoint(path).close())[0] for _ in range(5))

    def sha256() -> None:
        for array in content:
            hashlib.sha256(array).digest()

    hashes: dict[str, Callable[[], object]] = {}
    with Checkpoint(path) as checkpoint:
        hashes = {
            "sha256": sha256,
            "manifest": lambda: make_manifest(checkpoint, hash_files(checkpoint.files)),
            "read": lambda: _read(path),
            "fast": lambda: make_manifest(checkpoint, hash_files(checkpoint.files, fast_only=True)),
        }
        times = {key: statistics.median(column) for key, column in _rounds(hashes).items()}
    print(f"{name}: {size / 1e9:.2f} GB in {TENSORS} tensors; opened in {opened * 1e3:.1f} ms")
    print(f"  flip  {_flips(path)}")
    print(
        f"  manifest {size / times['manifest'] / 1e9:.2f} GB/s, SHA-256 alone {size / times['sha256'] / 1e9:.2f} GB/s: "
        f"{times['sha256'] / times['manifest']:.0%} of its speed"
    )
    print(
        f"  fast hash {size / times['fast'] / 1e9:.2f} GB/s, reading alone {size / times['read'] / 1e9:.2f} GB/s: "
        f"{times['read'] / times['fast']:.0%} of its speed",
        flush=True,
    )


def _rounds(methods: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    result: dict[str, list[float]] = {key: [] for key in methods}
    for _ in range(ROUNDS):
        for key, method in methods.items():
            result[key].append(_cpu(method))
    return result


def peak(path: Path) -> None:
    """Print how much the memory of a fresh process grows while it makes a manifest."""
    child = os.fork()
    if not child:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with Checkpoint(path) as checkpoint:
            make_manifest(checkpoint, hash_files(checkpoint.files))
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"  memory beyond the start while hashing: {(after - before) / 1024:.0f} MiB", flush=True)
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    """Measure all formats, one after the other, and remove their files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_speed", description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write the files; by default a temporary folder")
    parser.add_argument("--bytes", type=int, default=2**30)
    parser.add_argument("--formats", nargs="*", default=list(WRITERS), choices=list(WRITERS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.folder is not None:
        asked.folder.mkdir(parents=True, exist_ok=True)
    state = _state(asked.bytes)
    size = sum(tensor.nbytes for tensor in state.values())
    for name in asked.formats:
        folder = Path(tempfile.mkdtemp(prefix="speed", dir=asked.folder))
        try:
            measure(name, folder, size, state)
            peak(next(folder.iterdir()))
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
