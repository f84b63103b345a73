"""Why two runs of a loop differ: which source, operation and line, found by running it with one source pinned at a time."""

from unsilent.studies.nondeterminism.reproducibility import check_reproducibility as check_reproducibility
from unsilent.studies.nondeterminism.source_search import explain_run_differences as explain_run_differences
