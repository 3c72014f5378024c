"""Whether a loss is a mean, or a sum, over examples: proved from its program, or not.

Microbatches add up gradients of slices. That is exact for a mean, or a sum, over examples that do
not see one another, and for nothing else. README.md beside this file tells how it is proved.
"""

from jaxmem.levers.batch.independence.divisor import ParameterOnlyTerms as ParameterOnlyTerms
from jaxmem.levers.batch.independence.proof import (
    Metric as Metric,
    Proof as Proof,
    reduction_of as reduction_of,
)
