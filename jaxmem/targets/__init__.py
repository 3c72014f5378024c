"""GPUs: their figures, and XLA's compiler for one that is not in the machine."""

from jaxmem.targets._compiler import (
    Compiled as Compiled,
)
from jaxmem.targets._compiler import (
    compile_module as compile_module,
)
from jaxmem.targets._install import install_compiler as install_compiler
from jaxmem.targets._target import LocalDevice as LocalDevice
from jaxmem.targets._target import Target as Target
from jaxmem.targets._target import known_targets as known_targets
from jaxmem.targets._target import resolve as resolve
from jaxmem.targets._target import target as target
