"""Microbatches as a lever."""

import jax

from jaxmem.fitting.levers.lever import Lever
from jaxmem.fitting.sizes import bytes_in_float32, bytes_of, slice_counts, whole
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.batch.independence import Proof, reduction_of
from jaxmem.levers.batch.slices import batch_size


class MicrobatchesLever(Lever):
    """``microbatches``: into how many slices the batch is cut."""

    name, neutral = "microbatches", 1
    allowed = {  # noqa: RUF012
        "statistics": "cut a batch whose loss is not proved to be a mean over its examples"
    }
    kept = {"batch": "cut the batch into microbatches"}  # noqa: RUF012
    changes_state = False
    changes_loss = shifts_projection_error = True

    def values(self, workload):
        fewest = min(workload.data_parallel_sizes)
        if not workload.may("batch"):
            return [1]
        counts = slice_counts(workload.batch, fewest)
        if len(counts) > 1:
            return self._provable(workload, counts)
        try:
            batch_size(workload.batch)
        except JaxmemError as error:
            workload.refused[self.name] = f"the batch cannot be cut: {error}"
        return counts

    def _provable(self, workload, counts: list[int]) -> list[int]:
        """The counts for which the loss of the batch is proved to be the mean (weighted or not), or
        the sum, of its slices', and the model state the same; all of them where that does not
        matter."""
        step, state = (
            workload.step(workload.as_is),
            jax.tree.map(whole, workload.state(workload.as_is)),
        )
        batch = jax.tree.map(whole, workload.batch)
        size = jax.tree.leaves(batch)[0].shape[0]
        arguments = state.params, state.model_state, state.key

        def proof_for(counts: list[int]) -> Proof:
            among = {1, *workload.data_parallel_sizes}
            pieces = {count * ways for count in counts for ways in among if ways * count <= size}
            parts = {size // count for count in pieces}
            return reduction_of(step.plain_loss, batch, parts, *arguments)

        # A slice of one example may make a program of its own, with axes that are gone.
        several = [count for count in counts if count * max(workload.data_parallel_sizes) < size]
        fewer = several if len(several) > 1 else counts
        proof = proof_for(fewer)
        if proof.reduction is not None and not proof.state:
            ones = [count for count in counts if count not in fewer]
            alone = proof_for(ones) if ones else proof
            same = alone.reduction == proof.reduction and not alone.state
            return counts if same else fewer
        if proof.refused:
            workload.refused[self.name] = f"the loss takes no slice of the batch: {proof.refused}"
            return [1]
        if "statistics" in workload.allow:
            if proof.divisor is None:  # else slices are weighted, and not averaged
                workload.reduction = proof.reduction or "mean"
            return counts
        kept = "it is to be kept" if "statistics" in workload.keep else "allow=('statistics',)"
        why = proof.why or f"its model state would be another one: {proof.state}"
        workload.refused["statistics"] = f"the loss cannot be cut: {why}; {kept}"
        return [1]

    def text(self, value):
        return f"{value} microbatches"

    def fastest_loss_value(self, workload, value):
        """The whole batch at once takes the fewest launches and the least traffic of parameters."""
        return self.neutral

    def options(self, workload, value):
        return {"microbatches": value}

    def reserved_bytes(self, costs, levers):
        """The rest of the batch, the sum of the gradients, and what is laid out anew."""
        batch, gradients = bytes_of(costs.workload.on(levers).batch), costs.gradients(levers)
        rest = batch - batch // levers.microbatches
        return rest + bytes_in_float32(gradients) + costs.relaid_bytes(levers)

    def seconds(self, costs, levers):
        """The sum is read and written, and the gradients read, for each slice."""
        moved = 3 * levers.microbatches * bytes_in_float32(costs.gradients(levers))
        return moved / costs.workload.device.memory_bandwidth
