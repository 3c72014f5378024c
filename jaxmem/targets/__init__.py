"""Accelerators: their figures, and XLA's compilers for those that are not in the machine."""

from jaxmem.targets.background import Job as Job
from jaxmem.targets.cache import Compiled as Compiled
from jaxmem.targets.cuda.install import install_compiler as install_compiler
from jaxmem.targets.family import Family as Family
from jaxmem.targets.memories import HOST_KIND as HOST_KIND, HOST_KINDS as HOST_KINDS
from jaxmem.targets.registry import (
    FAMILIES as FAMILIES,
    example as example,
    family_of as family_of,
    known_targets as known_targets,
    resolve as resolve,
    target as target,
)
from jaxmem.targets.rules import Rules as Rules
from jaxmem.targets.shares import Shares as Shares
from jaxmem.targets.target import LocalDevice as LocalDevice, Target as Target
