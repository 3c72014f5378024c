"""Operations that keep less, in the place of plain ones, as a lever."""

import jax

from jaxmem.fitting.levers.lever import Lever
from jaxmem.fitting.sizes import whole
from jaxmem.ground.bytes import format_bytes
from jaxmem.ops.kernel_replacement import calling
from jaxmem.ops.swapping import LEAST, Swap, Wanted, swapped, swaps
from jaxmem.targets import family_of

_KERNELS = "kernels"
_OF = {"scores": "attention", "logits": "the loss"}


class OperationsLever(Lever):
    """``operations``: whether `jaxmem.ops` are in the place of the loss's plain attention and
    cross-entropy (True), or a kernel of the device's own in that of attention (``"kernels"``)."""

    name = "operations"
    allowed = {  # noqa: RUF012
        "operations": "put jaxmem.ops in the place of attention and cross-entropy, with other "
        "rounding",
        _KERNELS: "put the device's own kernel in the place of attention, with other rounding; no "
        "other device runs such a step",
    }
    changes_state = False
    changes_loss = shifts_projection_error = True

    def values(self, workload):
        if not self._found(workload, True):
            if self.name in workload.allow:
                workload.refused[self.name] = "the loss has no attention and no cross-entropy of "
                workload.refused[self.name] += "64 MiB or more"
            return [False]
        values: list[bool | str] = [False]
        if workload.may(self.name):
            values.append(True)
        if not self._found(workload, _KERNELS):
            if _KERNELS in workload.allow:
                workload.refused[_KERNELS] = "no attention of 64 MiB or more is one that a kernel "
                workload.refused[_KERNELS] += f"of {workload.device.name} takes"
        elif workload.may(_KERNELS):
            values.append(_KERNELS)
        return values

    def brings(self, costs, name, best):
        value, workload = _KERNELS if name == _KERNELS else True, costs.workload
        if not (found := self._found(workload, value)):
            return ""
        before = (best.levers if best else workload.as_is).replace(operations=False, microbatches=1)
        after = before.replace(operations=value)
        plain, less = (costs.without_recomputation(levers).projected for levers in (before, after))
        lines = {one.kind: one.line for one in found}
        kinds = {kind: of for kind, of in _OF.items() if kind in lines}
        what = " and ".join(f"{kind} of {of} ({lines[kind]})" for kind, of in kinds.items())
        sizes = f"{format_bytes(less)} instead of {format_bytes(plain)}"
        said = f"without {what} the batch takes {sizes} (projected, nothing recomputed)"
        if less >= plain:
            return ""
        if best is None:
            return said
        # Of the whole batch, and of as many slices as were chosen: all counts would be a search.
        settings = {after, after.replace(microbatches=best.levers.microbatches)}
        plans = {levers: costs.plan(levers, workload.budget) for levers in settings}
        seconds = [
            costs.candidate_of(levers, plan).seconds
            for levers, plan in plans.items()
            if not isinstance(plan, int)
        ]
        fastest = min(seconds, default=best.seconds)
        if fastest >= best.seconds:
            return said
        return f"{said}; the step would take {_ms(fastest)} ms instead of {_ms(best.seconds)}"

    def _found(self, workload, value) -> list[Swap]:
        """What a value puts something in the place of. The loss is traced once for both."""
        if self.name not in workload.found:
            step, state = workload.step(workload.as_is), workload.state(workload.as_is)
            arguments = state.params, workload.batch, state.model_state, state.key
            wanted = self._wanted(workload, _KERNELS, operations=True)
            found = swaps(step.plain_loss, jax.tree.map(whole, arguments), wanted)
            workload.found[self.name] = found
        return [one for one in workload.found[self.name] if one.by_kernel or value is True]

    def _wanted(self, workload, value, operations: bool) -> Wanted:
        least, device = LEAST * workload.devices, workload.device
        name = family_of(device).attention(device) if value == _KERNELS else ""
        if not name:
            return Wanted(least, operations)
        mesh, rows = workload.rows
        cut = mesh and any(mesh.shape[axis] > 1 for axis in mesh.shape if axis not in rows)
        kernel = None if cut else calling(name, mesh, rows)  # the model may cut its heads
        return Wanted(least, operations, kernel, name)

    def text(self, value):
        return "jaxmem.ops" if value is True else "the device's attention"

    def loss(self, workload, loss_fn, value):
        operations = value is True or self.name in workload.allow
        return swapped(loss_fn, self._wanted(workload, value, operations))


def _ms(seconds: float) -> str:
    """As the table has it."""
    return f"{1e3 * seconds:.4g}"
