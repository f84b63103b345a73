"""One gang per strategy and number of ranks, kept for all tests."""

from __future__ import annotations

import functools

import pytest

from distributed_runs import Run


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """``run(strategy, ranks)``: started once a session."""
    runs = []

    @functools.cache
    def get(strategy, ranks):
        runs.append(Run(strategy, ranks, tmp_path_factory.mktemp(f"{strategy}-{ranks}")))
        return runs[-1]

    yield get
    for one in runs:
        one.gang.close()
