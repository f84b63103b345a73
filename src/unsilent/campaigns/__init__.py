"""Many trials, planned, resumable, stored."""

from unsilent.campaigns.driver import Budget as Budget
from unsilent.campaigns.driver import run_campaign as run_campaign
from unsilent.campaigns.executors import make_executor as make_executor
from unsilent.campaigns.spec import CampaignSpec as CampaignSpec
from unsilent.campaigns.spec import Means as Means
from unsilent.campaigns.spec import TrialId as TrialId
from unsilent.campaigns.spec import TrialRow as TrialRow
from unsilent.campaigns.store import Store as Store
