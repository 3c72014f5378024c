"""Operations that hold programs of their own, and how each is cast."""

from jaxmem.levers.mixed_precision.custom_rules import custom_jvp, custom_vjp
from jaxmem.levers.mixed_precision.loops import checkpoint, cond, scan, while_loop

CALLS = {
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "checkpoint": checkpoint,
    "remat2": checkpoint,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "custom_vjp_call_jaxpr": custom_vjp,
}
