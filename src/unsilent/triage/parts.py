"""File names of the optional parts of an incident's folder, which are untrusted until they are read."""

from __future__ import annotations

REPORT_FILE = "report.txt"
"""File with a report in words on what somebody saw. Text of at most `MOST_TEXT` bytes."""
CONFIGURATION_FILE, EARLIER_CONFIGURATION_FILE = "configuration.json", "earlier-configuration.json"
"""Settings of the job, and of an earlier successful one: an object, whose values may be objects."""
FLIGHT_FOLDER = "flight"
"""Dumps of the flight recorder in JSON, a file ``rankR.json`` for each rank."""
TIMELINE_FILE = "timeline.json"
"""Seconds of the parts of recorded steps on every rank, from a trace that `unsilent timeline` reads: see `TIMELINE_KEYS`."""
TIMELINE_KEYS = ("schema", "parts", "ranks", "steps", "seconds")
"""``schema`` 1; ``parts``: p names as in `timeline.stragglers.PARTS`; ``ranks``: r numbers; ``steps``: s numbers of steps of the
run; ``seconds``: [r][s][p] numbers, null where a rank has no such part."""
LOG_FILE = "log.txt"
"""File in the folder of a rank: the last `MOST_LOG` bytes of its output."""
MOST_TEXT, MOST_LOG = 2**16, 2**22
