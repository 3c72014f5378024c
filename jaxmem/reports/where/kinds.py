"""What a value of a step is, from its phase and the phases that read it.

An argument is what `describe_arguments` says, and so is what replaces it in its own memory at the
end; ``outputs`` are other results; ``gradients`` were made by the backward pass for the update;
``residuals`` were made before the backward pass and are read in it; ``workspace`` is scratch of
the vendor's libraries; ``constants`` are arrays in the program itself, which its function closes
over; everything else is ``temporaries``.
"""

from jaxmem.reports.xla.dump import Value
from jaxmem.reports.xla.instructions import Instruction

KINDS = (
    *("parameters", "optimizer state", "model state", "batch", "gradients", "residuals"),
    *("temporaries", "workspace", "outputs", "constants"),
)


def kind_of(made: Instruction, value: Value, phase: str, read_in: set[str]) -> str:
    """What a value is that an instruction of a phase made; ``read_in`` are its readers' phases."""
    if made.opcode == "custom-call" and value.index and value.shape.startswith(("u8", "s8")):
        return "workspace"
    if phase in ("backward", "recompute") and "update" in read_in:
        return "gradients"
    if phase in ("forward", "loss") and read_in & {"backward", "recompute"}:
        return "residuals"
    return "temporaries"
