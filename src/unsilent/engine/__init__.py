"""Engines that evaluate a workload with and without faults.

`PlainEngine` runs the whole workload. `CachedEngine` runs only the operations that a fault affects.
"""

from unsilent.engine.engine_choice import ENGINES as ENGINES
from unsilent.engine.engine_choice import make_engine as make_engine
from unsilent.engine.plain import PlainEngine as PlainEngine
from unsilent.engine.plain import Samples as Samples
from unsilent.engine.plain import TrialOutcome as TrialOutcome
from unsilent.engine.trace import trace_batch as trace_batch
from unsilent.engine.trace import trace_step as trace_step
