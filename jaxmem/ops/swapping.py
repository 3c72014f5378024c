"""Attention and cross-entropy of an unmodified function, put in the place of the plain ones."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.frameworks.modules import on_arrays
from jaxmem.ground.bytes import format_bytes, parse_budget
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.progress import tell
from jaxmem.ops.attention_replacement import AttentionReplacement
from jaxmem.ops.dot_product_attention import check_implementation
from jaxmem.ops.kernel_replacement import Kernel, KernelReplacement, calling
from jaxmem.ops.loss_replacement import LossReplacement
from jaxmem.ops.patterns import Match, UseGraph
from jaxmem.ops.replacements import Replacements

# Bytes of scores or logits from which on it is worth it. Chosen: half of what the operations
# compute at a time (`jaxmem.ops.blocks.BLOCK`).
LEAST = 64 * 2**20


def swap(fun: Callable, *, least: int | str = LEAST, implementation: str | None = None) -> Callable:
    """``fun`` with `attention` and `softmax_cross_entropy` where it has plain ones.

    The function is traced when it is called. Of each matmul that becomes the scores of an attention
    or the logits of a loss, and nothing else, the operations from there to what is made of it are
    left out and `jaxmem.ops` put in their place, in ``scan`` and `jax.checkpoint` too. Found are
    what ``jax.nn``, ``optax`` and Flax make, and their like by hand: scores may go through any
    scale, cap, mask and bias, logits through a bias or a soft cap, and log-probabilities be picked
    by `jnp.take_along_axis` or by a one-hot matrix. What it did, and the bytes of the matrix that
    no longer is, the logger ``jaxmem`` says. Values and gradients are those of ``fun``, but for
    rounding: what ``fun`` has in 16 bits between two matmuls is float32 here.

    What is not found: dropout of attention weights, weights or logits that ``fun`` returns, label
    smoothing (call the operation itself for it), a causal mask's saving of work.

    Args:
        fun: any JAX function: the loss, usually.
        least: bytes of a matrix of scores or logits from which on it is worth it, by default
            ``"64MiB"``.
        implementation: of attention, as `attention` has it. The one of the device's own takes the
            place of attention in bfloat16 or float16 whose scores are scaled, and masked by a
            causal mask or not at all; of other attention `attention` does, as with None.

    Raises:
        JaxmemError: it is not a function, ``least`` does not parse, or there is no such
            implementation.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def attend(x):
    ...     return jax.nn.softmax(x @ x.T) @ x
    >>> swapped = jaxmem.ops.swap(attend, least="1KiB")
    >>> x = jax.random.normal(jax.random.key(0), (64, 8), "float32")
    >>> bool(jnp.allclose(swapped(x), attend(x), atol=1e-5))
    True
    """
    if not callable(fun) or isinstance(fun, type):
        raise JaxmemError(f"jaxmem.ops.swap takes a function of arrays; got {fun!r}.")
    size = parse_budget(least, what="size least=")
    check_implementation(implementation)
    own = implementation not in (None, "xla")
    kernel = calling(str(implementation)) if own else None

    def say(found: list[Swap]) -> None:
        name = getattr(fun, "__qualname__", repr(fun))
        nothing = (
            f"{name} has no attention and no cross-entropy with whole labels of at least "
            f"{format_bytes(size)} whose scores or logits nothing else reads (an accuracy, say)"
        )
        for said in map(str, found) if found else [nothing]:
            tell(f"jaxmem.ops.swap: {said}")

    return swapped(fun, Wanted(size, kernel=kernel, name=implementation or ""), say)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is to be put in place: from how many bytes of a matrix on, `jaxmem.ops`
    (``operations``), and in the place of attention a kernel of the device's, by name, where that
    takes it."""

    least: int
    operations: bool = True
    kernel: Kernel | None = None
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Swap:
    """An operation in the place of a plain one, whose scores or logits (``kind``) are no longer
    made."""

    operation: str
    kind: str
    aval: Any
    line: str
    by_kernel: bool = False

    @property
    def matrix(self) -> str:
        """What is no longer made, and its bytes."""
        size = format_bytes(self.aval.size * self.aval.dtype.itemsize)
        return f"{self.kind} {self.aval.dtype}{list(self.aval.shape)}, {size}, of {self.line}"

    def __str__(self):
        return f"{self.operation} instead of {self.matrix}"


