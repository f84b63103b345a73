"""How a fault spreads through a run: the report of a trace."""

from unsilent.studies.traces.report import report as report
