"""The report of a trace: how a fault spreads through a run."""

from unsilent.studies.propagation_report.report import report as report
