"""Injections drawn from the settings of hdf5_corrupter, with its algorithm.

The algorithm is that of ``try_corrupt_hdf5_file`` in ``corrupter.py``. Each *try* is independent of earlier ones. It draws a
tensor, uniform over those of the locations; a uniform element of it; whether it is injected; then the bits. Bits that are
forbidden because they give NaN or infinity are drawn again for the same element. A value of another dtype than
``float_precision`` is converted, corrupted, and converted back (``held`` in a `Fault`). The sampling laws and value models of
`unsilent.faults` cannot do this, because they draw distinct elements and bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.drawing import MOST_ROUNDS
from unsilent.checkpoints.hdf5_corrupter.locations import editable_tensors, tensors_below
from unsilent.checkpoints.hdf5_corrupter.settings import InjectorSettings
from unsilent.checkpoints.hdf5_corrupter.successive import SuccessiveInjections, is_finite, shortest_form_mask
from unsilent.checkpoints.stored_tensors import StoredTensor
from unsilent.faults.codecs import Codec, codec
from unsilent.faults.record import Fault
from unsilent.report.text import count_text

MOST_TRIES = 1_000_000


def draw_tries(checkpoint: Checkpoint, settings: InjectorSettings, seed: int) -> tuple[list[Fault], list[str]]:
    """Draw the faults for a checkpoint from some settings, and notes for the user.

    Raises ``UsageError`` if nothing is selected.
    """
    tensors, rng = editable_tensors(checkpoint), np.random.default_rng(seed)
    if not settings.use_random_locations:
        tensors = tensors_below(checkpoint, tensors, settings.locations_to_corrupt or ())
    elements = sum(t.numel for t in checkpoint.tensors.values())
    tries = number_of_tries(settings, elements)
    chosen = rng.integers(len(tensors), size=tries)
    places = rng.integers(np.array([t.numel for t in tensors], np.int64)[chosen])
    injected = rng.random(tries) < settings.injection_probability
    result = SuccessiveInjections(checkpoint)
    for number in np.unique(chosen[injected]).tolist():
        result.read(tensors[number], np.unique(places[injected & (chosen == number)]))
    for number, place in zip(chosen[injected].tolist(), places[injected].tolist(), strict=True):
        tensor = tensors[number]
        result.inject(tensor, place, *_corruption(settings, tensor, result.word(tensor, place), rng))
    notes = _notes(settings, tensors, elements, tries)
    if result.repeated:
        notes.append(
            f"tries hit an element again, because they are drawn with replacement, as in hdf5_corrupter ({result.repeated:,})"
        )
    return result.faults(), notes


def number_of_tries(settings: InjectorSettings, elements: int) -> int:
    """The number of injections to try; a percentage counts all elements of the file, also outside of the locations."""
    counted = settings.injection_type == "count"
    result = int(settings.injection_tries if counted else settings.injection_tries * elements / 100)
    if result > MOST_TRIES:
        raise UsageError(f"injection_tries {settings.injection_tries:g} % of {elements:,} values are {result:,} tries; "
                         f"expected at most {MOST_TRIES:,}, give fewer")  # fmt: skip
    return result


def _corruption(
    settings: InjectorSettings, tensor: StoredTensor, word: int, rng: np.random.Generator
) -> tuple[str, float, str | None]:
    """Operation, operand and ``held`` of the `Fault` for one element."""
    tensor_codec = tensor.codec
    if settings.scaling_factor is not None:
        return "scale", settings.scaling_factor, None
    if tensor_codec.kind == "int":
        return "xor", shortest_form_mask(word, tensor_codec, rng), None
    held = _dtype_of_corruption(settings, tensor)
    layout = codec(held or tensor.dtype)
    if held:
        word = int(layout.encode(tensor_codec.decode(np.array([word], tensor_codec.word_dtype)))[0])
    draw = _flips if settings.bit_mask is None else _placed_mask
    mask = draw(settings, layout, word, rng)
    if mask is None:
        raise UsageError(
            f"no bits that the settings allow leave {tensor.name} finite where it is {tensor_codec.decode(word):g}; "
            "set allow_NaN_values: True, or give other bits"
        )
    return "xor", mask, held


def _dtype_of_corruption(settings: InjectorSettings, tensor: StoredTensor) -> str | None:
    """The dtype in which a floating-point tensor is corrupted; None if it is the tensor's own."""
    dtype = f"float{settings.float_precision}"
    is_own_dtype = settings.width is None or settings.scaling_factor is not None or tensor.dtype == dtype
    return None if is_own_dtype or tensor.codec.kind == "int" else dtype


