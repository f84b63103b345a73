"""Writes and reads a trained model as an ``.npz`` file, and refuses files of other versions."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.plainfiles import parse_json, replace_file
from unsilent.triage.findings import FindingKind, Outcome, Query
from unsilent.triage.queries.table import TEMPLATES
from unsilent.triage.ranking.equations import EquationsOrder
from unsilent.triage.ranking.model import KnownIncidents, Model
from unsilent.triage.ranking.trees import trees_from
from unsilent.triage.ranking.trees_order import (
    BELIEFS,
    BLANKS,
    OF_RUNBOOK,
    OTHER_VERSION,
    SHARED,
    TreesOrder,
    finding_row,
)
from unsilent.triage.ranking.words import COLUMNS, DIRECTIONS, Words
from unsilent.workloads.npz import read_npz

Arrays = Mapping[str, NDArray[Any]]

SCHEMA = 2
EQUATIONS, KNOWN = "equations", "known"
MOST_KNOWN, MOST_FEATURES = 100_000, 1000
SHIPPED = Path(__file__).parent / "model.npz"
"""Trained on the collection of 600 simulated incidents that docs/papers/revelio.md names."""
EXPECTED = "a model that unsilent triage train wrote"


def write_model(model: Model, path: Path) -> None:
    """Write a model to a file for `read_model`.

    Raises ``UsageError`` if it cannot be written.
    """
    trees = model.trees
    about = {**_version(), "incident": trees.incident, "candidate": trees.candidate}
    arrays = {
        f"{name}/{array_name}": array for name, each in trees.trees.items() for array_name, array in vars(each).items()
    }
    arrays |= {f"{KNOWN}/{name}": array for name, array in vars(model.known).items()}
    arrays |= {f"{EQUATIONS}/{name}": tensor.numpy() for name, tensor in model.equations.tensors().items()}
    arrays |= {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    content = io.BytesIO()
    np.savez_compressed(content, weights=trees.words.weights, directions=trees.words.directions, **arrays)
    try:
        replace_file(path, content.getvalue())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; check the path") from None


def read_model(path: Path) -> Model:
    """The model in a file.

    Raises ``UsageError`` if the file is not a model of this version.
    """
    arrays = read_npz(str(path), EXPECTED)
    try:
        about = parse_json(arrays["about"].tobytes())
        if {name: about[name] for name in _version()} != _version():
            raise UsageError(f"{path}: {OTHER_VERSION}")
        incident, candidate = (tuple(map(str, about[name])) for name in ("incident", "candidate"))
        if max(len(incident), len(candidate)) > MOST_FEATURES:
            raise ValueError(f"more than {MOST_FEATURES} features")
        words = Words(
            _checked_array(arrays, "weights", (COLUMNS,)), _checked_array(arrays, "directions", (DIRECTIONS, COLUMNS))
        )
        return Model(
            _trees(arrays, words, incident, candidate), _equations(arrays, words, len(incident), len(candidate)),
            _known_incidents(arrays, len(incident)),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a model of triage ({first_line(error)[:200]}); expected {EXPECTED}") from None


def _trees(arrays: Arrays, words: Words, incident: tuple[str, ...], candidate: tuple[str, ...]) -> TreesOrder:
    row = len(incident) + DIRECTIONS
    columns = {
        **dict.fromkeys(TEMPLATES, row),
        BLANKS: len(candidate) + len(TEMPLATES),
        SHARED: OF_RUNBOOK + row,
        BELIEFS: len(finding_row(Query(""), Outcome.NOTHING, None)) + row,
    }
    trees = {name: trees_from(arrays, f"{name}/", count) for name, count in columns.items()}
    return TreesOrder(words, incident, candidate, trees)


def _equations(arrays: Arrays, words: Words, telemetry: int, candidate: int) -> EquationsOrder:
    order = EquationsOrder.empty(words, telemetry, candidate)
    for name, tensor in order.tensors().items():
        array = _checked_array(arrays, f"{EQUATIONS}/{name}", tuple(tensor.shape), np.float32)
        tensor.copy_(torch.from_numpy(array))
    return order


def _known_incidents(arrays: Arrays, features: int) -> KnownIncidents:
    count = len(arrays[f"{KNOWN}/rows"])
    if not 0 < count <= MOST_KNOWN:
        raise ValueError(f"{count} known incidents, and not 1 to {MOST_KNOWN}")
    shapes = {"rows": (count, features), "mean": (features,), "deviation": (features,), "limit": (1,)}
    known = KnownIncidents(**{name: _checked_array(arrays, f"{KNOWN}/{name}", shape) for name, shape in shapes.items()})
    if not (known.deviation > 0).all():
        raise ValueError("a deviation of features is not above 0")
    return known


def _checked_array(arrays: Arrays, name: str, shape: tuple[int, ...], dtype: type = np.float64) -> NDArray[Any]:
    """A finite array of a file with the expected shape and dtype.

    Raises ``ValueError`` if it is not.
    """
    array = arrays[name]
    if array.shape != shape or array.dtype != dtype or not np.isfinite(array).all():
        raise ValueError(f"{name} is not {shape} finite numbers of type {dtype.__name__}")
    return array


def _version() -> dict[str, Any]:
    """The version of features and queries, which a stored model must match."""
    return {"schema": SCHEMA, "templates": [*TEMPLATES], "kinds": [kind.name for kind in FindingKind]}
