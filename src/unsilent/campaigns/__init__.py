"""Many trials, planned, resumable, stored. What runs and what it means is a study's: see `unsilent.campaigns.kinds`."""

from unsilent.campaigns.driver import run_campaign as run_campaign
from unsilent.campaigns.kinds import Kind as Kind
from unsilent.campaigns.options import Budget as Budget
from unsilent.campaigns.spec import TrialId as TrialId
from unsilent.campaigns.spec import WorkerSettings as WorkerSettings
from unsilent.campaigns.store import Store as Store
