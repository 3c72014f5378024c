"""What becomes of a program's gradients."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class InputGradients:
    """The gradients by a program's inputs on one device.

    Attributes:
        sizes: bytes in the end, by input, where they are known to be others than the input's.
        are_results: whether the program returns them: then they are there from its first kernel
            on. Otherwise an optimizer's update in the same program reads them, and they are there
            from when they are made to the end.
    """

    sizes: Mapping[int, int] = dataclasses.field(default_factory=dict, hash=False)
    are_results: bool = True
