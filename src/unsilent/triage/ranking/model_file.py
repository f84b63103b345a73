"""A trained model as a file: an ``.npz`` of plain arrays and a line of JSON. What another version wrote is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from unsilent.errors import UsageError, first_line
from unsilent.plainfiles import parse_json, replace_file
from unsilent.triage.findings import FindingKind, Outcome, Query
from unsilent.triage.queries.table import TEMPLATES
from unsilent.triage.ranking.model import BELIEFS, BLANKS, OF_RUNBOOK, OTHER_VERSION, SHARED, Model, finding_row
from unsilent.triage.ranking.trees import trees_from
from unsilent.triage.ranking.words import COLUMNS, DIRECTIONS, Words
from unsilent.workloads.npz import read_npz

SCHEMA = 1
SHIPPED = Path(__file__).parent / "model.npz"
"""Trained on a collection that the documentation names; where it is not there, the runbook orders queries."""
EXPECTED = "a model that unsilent triage train wrote"


def write_model(model: Model, path: Path) -> None:
    """Write a file that `read_model` reads. Raises ``UsageError``."""
    arrays = {f"{name}/{own}": array for name, trees in model.trees.items() for own, array in vars(trees).items()}
    about = {**_version(), "incident": model.incident, "candidate": model.candidate}
    encoded = np.frombuffer(json.dumps(about).encode(), np.uint8)
    content = io.BytesIO()
    np.savez_compressed(
        content, about=encoded, weights=model.words.weights, directions=model.words.directions, **arrays
    )
    try:
        replace_file(path, content.getvalue())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; check the path") from None


def read_model(path: Path) -> Model:
    """The model of a file. Raises ``UsageError`` for any other file."""
    arrays = read_npz(str(path), EXPECTED)
    try:
        about = parse_json(arrays["about"].tobytes())
        if {name: about[name] for name in _version()} != _version():
            raise UsageError(f"{path}: {OTHER_VERSION}")
        incident, candidate = (tuple(map(str, about[name])) for name in ("incident", "candidate"))
        words = Words(arrays["weights"], arrays["directions"])
        for array, shape in ((words.weights, (COLUMNS,)), (words.directions, (DIRECTIONS, COLUMNS))):
            if array.shape != shape or array.dtype != np.float64 or not np.isfinite(array).all():
                raise ValueError(f"an array of words is not of {shape} finite numbers")
        blanks, row = len(candidate) + len(TEMPLATES), len(incident) + DIRECTIONS
        columns = {
            **dict.fromkeys(TEMPLATES, row),
            BLANKS: blanks,
            SHARED: OF_RUNBOOK + row,
            BELIEFS: len(finding_row(Query(""), Outcome.NOTHING, None)) + row,
        }
        trees = {name: trees_from(arrays, f"{name}/", count) for name, count in columns.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a model of triage ({first_line(error)[:200]}); expected {EXPECTED}") from None
    return Model(words, incident, candidate, trees)


def _version() -> dict[str, Any]:
    """What must be the same for a model to be of use."""
    return {"schema": SCHEMA, "templates": [*TEMPLATES], "kinds": [one.name for one in FindingKind]}
