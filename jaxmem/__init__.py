"""jaxmem: memory optimization for JAX and Flax.

Takes a training step and a byte budget, and gives back a step that fits, proved with XLA's own
numbers for the GPU you name, whether or not that GPU is in the machine.
"""

from jaxmem._bytes import format_bytes as format_bytes
from jaxmem._errors import BudgetError as BudgetError
from jaxmem._errors import CompileError as CompileError
from jaxmem._errors import JaxmemError as JaxmemError
from jaxmem._errors import OffloadError as OffloadError
from jaxmem._errors import PlanError as PlanError
from jaxmem.accumulation import accumulate as accumulate
from jaxmem.memory import MemoryReport as MemoryReport
from jaxmem.memory import memory as memory
from jaxmem.offloading import eval_shape as eval_shape
from jaxmem.offloading import offload as offload
from jaxmem.offloading import place as place
from jaxmem.planning import Plan as Plan
from jaxmem.precision import Precision as Precision
from jaxmem.precision import precision as precision
from jaxmem.remat import plan as plan
from jaxmem.remat import remat as remat
from jaxmem.remat import remat_policy as remat_policy
from jaxmem.targets import Target as Target
from jaxmem.targets import install_compiler as install_compiler
from jaxmem.targets import target as target
from jaxmem.train import TrainState as TrainState
from jaxmem.train import TrainStep as TrainStep
from jaxmem.train import train_step as train_step

__version__ = "0.1.0"
