"""Running a workload again, golden and faulty: all of it (`PlainEngine`) or what a fault changes (`CachedEngine`)."""

from unsilent.engine.engine_choice import ENGINES as ENGINES
from unsilent.engine.engine_choice import make_engine as make_engine
from unsilent.engine.plain import PlainEngine as PlainEngine
from unsilent.engine.plain import Samples as Samples
from unsilent.engine.plain import TrialOutcome as TrialOutcome
from unsilent.engine.trace import trace_batch as trace_batch
from unsilent.engine.trace import trace_step as trace_step
