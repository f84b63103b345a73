"""Why two runs of a loop differ: which source, operation and line, found by running it with one source pinned at a time."""

from unsilent.studies.explaining.control import control as control
from unsilent.studies.explaining.explain import explain as explain
