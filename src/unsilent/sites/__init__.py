"""Where values can go wrong: addresses, and the parameters and buffers of a model."""

from unsilent.sites.addresses import Address as Address
from unsilent.sites.injecting import inject as inject
from unsilent.sites.parameters import Injection as Injection
from unsilent.sites.parameters import Parameters as Parameters
from unsilent.sites.receipts import Receipt as Receipt
