"""GPUs: their figures, and XLA's compiler for one that is not in the machine."""

from jaxmem.targets._compiler import compile_module as compile_module
from jaxmem.targets._install import install_compiler as install_compiler
from jaxmem.targets._results import Compiled as Compiled
from jaxmem.targets._target import (
    LocalDevice as LocalDevice,
    Target as Target,
    known_targets as known_targets,
    resolve as resolve,
    target as target,
)