def _flips(settings: InjectorSettings, layout: Codec, word: int, rng: np.random.Generator) -> int | None:
    """The mask of a burst of bit flips; None if no allowed bits were found."""
    bits, mask, missing = settings.candidate_bits(layout.bits), 0, settings.burst
    for _ in range(MOST_ROUNDS):
        for bit in _sample(bits, missing, rng):
            flipped = mask ^ (1 << (layout.bits - 1 - bit))
            if settings.allow_NaN_values or is_finite(word ^ flipped, layout):
                mask, missing = flipped, missing - 1
        if not missing:
            return mask
    return None


def _sample(bits: Sequence[int], length: int, rng: np.random.Generator) -> list[int]:
    """The bits of a burst, all different unless the burst has at least as many bits as ``bits``."""
    result: list[int] = []
    while len(result) < length:
        most = min(max(len(bits) - 1, 1), length - len(result))
        result += [bits[i] for i in rng.permutation(len(bits))[:most]]
    return result


def _placed_mask(settings: InjectorSettings, layout: Codec, word: int, rng: np.random.Generator) -> int | None:
    """The bit mask at a random position in the word; None if no allowed position was found."""
    text = settings.bit_mask or ""
    for _ in range(MOST_ROUNDS):
        mask = int(text, 2) << int(rng.integers(layout.bits - len(text) + 1))
        if settings.allow_NaN_values or is_finite(word ^ mask, layout):
            return mask
    return None


def _notes(settings: InjectorSettings, tensors: Sequence[StoredTensor], elements: int, tries: int) -> list[str]:
    """Notes on differences from hdf5_corrupter that matter for these settings."""
    notes, tried, distinct = [], settings.injection_tries, {t.name: t for t in tensors}
    if settings.injection_type == "percentage":
        how = "a percentage, as in its code, though its README says a fraction"
        notes.append(f"injection_tries is {how}: {tried:g} % of {elements:,} values, {tries:,} tries")
    if settings.first_bit is not None:
        width = settings.width or 32
        notes.append(f"the settings count bits from the sign: their bit 0 is bit {width - 1} of a float{width}")
    if settings.first_bit == 0 and not settings.allow_sign_change:
        notes.append(
            "the range has the sign, so it is flipped too although allow_sign_change is False, as in hdf5_corrupter"
        )
    deep = [t for t in distinct.values() if len(t.shape) > 4]
    converted = [t for t in distinct.values() if _dtype_of_corruption(settings, t)]
    integers = [t for t in distinct.values() if t.codec.kind == "int" and settings.scaling_factor is None]
    for which, text in (
        (deep, "with more than 4 dimensions: corrupted too, though hdf5_corrupter skips them"),
        (converted, f"of another dtype: values are converted to float{settings.width} and back, as in hdf5_corrupter"),
        (integers, "of integers: a digit of the shortest binary form is flipped, as in hdf5_corrupter"),
    ):
        if which:
            notes.append(f"{count_text(len(which), 'tensor')} {text}")
    if len(distinct) < len(tensors):
        notes.append("tensors of several locations are drawn more often, as in hdf5_corrupter")
    if settings.injection_sequence_path is not None:
        notes.append(
            "injection_sequence_path is not used, as in hdf5_corrupter; give that file to unsilent checkpoint replay"
        )
    return notes
