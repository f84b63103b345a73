"""Draws the figure of ``docs/evidence/inference-detectors.md`` from the table beside it.

``python tools/detectors_figure.py docs`` writes ``docs/images/inference-detectors.svg``. It needs the extra ``figures``.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

from unsilent.render.figure_file import LOOK, METADATA

TABLE = Path("evidence") / "inference-detectors.csv"
FIGURE = Path("images") / "inference-detectors.svg"
PANELS = {
    "weight-flip": "one bit of a weight",
    "weight-rate": "bits of weights (1e-5)",
    "output-flip": "one bit of an output",
    "output-burst": "random values in an output",
}
"""Titles, by error model."""


def read_table(path: Path) -> dict[tuple[str, str, str], int]:
    """The share of faults that are detected, in percent, by error model, workload and detector."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["faults"], row["workload"], row["detector"]): int(row["of_faults_percent"]) for row in rows}


def draw(shares: dict[tuple[str, str, str], int]) -> Any:
    """A map of shares for each error model, as one figure of matplotlib."""
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(workload for _, workload, _ in shares))
    detectors = list(dict.fromkeys(detector for _, _, detector in shares))
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    for axes, (faults, title) in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, PANELS.items(), strict=True):
        cells = [[shares[faults, workload, detector] for detector in detectors] for workload in workloads]
        image = axes.imshow(cells, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        for row, values in enumerate(cells):
            for column, value in enumerate(values):
                axes.text(column, row, value, ha="center", va="center", color="white" if value > 60 else "black")
        axes.set_title(title)
        axes.set_xticks(range(len(detectors)), detectors, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(workloads)), workloads)
    figure.colorbar(image, ax=figure.axes, label="detected, % of faults", aspect=50)
    return figure


def main() -> None:
    """Write the figure into the folder of the documentation."""
    import matplotlib

    docs = Path(sys.argv[1])
    with matplotlib.rc_context(LOOK):
        draw(read_table(docs / TABLE)).savefig(docs / FIGURE, metadata=METADATA["svg"])


if __name__ == "__main__":
    main()
