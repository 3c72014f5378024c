"""jaxmem: memory optimization for JAX and Flax.

Takes a training step and a byte budget, and gives back a step that fits, proved with XLA's own
numbers for the GPU you name, whether or not that GPU is in the machine.
"""

import importlib

from jaxmem import optim as optim
from jaxmem._bytes import format_bytes as format_bytes
from jaxmem._errors import (
    BudgetError as BudgetError,
    CompileError as CompileError,
    JaxmemError as JaxmemError,
    JaxmemWarning as JaxmemWarning,
    OffloadError as OffloadError,
    PlanError as PlanError,
)
from jaxmem.accumulation import accumulate as accumulate
from jaxmem.autocast import autocast as autocast
from jaxmem.fitting import Fitting as Fitting, fit as fit
from jaxmem.layering import Layers as Layers, layers as layers
from jaxmem.loss_scale import LossScale as LossScale, LossScaleState as LossScaleState
from jaxmem.max_batch import BatchSize as BatchSize, max_batch_size as max_batch_size
from jaxmem.memory import (
    Diff as Diff,
    Measured as Measured,
    MemoryReport as MemoryReport,
    Residuals as Residuals,
    diff as diff,
    measure as measure,
    memory as memory,
    residuals as residuals,
)
from jaxmem.microbatching import microbatch as microbatch
from jaxmem.offloading import eval_shape as eval_shape, offload as offload, place as place
from jaxmem.planning import Plan as Plan
from jaxmem.plans import Frontier as Frontier, pareto as pareto, plan as plan
from jaxmem.policies import remat_policy as remat_policy
from jaxmem.precision import Precision as Precision, precision as precision
from jaxmem.remat import remat as remat
from jaxmem.sharding import Sharding as Sharding, shard as shard
from jaxmem.targets import Target as Target, install_compiler as install_compiler, target as target
from jaxmem.train import TrainState as TrainState, TrainStep as TrainStep, train_step as train_step
from jaxmem.updating import LayerStack as LayerStack, value_and_update as value_and_update

__version__ = "0.1.0"


def __getattr__(name: str):
    """`jaxmem.ops`, imported when it is first asked for."""
    if name != "ops":
        raise AttributeError(f"module 'jaxmem' has no attribute {name!r}")
    return importlib.import_module("jaxmem.ops")
