"""The folder that the first alarm of a run writes, and how it is read: `incident.json`, and a folder for each rank.

    incidents/STEP-RUNID/
        incident.json           by rank 0: schema, alarms, verdicts, settings, versions, checkpoints; later `fault_verdict`
        rankR/                  each optional
            rank.json           host, device, generators' states, batch indices
            series.npz          series around the alarm
            batch.safetensors   the batch of the step
            state.safetensors   the state that the step begins with

Files from outside are hostile: they are read with limits on size and depth, and nothing in them is executed.
"""

from __future__ import annotations

SCHEMA = 1
INCIDENT_FILE, RANK_FILE, SERIES_FILE = "incident.json", "rank.json", "series.npz"
BATCH_FILE, STATE_FILE = "batch.safetensors", "state.safetensors"
