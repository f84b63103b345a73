"""Claim: under DDP and FSDP2 a fault in one rank's gradient enters before the reduction, with 2 and with 4 processes.

The other two of the four are among the ordinary tests.
"""

from __future__ import annotations

import pytest

from sites.training.test_ranks import check


@pytest.mark.parametrize(("kind", "world"), [("ddp", 4), ("fsdp", 2)])
def test_one_rank_is_corrupted_before_the_reduction(tmp_path, kind, world):
    check(tmp_path, kind, world)
