"""GPUs: their figures, and XLA's compiler for one that is not in the machine."""

from jaxmem.targets.cache import Compiled as Compiled
from jaxmem.targets.cuda.compiler import compile_module as compile_module
from jaxmem.targets.cuda.install import install_compiler as install_compiler
from jaxmem.targets.figures import (
    LocalDevice as LocalDevice,
    Target as Target,
    known_targets as known_targets,
    resolve as resolve,
    target as target,
)
