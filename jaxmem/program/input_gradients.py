"""What becomes of a program's gradients."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

Become = Literal["results", "updates", "summands"]


@dataclasses.dataclass(frozen=True)
class InputGradients:
    """The gradients by a program's inputs on one device.

    Attributes:
        sizes: bytes in the end, by input, where they are known to be others than the input's.
        become: ``"results"`` of the program, which are there from its first kernel on; or what an
            optimizer's ``"updates"`` in the same program read, there from when they are made to the
            end; or ``"summands"`` of sums over the slices of a batch, there for one kernel each.
    """

    sizes: Mapping[int, int] = dataclasses.field(default_factory=dict, hash=False)
    become: Become = "results"
