"""Accelerators: their figures, and XLA's compilers for those that are not in the machine."""

from jaxmem.targets.accelerator import LocalDevice as LocalDevice, Target as Target
from jaxmem.targets.background import Job as Job
from jaxmem.targets.cache import CachedProgram as CachedProgram
from jaxmem.targets.calibrations import (
    MeasuredRates as MeasuredRates,
    bare_target as bare_target,
    calibration_name as calibration_name,
    calibration_path as calibration_path,
    forget_calibration as forget_calibration,
    keep_calibration as keep_calibration,
    rated as rated,
)
from jaxmem.targets.cuda.install import install_compiler as install_compiler
from jaxmem.targets.family import Family as Family
from jaxmem.targets.matmul import Matmul as Matmul
from jaxmem.targets.memories import HOST_KIND as HOST_KIND, HOST_KINDS as HOST_KINDS
from jaxmem.targets.peaks import Peaks as Peaks
from jaxmem.targets.registry import (
    FAMILIES as FAMILIES,
    computed_by as computed_by,
    example as example,
    example_target as example_target,
    family_of as family_of,
    known_targets as known_targets,
    resolve as resolve,
    target as target,
)
from jaxmem.targets.rules import Cycles as Cycles, Rules as Rules
from jaxmem.targets.shares import UNLIMITED as UNLIMITED, AchievableShares as AchievableShares