def swapped(
    fun: Callable, wanted: Wanted, told: Callable[[list[Swap]], Any] = lambda found: None
) -> Callable:
    """``fun`` as `swap` makes it; ``told`` is called with what was found whenever it is traced."""

    def evaluate(call, leaves):
        flat = jaxprs.flatten(call, leaves)
        swapper = _Swapper(wanted)
        results = swapper.run(flat, [*flat.consts, *leaves])
        told(swapper.found)
        return jax.tree.unflatten(flat.out_tree, results)

    @functools.wraps(fun)
    def run(*args, **kwargs):
        return on_arrays(evaluate, fun, args, kwargs)

    run.unplanned = fun  # type: ignore[attr-defined]  # what is proved of it holds of this one
    return run


def swaps(fun: Callable, args: tuple, wanted: Wanted) -> list[Swap]:
    """What `swap` would put in place, given abstract arguments."""
    found: list[Swap] = []
    jax.eval_shape(swapped(fun, wanted, found.extend), *args)
    return found


class _Swapper:
    def __init__(self, wanted: Wanted):
        self.wanted = wanted
        self.found: list[Swap] = []

    def run(self, flat: jaxprs.FlatJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """The results of a flat jaxpr, each value computed where it is first needed: what a
        replacement reads may stand after some of what it replaces."""
        values = dict(enumerate(inputs))
        graph = UseGraph(flat)
        replacements = Replacements(graph, self._replacements(graph))
        for step in flat.steps:
            if jaxprs.side_effects(step):
                self._compute(replacements, values, [*step.uses])
                values.update(zip(step.outputs, self._evaluate(step, values), strict=True))
        self._compute(replacements, values, [v for v in flat.outputs if isinstance(v, int)])
        return [jaxprs.read(values, output) for output in flat.outputs]

    def _compute(
        self, replacements: Replacements, values: dict[int, Any], wanted: list[int]
    ) -> None:
        graph = replacements.graph
        while wanted:
            value = wanted[-1]
            if value in values:
                wanted.pop()
                continue
            at = graph.maker[value]
            missing = [read for read in replacements.reads(at) if read not in values]
            if missing:
                wanted.extend(missing)
            elif at in replacements.by_step:
                values.update(replacements.results(at, values))
            else:
                step = graph.flat.steps[at]
                values.update(zip(step.outputs, self._evaluate(step, values), strict=True))

    def _evaluate(self, step: jaxprs.FlatStep, values: dict[int, Any]) -> list[Any]:
        operands = [jaxprs.read(values, operand) for operand in step.inputs]
        if step.primitive == "scan":
            loop = jaxprs.loop_of(step.equation)
            consts, carry = operands[loop.body_consts], operands[loop.carry]

            def body(carry, slices):
                results = self.run(loop.body, [*loop.body.consts, *consts, *carry, *slices])
                return results[: len(carry)], results[len(carry) :]

            slices = operands[loop.carry.stop :]
            with jaxprs.context(step):
                last, stacked = jax.lax.scan(body, carry, slices, **loop.options)
            return [*last, *stacked]
        if jaxprs.is_region(step.equation):
            flat = jaxprs.called_jaxpr(step.equation)
            return jaxprs.checkpoint_like(
                step, lambda *operands: self.run(flat, [*flat.consts, *operands]), operands
            )
        return jaxprs.evaluate(step, operands)

    def _replacements(self, graph: UseGraph) -> dict[int, Any]:
        """By the number of each step whose result comes from an operation."""
        found: dict[int, Any] = {}
        for at, step in enumerate(graph.flat.steps):
            if step.primitive != "dot_general":
                continue
            aval = step.equation.outvars[0].aval
            size = aval.size * aval.dtype.itemsize
            if size < self.wanted.least or not jnp.issubdtype(aval.dtype, jnp.floating):
                continue
            match = graph.match(at)
            if match is None:
                continue
            replacement = self._replacement(graph, match, aval)
            if replacement:
                found |= dict.fromkeys(match.results, replacement)
                kind = "scores" if isinstance(replacement, AttentionReplacement) else "logits"
                by_kernel = isinstance(replacement, KernelReplacement)
                self.found.append(Swap(replacement.name, kind, aval, step.line, by_kernel))
        return found

    def _replacement(self, graph: UseGraph, match: Match, aval: Any) -> Any:
        wanted = self.wanted
        replacement: Any = LossReplacement.of(graph, match)
        # Of an attention some operations run again as they are, where no axis is explicit.
        if replacement is None and not match.moved and not jaxprs.has_explicit_axes(aval):
            if wanted.kernel:
                replacement = KernelReplacement.with_kernel(
                    graph, match, wanted.kernel, wanted.name
                )
            if replacement:
                return replacement
            replacement = AttentionReplacement.of(graph, match)
        return replacement if wanted.operations else None
