"""Groups nearly equal incidents by their masked report and a coarse summary of their telemetry."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from unsilent.triage.bundle import Bundle
from unsilent.triage.candidates import candidates_of
from unsilent.triage.farm.labelled import LabelledIncident
from unsilent.triage.history import FAR

_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?", re.IGNORECASE)
_DOTTED = re.compile(r"\b[A-Za-z_]\w*(?:\.\w+)+\b")
LARGE = (10.0, 1000.0)
"""Factors between a value and its past at which its coarse description changes."""


def group_of(report: str, bundle: Bundle) -> str:
    """Name of an incident's group: digests of its masked report and telemetry summary."""
    return f"{_digest(masked(report, bundle))}-{_digest('; '.join(_telemetry(bundle)))}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def masked(report: str, bundle: Bundle) -> str:
    """A report with numbers and names of tensors masked."""
    names = sorted((candidate.value for candidate in candidates_of(bundle).tensors), key=len, reverse=True)
    for name in names:
        report = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.])", "#", report)
    return " ".join(_NUMBER.sub("#", _DOTTED.sub("#", report)).lower().split())


def distinct(incidents: Iterable[LabelledIncident]) -> int:
    """Number of incidents if nearly equal ones are counted once."""
    return len({incident.group for incident in incidents})


def _telemetry(bundle: Bundle) -> list[str]:
    """A coarse summary of an incident's telemetry, as a list of texts."""
    incident, ranks = bundle.incident, candidates_of(bundle).ranks
    features = [candidate.features for candidate in ranks]
    onset = min((rank_features.onset for rank_features in features if rank_features.onset is not None), default=None)
    far = sum(rank_features.peer_score >= FAR for rank_features in features)
    ratio = max((rank_features.past_ratio for rank_features in features), default=1.0)
    parts = sorted(
        {entry.name for folder in (incident.folder, incident.folder / "rank0") for entry in _entries(folder)}
    )
    return [
        *sorted({f"{alarm.feature} {alarm.rule}" for alarm in bundle.alarms()}),
        f"ranks {min(incident.world_size, 3)}, absent {len(incident.ranks) < incident.world_size}",
        ", ".join(name for name in parts if not name.startswith("rank")),
        f"onset {'none' if onset is None else max(-2, min(2, onset // 4))}",
        f"far {min(far, 2)}, nonfinite {min(2, sum(rank_features.nonfinite > 0 for rank_features in features))}",
        f"ratio {sum(ratio >= least for least in LARGE)}",
    ]


def _entries(folder: Path) -> list[Path]:
    return [*folder.iterdir()] if folder.is_dir() else []
