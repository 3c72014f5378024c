"""One layer of a stack: what it computes, and back through it, in microbatches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.host.stacks import fetch_layer
from jaxmem.levers.host.trees import inexact_leaves, with_inexact
from jaxmem.levers.mixed_precision.policy import Precision


@dataclasses.dataclass(frozen=True)
class Layer:
    """``block(params, x, *extras) -> x`` on the parameters of one layer, on the device;
    ``layers`` names the stack in messages."""

    block: Callable
    precision: Precision | None
    microbatches: int
    layers: str

    def fetch(self, stack: Any, index: Any) -> Any:
        """A layer's parameters on the device in the dtype that it computes in."""
        params = fetch_layer(stack, index)
        return params if self.precision is None else self.precision.cast_to_compute(params)

    def __call__(self, params: Any, x: Any, extras: tuple) -> Any:
        if self.microbatches == 1:
            return self.block(params, x, *extras)
        parts = self._split(x)
        return _join(jax.lax.map(lambda part: self.block(params, part, *extras), parts))

    def pull_back(
        self, params: Any, x: Any, extras: tuple, dy: list[Any], gradients: list[jax.Array]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Cotangents of one layer's parameters, input and extras, as lists of inexact leaves.

        Over microbatches those of the parameters are summed in the dtypes of ``gradients``, the
        stacks that they go to.
        """

        def pull(x, dy):
            def run(dparams, dx, dextras):
                y = self.block(
                    with_inexact(params, dparams),
                    with_inexact(x, dx),
                    *with_inexact(extras, dextras),
                )
                return inexact_leaves(y)

            return jax.vjp(run, *map(inexact_leaves, (params, x, extras)))[1](dy)

        if self.microbatches == 1:
            return pull(x, dy)

        def body(sums, part):
            dparams, dx, dextras = pull(*part)
            return jax.tree.map(lambda s, d: s + d.astype(s.dtype), sums, (dparams, dextras)), dx

        sums = [jnp.zeros(stack.shape[1:], stack.dtype) for stack in gradients]
        zero = [jnp.zeros_like(leaf) for leaf in inexact_leaves(extras)]
        (dparams, dextras), dx = jax.lax.scan(body, (sums, zero), (self._split(x), self._split(dy)))
        return dparams, _join(dx), dextras

    def check_chains(self, params: Any, x: Any, extras: tuple) -> None:
        """Raises `JaxmemError` where a layer cannot take what the one before it returns."""
        given, made = (
            jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)
            for tree in (x, jax.eval_shape(self, params, x, extras))
        )
        if given != made:
            raise JaxmemError(
                f"Each layer takes what the one before it returns, and a layer of {self.layers} "
                f"takes {given} and returns {made}. Cast or reshape outside, or put that layer "
                "into a stack of one."
            )

    def _split(self, batch: Any) -> Any:
        """The batch as microbatches; each takes every so many rows, so that what is sharded
        along the batch stays where it is."""
        count = self.microbatches

        def split(leaf):
            if leaf.ndim == 0 or leaf.shape[0] % count:
                raise JaxmemError(
                    f"{self.layers} split their batch into {count} microbatches, along the first "
                    f"axis of every array that goes through them; one has shape "
                    f"{list(leaf.shape)}. Take a number that divides the batch, and leave the "
                    "loss outside of the layers."
                )
            return jnp.swapaxes(leaf.reshape(-1, count, *leaf.shape[1:]), 0, 1)

        return jax.tree.map(split, batch)


def _join(parts: Any) -> Any:
    """Microbatches as one batch."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[2:]), parts)
