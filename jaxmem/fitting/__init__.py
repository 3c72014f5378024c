"""All levers chosen together, for the least predicted time whose compiled bytes fit."""

from jaxmem.fitting.advice import advise as advise
from jaxmem.fitting.capacity import (
    Largest as Largest,
    largest as largest,
    max_batch_size as max_batch_size,
)
from jaxmem.fitting.devices import (
    DevicesNeeded as DevicesNeeded,
    Tried as Tried,
    devices_needed as devices_needed,
)
from jaxmem.fitting.levers import (
    LEVERS as LEVERS,
    Lever as Lever,
    Levers as Levers,
    allowed as allowed,
    kept as kept,
)
from jaxmem.fitting.one_call import fit as fit
from jaxmem.fitting.search import LeverSearch as LeverSearch
from jaxmem.fitting.table import Candidate as Candidate, Fitting as Fitting
from jaxmem.fitting.workload import Workload as Workload
