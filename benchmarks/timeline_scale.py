"""How the cost of ``unsilent timeline`` grows with the number of operations: CPU seconds and the slope of their logarithms.

    python -m benchmarks.timeline_scale [--data-ranks 64] [--stages 8] [--micro-batches 32] [--steps 3,6,12,20]

The table is of a made-up job with data and pipeline parallelism, in which each step and each data-parallel rank has other times.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from timeline.pipelines import Pipeline
from unsilent.timeline.slowdown import measure_slowdown
from unsilent.timeline.tables import read_operation_table


def write_table(path: Path, data_ranks: int, stages: int, micro_batches: int, steps: int) -> int:
    """Write a table; returns its number of rows."""
    rows = Pipeline(data_ranks=1, stages=stages, micro_batches=micro_batches, steps=1).rows()
    n, units = len(rows), data_ranks * steps
    columns = {name: np.tile([row[name] for row in rows], units) for name in rows[0] if name != "optype"}
    data_rank = np.repeat(np.arange(units) % data_ranks, n)
    factor = np.random.default_rng(0).uniform(1.0, 1.1, units).repeat(n)
    columns |= {
        "dp_rank": data_rank, "rank": columns["stage"] * data_ranks + data_rank,
        "step": np.repeat(np.arange(units) // data_ranks, n),
        "start_ts": columns["start_ts"] * factor, "duration": columns["duration"] * factor,
    }  # fmt: skip
    names = sorted({row["optype"] for row in rows})
    types = arrow.DictionaryArray.from_arrays(np.tile([names.index(row["optype"]) for row in rows], units), names)
    parquet.write_table(arrow.table({**columns, "optype": types}), path)
    return n * units


def main() -> None:
    """Measure jobs of several lengths."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-ranks", type=int, default=64)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--steps", default="3,6,12,20")
    asked = parser.parse_args()
    sizes, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.parquet"
        for steps in map(int, asked.steps.split(",")):
            sizes.append(write_table(path, asked.data_ranks, asked.stages, asked.micro_batches, steps))
            begun = time.process_time()
            job = read_operation_table(path)
            read = time.process_time() - begun
            slowdown = measure_slowdown(job).slowdown.estimate
            seconds.append(time.process_time() - begun)
            print(
                f"{len(job.ranks)} ranks, {steps} steps, {sizes[-1]:,} operations: {seconds[-1]:.2f} CPU s, of which "
                f"{read:.2f} s read it; slowdown {slowdown:.3f}"
            )
    if len(sizes) > 1:
        print(f"slope of the logarithms: {np.polyfit(np.log(sizes), np.log(seconds), 1)[0]:.3f}")


if __name__ == "__main__":
    main()
