"""What the bytes of a step that was compiled for the CPU are worth."""

from jaxmem.targets import LocalDevice, Target, example

CPU_NOTE = (
    "compiled for the CPU: these bytes hold for this CPU alone. An accelerator's compiler fuses "
    "and schedules otherwise, and the CPU's undoes rematerialization. Name one for its bytes: "
    f"{example()}."
)


def is_cpu(target: Target | LocalDevice) -> bool:
    """Whether a target is the machine's own CPU."""
    return isinstance(target, LocalDevice) and target.platform == "cpu"
