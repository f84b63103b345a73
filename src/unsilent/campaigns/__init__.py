"""Campaigns: many trials that are planned, run and stored, and that continue after an interruption.

A study decides what a trial runs and what its row means: see `unsilent.campaigns.kinds`.
"""

from unsilent.campaigns.driver import run_campaign as run_campaign
from unsilent.campaigns.kinds import Kind as Kind
from unsilent.campaigns.options import Budget as Budget
from unsilent.campaigns.spec import TrialId as TrialId
from unsilent.campaigns.spec import WorkerSettings as WorkerSettings
from unsilent.campaigns.store import Store as Store
