"""The levers that `fit` may turn, one class each."""

from jaxmem.fitting.levers.host import HostLever
from jaxmem.fitting.levers.lever import Lever as Lever, names_of
from jaxmem.fitting.levers.mesh import MeshLever
from jaxmem.fitting.levers.microbatches import MicrobatchesLever
from jaxmem.fitting.levers.moments import MomentsLever
from jaxmem.fitting.levers.operations import OperationsLever
from jaxmem.fitting.levers.precision import PrecisionLever
from jaxmem.fitting.levers.setting import Levers as Levers, register
from jaxmem.fitting.levers.stage import StageLever

# In the order in which they wrap the optimizer: what goes outside comes last.
LEVERS = register(
    PrecisionLever(),
    OperationsLever(),
    MicrobatchesLever(),
    MomentsLever(),
    MeshLever(),
    StageLever(),
    HostLever(),
)


def allowed() -> dict[str, str]:
    """What changes the mathematics, and is searched where it is allowed."""
    return names_of(LEVERS, lambda lever: lever.allowed)


def kept() -> dict[str, str]:
    """What does not, and is searched unless it is to be kept."""
    return {
        **names_of(LEVERS, lambda lever: lever.kept),
        "residuals": "recompute residuals",
        "regions": "plan in place of the loss's own regions",
    }
