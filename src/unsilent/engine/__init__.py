"""Running a workload again, golden and faulty."""

from unsilent.engine.plain import PlainEngine as PlainEngine
from unsilent.engine.plain import TrialOutcome as TrialOutcome
