"""``unsilent compare ORIGINAL DEPLOYED``: compare the answers of a deployed model with those of the original.

Exit codes: 0 compared, 1 more answers may have changed than ``--assert`` allows, 2 the models cannot be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from unsilent.basics.options import CONFIDENCE, PRECISION_PANEL, WORKLOAD_PANEL, Option, Request, check_confidence
from unsilent.basics.sizes import parse_share
from unsilent.campaigns.options import DATA, WEIGHTS, WORKLOAD_OPTION
from unsilent.command import EXPLAIN, Command, Result

USAGE = "expected unsilent compare ORIGINAL DEPLOYED, such as unsilent compare digits-cnn int8"


@dataclass(frozen=True)
class CompareOptions:
    """Options of ``unsilent compare``."""

    original: Annotated[str, Option(
        "The original: a workload, or with --workload a checkpoint.", WORKLOAD_PANEL,
        missing_error=f"no original was given; {USAGE}")]  # fmt: skip
    deployed: Annotated[str, Option(
        "What should agree with it: an adapter, a workload, or a checkpoint of its architecture.", WORKLOAD_PANEL,
        missing_error=f"no deployed model was given; {USAGE}")]  # fmt: skip
    workload: Annotated[str | None, Option(
        "The workload that gives architecture, inputs and judge.", WORKLOAD_PANEL, default_text="ORIGINAL")] = None  # fmt: skip
    options: Annotated[tuple[tuple[str, str], ...], WORKLOAD_OPTION] = ()
    data: Annotated[str | None, DATA] = None
    weights: Annotated[str | None, WEIGHTS] = None
    most_changed: Annotated[str | None, Option(
        "Exit with 1 if the upper limit of the share of changed answers is above this, like 1%.", PRECISION_PANEL, "assert")
    ] = None  # fmt: skip
    confidence: Annotated[float, CONFIDENCE] = 0.95

    def __post_init__(self) -> None:
        """Raise ``UsageError`` for a share or a confidence out of range."""
        check_confidence(self.confidence)
        if self.most_changed is not None:
            parse_share("--assert", self.most_changed, "1%")


def compare(request: Request) -> Result:
    """Compare a deployed model with the original: answers that changed, were lost and gained, and where the layers differ.

    DEPLOYED is an adapter (int8, int4, prune:0.8, bf16, compiled …), a workload, hf:DIR, a program FILE.pt2, or a checkpoint.
    """
    from unsilent.compare.comparing import compare_pair
    from unsilent.compare.models import load_models

    options = request[CompareOptions]
    pair = load_models(
        options.original, options.deployed, options.workload, options=dict(options.options), data=options.data,
        weights=options.weights,
    )  # fmt: skip
    allowed = None if options.most_changed is None else parse_share("--assert", options.most_changed, "1%")
    return compare_pair(pair, most_changed=allowed, confidence=options.confidence)


EXAMPLE = "unsilent compare digits-cnn int8 --assert 5%"
COMMAND = Command("compare", EXPLAIN, EXAMPLE, (CompareOptions,), compare, has_report=True)
