"""A step as it was given to a compiler, to be compiled once more."""

import dataclasses
import gzip
from collections.abc import Mapping
from typing import Any

from jaxmem.targets import Compiled, Target, family_of


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A module as gzipped bytecode, and the options that it was compiled with."""

    module: bytes = dataclasses.field(repr=False)
    options: Mapping[str, Any]

    @classmethod
    def of(cls, module: bytes, options: Mapping[str, Any]) -> "Lowered":
        """Keeps a module, in a quarter of its bytes."""
        return cls(gzip.compress(module, 1), dict(options))

    def compile(self, target: Target, timeout: float = 3600) -> Compiled:
        """What the compiler says of it for another target of the same family.

        Raises:
            CompileError: XLA refused the program, ran out of time, or died.
        """
        module = gzip.decompress(self.module)
        return family_of(target).compile(module, target, dict(self.options), timeout)
