"""Sites of values that can be corrupted: addresses, parameters and buffers of a model, values of a running evaluation."""

from unsilent.faults.receipts import Receipt as Receipt
from unsilent.sites.addresses import Address as Address
from unsilent.sites.corrupting import corrupt as corrupt
from unsilent.sites.corrupting import corrupted_copy as corrupted_copy
from unsilent.sites.injecting import inject as inject
from unsilent.sites.operations import OperationInjector as OperationInjector
from unsilent.sites.parameters import ParameterInjection as ParameterInjection
from unsilent.sites.parameters import Parameters as Parameters
from unsilent.sites.survey import Survey as Survey
from unsilent.sites.transients import TransientInjection as TransientInjection
