"""Whether a reference names a training or a workload of inference, found out without loading torch in this process.

``python -m unsilent.workloads.task`` loads an object of the user's own in a process that may crash, and answers by its exit code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from unsilent.workloads.zoo import TRAININGS, ZOO

TRAINING, INFERENCE = TASKS = ("training", "inference")
_CODES = {TRAINING: 41, INFERENCE: 42}
"""Exit codes that nothing else ends with."""


def find_task(
    ref: str, options: Mapping[str, str] | None = None, *, data: str | None = None, weights: str | None = None
) -> str | None:
    """One of `TASKS`; None where the object cannot be loaded, which whoever loads it next will explain.

    Raises:
        UsageError: no built-in workload has this name.
    """
    from unsilent.workloads.registry import check_own

    if ref in TRAININGS:
        return TRAINING
    if ref in ZOO or ref.startswith("hf:") or ref.endswith(".pt2"):
        return INFERENCE
    check_own(ref, {**ZOO, **TRAININGS})
    asked = json.dumps([ref, dict(options or {}), {"data": data, "weights": weights}])
    ended = subprocess.run([sys.executable, "-m", __name__, asked], capture_output=True, stdin=subprocess.DEVNULL)
    return next((task for task, code in _CODES.items() if code == ended.returncode), None)


def _main() -> int:
    from unsilent.workloads.registry import PARTS, TRAINING_PARTS, load_own

    ref, options, files = json.loads(sys.argv[1])
    found = load_own(ref, options, {key: value for key, value in files.items() if value is not None}, PARTS)
    parts = {TRAINING: TRAINING_PARTS, INFERENCE: PARTS}
    return next((_CODES[task] for task, names in parts.items() if all(hasattr(found, name) for name in names)), 1)


if __name__ == "__main__":
    sys.exit(_main())
