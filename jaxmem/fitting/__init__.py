"""All levers chosen together, for the least predicted time whose compiled bytes fit."""

from jaxmem.fitting.largest import BatchSize as BatchSize, max_batch_size as max_batch_size
from jaxmem.fitting.search import (
    ALLOWED as ALLOWED,
    KEPT as KEPT,
    Candidate as Candidate,
    Fitting as Fitting,
    Levers as Levers,
    Search as Search,
    advise as advise,
    fit as fit,
)
