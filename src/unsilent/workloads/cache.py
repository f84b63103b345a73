"""The cache of trained weights, so that a workload is trained only once on each machine.

One safetensors file per (workload, recipe version, options, data, torch version), with the reached score and a digest
of all tensors in its metadata. Invariants: a file appears whole or not at all (temporary file, fsync, ``os.replace``);
a file whose tensors are damaged in any bit is trained anew, never used; when two processes train at once, the file of
the first stands and both use its bits.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.workloads.model_fitting import Goal, isolated_training

_TEMPORARY = ".unsilent-"
_LEFT_SECONDS = 3600.0
"""Age in seconds from which a temporary file is taken as left by a killed process."""


@dataclass(frozen=True)
class TrainedWeightsRecipe:
    """The settings that determine the trained weights bit for bit."""

    workload: str
    version: int
    """Version number, raised whenever the model or its training changes."""
    options: Mapping[str, Any]
    """Options (JSON values) that the training depends on."""
    data: str
    """Hash of the training data."""

    @property
    def key(self) -> str:
        """Hash of all settings and of torch's major.minor version, as hex."""
        torch_version = ".".join(torch.__version__.split(".")[:2])
        whole = [self.workload, self.version, dict(self.options), self.data, torch_version]
        return xxhash.xxh3_128_hexdigest(json.dumps(whole, sort_keys=True).encode())


def folder() -> Path:
    """The cache folder: ``$UNSILENT_CACHE``, else ``$XDG_CACHE_HOME/unsilent``, else ``~/.cache/unsilent``."""
    if chosen := os.environ.get("UNSILENT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "unsilent"


def load_or_train(
    recipe: TrainedWeightsRecipe,
    build: Callable[[], nn.Module],
    train: Callable[[nn.Module], float],
    goal: Goal,
    *,
    seed: int,
) -> tuple[nn.Module, float]:
    """The trained model in eval mode and its score, from the cache if it is stored there.

    Otherwise the model is trained now and stored in the cache.

    Args:
        build: Function that makes the model with fresh weights.
        train: Function that trains the model in place and returns its score on held-out data.
        goal: The score that the model must reach.
        seed: Seed of the fresh weights.

    Raises:
        UsageError: the cache cannot be written.
        UnsilentError: (or the goal's own error) the score is below the floor.
    """
    path = folder() / f"{recipe.workload}-{recipe.key}.safetensors"
    with isolated_training(seed):
        model = build()
        score = _read(path, model)
        if score is None:
            _probe(path)
            reached = train(model)
            goal.check(recipe.workload, reached)
            # Another process may have finished first; its file stands, so that both use the same bits.
            score = _read(path, model)
            if score is None:
                _write(path, _encode(model, reached, recipe))
                score = reached
    goal.check(recipe.workload, score)
    return model.eval(), score


def digest_of_parts(*parts: bytes | memoryview) -> str:
    """Hash of a list of byte strings, as hex.

    Each string is delimited by its length.
    """
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model by name.

    A tied tensor has only its first name.
    """
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _digest(tensors: Mapping[str, Tensor]) -> str:
    parts: list[bytes] = []
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        parts += [f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), tensor.numpy().tobytes()]
    return digest_of_parts(*parts)


def _encode(model: nn.Module, score: float, recipe: TrainedWeightsRecipe) -> bytes:
    from safetensors.torch import save

    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in _tensors(model).items()}
    note = {"workload": recipe.workload, "recipe": recipe.version, "options": dict(recipe.options), "data": recipe.data}
    metadata = {"digest": _digest(tensors), "score": score.hex(), "recipe": json.dumps(note, sort_keys=True)}
    return save(tensors, metadata)


def _read(path: Path, model: nn.Module) -> float | None:
    """Load a cached file into ``model`` and return its score, or None without a valid file."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():  # opening a pipe would wait
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        score = float.fromhex(metadata["score"])
        sound = _digest(tensors) == metadata["digest"]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None
    model_tensors = _tensors(model)
    expected, there = ({n: (t.shape, t.dtype) for n, t in of.items()} for of in (model_tensors, tensors))
    if not sound or expected != there:
        return None
    with torch.no_grad():
        for name, tensor in model_tensors.items():
            tensor.copy_(tensors[name])
    return score


def _probe(path: Path) -> None:
    """Raise early if the disk is full or the folder read-only, so that no training is wasted."""
    probe = path.with_suffix(f".probe-{os.getpid()}")
    _write(probe, bytes(1 << 16))
    probe.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    """Write a file completely or not at all.

    Removes temporary files that were left by processes that were killed while they wrote.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{_TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if left.stat().st_mtime < time.time() - _LEFT_SECONDS:
                    left.unlink()
        handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot save trained weights in {path.parent}: {reason}; "
            "free space there or set UNSILENT_CACHE to another folder"
        ) from None
