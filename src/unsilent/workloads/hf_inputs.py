"""Inputs for a transformers model: arrays of the user, or synthetic inputs.

Invariant: the same folder, options and seed give the same inputs in every process.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.workloads.npz import read_npz

TEXT = 200_000
"""Number of characters of the Python reference that are tokenised."""


@dataclass(frozen=True)
class Inputs:
    """Arguments of ``forward``, whose first dimension is the sample, and a description of their origin."""

    arrays: Mapping[str, Tensor]
    description: str


def from_npz(ref: str, model: Any, path: str) -> Inputs:
    """The inputs in a ``.npz`` file: integers become int64, other numbers float32.

    Raises ``UsageError`` for an unreadable file, a name that ``forward`` does not have, arrays of different lengths, or
    token ids outside the vocabulary.
    """
    arrays: dict[str, Tensor] = {}
    known = [name for name in inspect.signature(model.forward).parameters if name not in ("self", "kwargs")]
    for name, array in read_npz(path, f"arrays named like {known[0]!r}").items():
        if name not in known:
            raise unknown_name_error(f"input of {type(model).__name__} in {path}", name, known)
        arrays[name] = _tensor(path, name, array)
    lengths = {name: len(array) for name, array in arrays.items()}
    if not lengths or 0 in lengths.values() or len(set(lengths.values())) > 1:
        raise UsageError(
            f"{path} holds arrays of these lengths: {lengths or 'none'}; expected the same number of samples, at least 1, in each"
        )
    vocabulary = _of_text(model.config, "vocab_size")
    for name in ("input_ids", "decoder_input_ids"):
        if vocabulary and name in arrays and (int(arrays[name].min()) < 0 or int(arrays[name].max()) >= vocabulary):
            raise UsageError(
                f"{path}: {name!r} ranges from {int(arrays[name].min())} to {int(arrays[name].max())}; "
                f"the model has tokens 0 to {vocabulary - 1}"
            )
    return Inputs(arrays, f"{Path(path).name}, {next(iter(lengths.values()))} samples, {ref} inputs of the user's own")


def _tensor(path: str, name: str, array: Any) -> Tensor:
    if array.dtype.kind not in "biuf" or array.ndim == 0 or array.size == 0:
        raise UsageError(
            f"{path}: {name!r} is {array.dtype} {list(array.shape)}; expected numbers, with samples along the first axis"
        )
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))


def synthetic_inputs(ref: str, model: Any, folder: str, samples: int, length: int, seed: int) -> Inputs:
    """Synthetic token ids or pixels for a model.

    Raises ``UsageError`` for a model that takes other inputs.
    """
    rng = np.random.default_rng(seed)
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        shape = (samples, getattr(model.config, "num_channels", None) or 3, height, width)
        pixels = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        return Inputs({"pixel_values": pixels}, f"synthetic: seeded normal noise of shape {list(shape)}")
    vocabulary = _of_text(model.config, "vocab_size")
    if model.main_input_name != "input_ids" or not vocabulary:
        raise UsageError(
            f"workload {ref!r}: no synthetic {model.main_input_name!r} can be made for {type(model).__name__}; give --data"
        )
    length = min(length, _of_text(model.config, "max_position_embeddings") or length)
    ids = _token_pieces(folder, samples, length, vocabulary)
    source = "the Python reference, tokenised"
    if ids is None:
        ids, source = rng.integers(0, vocabulary, (samples, length)), "seeded random token ids"
    tokens = torch.from_numpy(ids)
    arrays = {"input_ids": tokens}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        arrays["attention_mask"] = torch.ones_like(tokens)
    if getattr(model.config, "is_encoder_decoder", False):
        arrays["decoder_input_ids"] = tokens.clone()
    return Inputs(arrays, f"synthetic: {source}, {samples} samples of {length}")


def _of_text(config: Any, name: str) -> int:
    """An integer from the text part of a model's config, or 0 if it is not there."""
    value = getattr(config.get_text_config(), name, None)
    return value if isinstance(value, int) else 0


def decoded_text(folder: str, batch: Mapping[str, Tensor]) -> str:
    """The text of a batch with one sample, or its token ids if the folder has no tokenizer."""
    ids = batch["input_ids"][0].tolist()
    try:
        return str(_tokenizer(folder).decode(ids))
    except Exception:  # there is no tokenizer, or the code of a foreign tokenizer raised
        return " ".join(map(str, ids))


def _tokenizer(folder: str) -> Any:
    """The tokenizer of a folder, or None if it has none.

    Any exception of the tokenizer's code may be raised.
    """
    transformers: Any = importlib.import_module("transformers")
    where = Path(folder).expanduser().resolve()
    # Without files of its own, AutoTokenizer may make an empty tokenizer that knows no word.
    if not any(any(where.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model")):
        return None
    return transformers.AutoTokenizer.from_pretrained(str(where), local_files_only=True, trust_remote_code=False)


def _token_pieces(folder: str, samples: int, length: int, vocabulary: int) -> Any:
    """Consecutive pieces of a tokenised text, int64 [samples, length].

    None if there is no tokenizer that fits the model.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))[:TEXT]
    try:
        ids = np.asarray(_tokenizer(folder)(text, add_special_tokens=False)["input_ids"], np.int64)
    except Exception:  # any exception of a foreign tokenizer: random tokens are used instead
        return None
    if len(ids) < samples * length or ids.max() >= vocabulary or ids.min() == ids.max():
        return None
    return ids[: samples * length].reshape(samples, length).copy()
