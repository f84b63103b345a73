"""Events of a monitored job: reading their files, summarising a run, and sending events to sinks. Needs no torch."""
