"""What is planned: a function with its arguments as a program, and what its plan may cost."""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import _jax
from jaxmem._bytes import device_budget, format_bytes, parse_budget
from jaxmem._checks import name_of, noted, shapes_of
from jaxmem._emit import emit
from jaxmem._errors import BudgetError, JaxmemError, PlanError
from jaxmem._modules import array_call
from jaxmem.planning import PLANNERS, Layout, Plan, Planner, Rates, lowest, write_plan
from jaxmem.program import Program, read_program
from jaxmem.targets import LocalDevice, Target, resolve

_HOST_LINK = 64e9  # bytes per second, of an H200's: where no target is named


class Allowed:
    """What a plan may cost, and on what: a budget in bytes, the planner, and whether residuals may
    wait in host memory."""

    def __init__(
        self, budget: int | None, reserved: int, gpu: Target | None, name: str, offload: bool
    ):
        self.budget, self.reserved, self.gpu, self.name = budget, reserved, gpu, name
        self.rates = Rates()
        if gpu:
            self.rates = Rates(gpu.fp32_flops, gpu.half_flops, gpu.memory_bandwidth)
        if offload:
            link = gpu.host_bandwidth if gpu else _HOST_LINK
            self.rates = dataclasses.replace(self.rates, host=link)

    @classmethod
    def parse(cls, budget, reserved, target, planner: str, offload: bool = False) -> "Allowed":
        """From what a user writes."""
        if planner not in PLANNERS:
            known = ", ".join(map(repr, PLANNERS))
            raise PlanError(f"There is no planner named {planner!r}; the known ones are {known}.")
        chosen = None if target is None else resolve(target)
        device = (chosen.usable_bytes, chosen.name) if chosen else ()
        capacity = chosen.usable_bytes if chosen else None
        return cls(
            None if budget is None else device_budget(budget, *device),
            0 if reserved == 0 else parse_budget(reserved, capacity),
            chosen.gpu if isinstance(chosen, LocalDevice) else chosen,
            planner,
            offload,
        )

    def on_gpu(self, program: Program) -> Program:
        """A program as the GPU runs it."""
        return program if self.gpu is None or self.gpu.has_bfloat16 else program.widened

    def planner(self, program: Program) -> Planner:
        """The plans that there are for a program."""
        return PLANNERS[self.name](self.on_gpu(program), self.rates)

    def plan(self, program: Program) -> Plan:
        """The plan of a program by projected bytes.

        Raises:
            BudgetError: none is projected to fit.
        """
        planner = self.planner(program)
        around = program.boundary_bytes + self.reserved
        layout = planner.frugal() if self.budget is None else planner.within(self.budget - around)
        if layout is None:
            least = planner.least()
            raise self.too_small(program, least, least.peak + around, "projected")
        return self.write(program, layout, planner)

    def write(self, program: Program, layout: Layout, planner: Planner) -> Plan:
        """A layout as a plan."""
        return write_plan(
            self.name,
            self.on_gpu(program),
            self.rates,
            layout,
            planner.plain,
            self.reserved,
            self.budget,
            self.gpu.name if self.gpu else "",
            self.gpu.time_error if self.gpu else None,
        )

    def too_small(self, program: Program, least: Layout, total: int, word: str) -> BudgetError:
        """The error of a budget that nothing fits, when the least takes ``total`` bytes."""
        return BudgetError(
            f"No {self.name} plan fits the budget of {format_bytes(self.budget or 0)} with "
            f"{format_bytes(self.reserved)} of it reserved; the lowest one that does is "
            f"{format_bytes(total)} ({total} bytes {word}, "
            f"{format_bytes(program.boundary_bytes)} of them arguments and gradients), set by "
            f"{lowest(program, least)}. Raise the budget, shrink the batch, or accumulate "
            "gradients over microbatches.",
            total,
        )


