"""A plan as text."""

from typing import Any

from jaxmem.ground.bytes import format_bytes


def checked(error: float | None) -> str:
    """What stands beside a predicted time: how far off it may be, if that has been measured."""
    return "(unchecked)" if error is None else f"±{error:.0%}"


def table(plan: Any) -> str:
    """A plan as it is printed."""
    predicted, share = plan.predicted, ""
    if predicted.flops:  # a program may have no matmul
        share = f" ({predicted.recompute_flops / predicted.flops:.1%} of a forward pass)"
    lines = [
        f"{plan.planner} plan, {len(plan.rows)} regions (program {plan.fingerprint})",
        f"  projected {format_bytes(plan.projected_bytes)}, without regions "
        f"{format_bytes(plan.plain_bytes)}",
    ]
    if plan.written:
        lines.append(
            f"  as written, with {plan.opened} regions of its own: projected "
            f"{format_bytes(plan.written.bytes)}, recomputes "
            f"{plan.written.recompute_flops / 1e9:.4g} GFLOP "
            f"({plan.written.recompute_share:.1%} of a step)"
        )
    if plan.compiled:
        work = ""
        if plan.compiled.flops is not None and plan.compiled.moved is not None:
            work = f": {plan.compiled.flops / 1e9:.4g} GFLOP, moves "
            work += format_bytes(plan.compiled.moved)
        lines.append(f"  compiled  {format_bytes(plan.compiled.bytes)} for {plan.target}{work}")
    if plan.widens:
        lines.append(f"  {plan.target} computes bfloat16 in float32, from copies")
    if predicted.host_bytes:
        lines.append(f"  in host memory {format_bytes(predicted.host_bytes)}")
    if plan.compiled and plan.compiled.xla_pass_bytes is not None:
        lines.append(
            f"  XLA's own rematerialization pass would make it "
            f"{format_bytes(plan.compiled.xla_pass_bytes)}; plan.compiler_options turns it off"
        )
    if plan.budget is not None:
        lines.append(
            f"  budget    {format_bytes(plan.budget)}, of which "
            f"{format_bytes(plan.reserved)} reserved"
        )
    lines.append(
        f"  recomputes {predicted.recompute_flops / 1e9:.4g} GFLOP{share}, moves "
        f"{format_bytes(predicted.recompute_moved)}: about "
        f"{predicted.recompute_seconds * 1e3:.3g} ms beside {predicted.seconds * 3e3:.3g} ms "
        f"{checked(plan.time_error)} on {plan.target or 'the target'}"
    )
    if plan.rows:
        lines.append(f"  {'saves':>11}  {'keeps':>11}  {'GFLOP again':>11}  region")
    for row in plan.rows:
        where = row.first if row.first == row.last else f"{row.first} .. {row.last}"
        lines.append(
            f"  {format_bytes(row.saved_bytes):>11}  {format_bytes(row.kept_bytes):>11}  "
            f"{row.flops / 1e9:>11.4g}  {'  ' * row.depth}{where}"
        )
    return "\n".join(lines)
