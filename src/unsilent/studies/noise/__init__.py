"""How much do fault-free runs of one training differ, and why?"""

from unsilent.studies.noise.report import report as report
from unsilent.studies.noise.study import Asked as Asked
from unsilent.studies.noise.study import asked_of as asked_of
from unsilent.studies.noise.study import looks_at as looks_at
from unsilent.studies.noise.study import read_noise as read_noise
from unsilent.studies.noise.study import run_noise as run_noise