class Problem:
    """A function, its arguments, and the program that it is."""

    def __init__(
        self,
        fun: Callable,
        args: tuple,
        kwargs: dict,
        argnums: int | Sequence[int],
        has_aux: bool = False,
        open_regions: bool = False,
    ):
        self.has_aux = has_aux
        with array_call(fun, args, kwargs) as call:
            self.leaves, self.value = call.leaves, call.value
            with noted(name_of(fun), fun, args, kwargs):
                self.flat = _jax.flatten(call.fun, call.leaves, open_regions)
        # Leaves of differentiated arguments, as numbers of inputs: constants come first.
        wanted = _differentiated(argnums, args)
        self.wanted = [at for at, owner in enumerate(call.owners) if owner in wanted]
        first = self.flat.input_count - len(call.leaves)
        self.program = read(self.flat, frozenset(first + at for at in self.wanted))

    def check_loss(self, name: str, scalar: bool) -> None:
        """Raises `PlanError` if nothing that the function returns can be differentiated, or if it
        is to be a loss and is no floating-point scalar."""
        outputs = jax.tree.unflatten(self.flat.out_tree, map(self.flat.aval, self.flat.outputs))
        outputs = self.value(outputs)
        if self.has_aux:
            outputs = _loss_of(outputs, name)
        leaves = jax.tree.leaves(outputs)
        floating = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        found = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:4]) or "nothing"
        if not floating:
            raise PlanError(
                f"{name} plans what a backward pass keeps, and there is none of a function that "
                f"returns {found}. Pass one that returns floating-point values."
            )
        if scalar and (len(leaves) > 1 or leaves[0].shape):
            raise PlanError(
                f"With a target {name} compiles the value and gradient of a loss, a floating-point "
                f"scalar, and the function returns {found}. Return its mean or its sum "
                "(has_aux=True if there is more beside it), or leave target out to have projected "
                "bytes."
            )

    def step(self, plan: Plan) -> Callable:
        """The value and gradient of the planned function, of its array leaves."""

        def planned(*leaves):
            return self.value(emit(self.flat, self.program, plan, leaves))

        real = [at for at in self.wanted if jnp.issubdtype(self.leaves[at].dtype, jnp.inexact)]
        return jax.value_and_grad(planned, real, self.has_aux)


def _loss_of(results: Any, name: str) -> Any:
    """The loss of a function with ``has_aux=True``."""
    several = isinstance(results, tuple | list)
    if not several or len(results) != 2:
        count = f"{len(results)} values, " if several else ""
        raise PlanError(
            f"{name}(..., has_aux=True) takes a function that returns (loss, aux), and it returns "
            f"{count}{shapes_of(results)}. Return a pair, or leave has_aux out."
        )
    return results[0]


def read(flat: _jax.FlatJaxpr, differentiated: frozenset[int] | None = None) -> Program:
    """The program of a traced function.

    Raises:
        PlanError: it has side effects, or random bits that would differ the second time.
    """
    for step in flat.steps:
        effects = _jax.side_effects(step)
        if effects:
            bodies = map(_jax.find_callback, _jax.inner_jaxprs(step.equation))
            inside = "".join(f", in it {found}" for found in bodies if found)
            raise PlanError(
                f"The function has a side effect, and a region would run it twice: "
                f"{step.primitive} ({', '.join(effects)}) at {step.line}{inside}. Return the value "
                "and print or store it outside, or keep this part outside of what is planned."
            )
        if step.primitive == "rng_uniform":
            raise PlanError(
                f"The function draws random bits without a key ({step.primitive} at {step.line}), "
                "and a region would draw others the second time. Use jax.random with a key."
            )
    return read_program(flat, differentiated)


def input_names(
    program: Program, fun: Callable, args: tuple, kwargs: dict
) -> list[tuple[str, str]]:
    """What a program takes: the name of each array in a call of its function, and its type."""
    try:
        parameters = [*inspect.signature(fun).parameters]
    except (TypeError, ValueError):
        parameters = []  # built in: its parameters have no names
    owners = [
        *parameters[: len(args)],
        *(f"args[{at}]" for at in range(len(parameters), len(args))),
    ]
    names = [
        owner + jax.tree_util.keystr(path)
        for owner, value in [*zip(owners, args, strict=True), *kwargs.items()]
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
        if _jax.is_array(leaf)
    ]
    closed_over = ["an array closed over"] * (program.input_count - len(names))
    return list(zip([*closed_over, *names], program.types[: program.input_count], strict=True))


def _differentiated(argnums: int | Sequence[int], args: tuple) -> set[int]:
    """The numbers of the positional arguments that ``argnums`` names, counted from the first.

    Raises:
        JaxmemError: there is no such argument, or none is named.
    """
    chosen = [argnums] if isinstance(argnums, int) else list(argnums)
    count = max(len(args), 1)  # of a call by keywords alone the first is asked for, and not there
    for number in chosen:
        if not isinstance(number, int) or not -count <= number < count:
            raise JaxmemError(
                "argnums= are the numbers of the positional arguments to differentiate, and the "
                f"call has {len(args)}; got {argnums!r}."
            )
    if not chosen:
        raise JaxmemError(
            "argnums= names no argument to differentiate; leave it out for the first."
        )
    return {number % count for number in chosen}


def check_function(fun: Any, name: str) -> None:
    """Raises `JaxmemError` if ``fun`` is not a function of arrays."""
    linen = sys.modules.get("flax.linen")
    unbound = linen is not None and isinstance(fun, linen.Module) and fun.scope is None
    if not callable(fun) or isinstance(fun, type) or unbound:
        kind = fun if isinstance(fun, type) else type(fun)
        got = f"{'class' if fun is kind else 'object'} {kind.__module__}.{kind.__qualname__}"
        raise JaxmemError(
            f"{name} takes a function of arrays; got the {got}. "
            "Pass a function that applies the model, such as the loss: "
            "lambda params, batch: jnp.mean(model.apply(params, batch) ** 2)."
        )
