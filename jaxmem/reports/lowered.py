"""A step as it was given to a compiler, to be compiled once more."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmem.targets import CachedProgram, Target, family_of


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A module as bytecode (a tenth of its HLO), and the options that it was compiled with."""

    module: bytes = dataclasses.field(repr=False)
    options: Mapping[str, Any]

    def compile(self, target: Target, timeout: float = 3600) -> CachedProgram:
        """What the compiler says of it for another target of the same family.

        Raises:
            CompileError: XLA refused the program, ran out of time, or died.
        """
        return family_of(target).compile(self.module, target, dict(self.options), timeout)
