"""jaxmem: memory optimization for JAX and Flax.

Takes a training step and a byte budget, and gives back a step that fits, proved with XLA's own
numbers for the accelerator you name, whether or not it is in the machine.
"""

import importlib as _importlib

from jaxmem import optim as optim
from jaxmem.fitting import (
    DevicesNeeded as DevicesNeeded,
    Fitting as Fitting,
    Largest as Largest,
    devices_needed as devices_needed,
    fit as fit,
    largest as largest,
    max_batch_size as max_batch_size,
)
from jaxmem.ground.bytes import format_bytes as format_bytes
from jaxmem.ground.errors import (
    BudgetError as BudgetError,
    CompileError as CompileError,
    JaxmemError as JaxmemError,
    JaxmemWarning as JaxmemWarning,
    OffloadError as OffloadError,
    PlanError as PlanError,
    ResultError as ResultError,
)
from jaxmem.ground.version import __version__ as __version__
from jaxmem.levers.batch.accumulation import accumulate as accumulate
from jaxmem.levers.batch.microbatching import microbatch as microbatch
from jaxmem.levers.host.layering import Layers as Layers, layers as layers
from jaxmem.levers.host.offloading import (
    eval_shape as eval_shape,
    offload as offload,
    place as place,
)
from jaxmem.levers.host.updating import (
    LayerStack as LayerStack,
    value_and_update as value_and_update,
)
from jaxmem.levers.mixed_precision.autocasting import autocast as autocast
from jaxmem.levers.mixed_precision.loss_scale import (
    LossScale as LossScale,
    LossScaleState as LossScaleState,
)
from jaxmem.levers.mixed_precision.policy import Precision as Precision, precision as precision
from jaxmem.levers.sharding import Sharding as Sharding, shard as shard
from jaxmem.rematerialization.frontier import Frontier as Frontier, pareto as pareto
from jaxmem.rematerialization.loop_budgets import scan as scan, while_loop as while_loop
from jaxmem.rematerialization.named.policy import NamedPolicy as NamedPolicy
from jaxmem.rematerialization.named.shaped import ShapedPolicy as ShapedPolicy
from jaxmem.rematerialization.named.suggesting import suggest_names as suggest_names
from jaxmem.rematerialization.named.suggestions import Suggestions as Suggestions
from jaxmem.rematerialization.plan import Plan as Plan
from jaxmem.rematerialization.plans import plan as plan
from jaxmem.rematerialization.policies import remat_policy as remat_policy
from jaxmem.rematerialization.transform import remat as remat
from jaxmem.reports import (
    Calibration as Calibration,
    Diff as Diff,
    Measured as Measured,
    MemoryReport as MemoryReport,
    Residuals as Residuals,
    calibrate as calibrate,
    diff as diff,
    measure as measure,
    memory as memory,
    residuals as residuals,
)
from jaxmem.targets import Target as Target, install_compiler as install_compiler, target as target
from jaxmem.training import (
    TrainState as TrainState,
    TrainStep as TrainStep,
    train_step as train_step,
)


def __getattr__(name: str):
    """`jaxmem.ops`, imported when it is first asked for."""
    if name != "ops":
        raise AttributeError(f"module 'jaxmem' has no attribute {name!r}")
    return _importlib.import_module("jaxmem.ops")
