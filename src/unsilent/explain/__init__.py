"""Finds why two runs of a training loop differ: the source, the operation and the line.

Also measures the cost of pinning sources.
"""

from unsilent.explain.reproducibility import check_reproducibility as check_reproducibility
from unsilent.explain.source_search import explain_run_differences as explain_run_differences
from unsilent.explain.step_costs import measure_step_costs as measure_step_costs
