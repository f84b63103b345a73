"""How a fault spreads through a run: the report of a trace."""

from unsilent.studies.propagation_report.report import report as report
