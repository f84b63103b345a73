"""Why two runs of a loop differ: which source, operation and line, found by running it with one source pinned at a time.

And what pinning sources costs.
"""

from unsilent.explain.reproducibility import check_reproducibility as check_reproducibility
from unsilent.explain.source_search import explain_run_differences as explain_run_differences
from unsilent.explain.step_costs import measure_step_costs as measure_step_costs
