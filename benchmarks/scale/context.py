"""Long sequences over several devices: projected bytes beside what compiles.

A decoder of eight layers on eight H100, two sequences of 65,536 tokens, each cut over four devices,
in programs of the user's own collectives: ring attention (Liu et al. 2023: keys and values go
around by `ppermute` in a scan, a block of scores at a time), and all-to-all (Jacobs et al. 2023,
Ulysses: each device has the whole sequence of some heads, `jaxmem.ops.attention`). Of each the
gradient as it is, a plan within 80 % of its bytes, and the one of the fewest.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import jaxmem
from benchmarks._record import record

LAYERS, WIDTH, HEADS, CONTEXT = 8, 2048, 16, 4
MESH = AbstractMesh((2, CONTEXT), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
PLACE = P("data", "context")
TARGET = jaxmem.target("h100", count=8)


def ring(query, key, value):
    """Attention of a device's queries to all keys, which go around; inside `jax.shard_map`."""
    permutation = [(one, (one + 1) % CONTEXT) for one in range(CONTEXT)]
    wide = query.astype(jnp.float32) * query.shape[-1] ** -0.5

    @jax.checkpoint  # scores are made again, as ring attention has it
    def turn(found, key, value):
        top, total, mixed = found
        scores = jnp.einsum("bqhd,bkhd->bhqk", wide.astype(key.dtype), key).astype(jnp.float32)
        higher = jnp.maximum(top, scores.max(-1))
        shares, old = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        mixed = mixed * old[..., None] + jnp.einsum(
            "bhqk,bkhd->bhqd", shares.astype(value.dtype), value
        )
        return higher, total * old + shares.sum(-1), mixed

    def step(carry, _):
        found, key, value = carry
        found = turn(found, key, value)
        key, value = (jax.lax.ppermute(one, "context", permutation) for one in (key, value))
        return (found, key, value), None

    batch, length, heads, width = query.shape
    first = jnp.full((batch, heads, length), -1e30), jnp.zeros((batch, heads, length))
    first = (*first, jnp.zeros((batch, heads, length, width)))
    first = jax.tree.map(lambda one: jax.lax.pcast(one, ("data", "context"), to="varying"), first)
    (found, _, _), _ = jax.lax.scan(step, (first, key, value), length=CONTEXT)
    _, total, mixed = found
    return jnp.swapaxes(mixed / total[..., None], 1, 2).astype(query.dtype)


def all_to_all(query, key, value):
    """The same with heads in the place of the sequence; inside `jax.shard_map`."""
    swap = functools.partial(jax.lax.all_to_all, axis_name="context", tiled=True)
    query, key, value = (swap(one, split_axis=2, concat_axis=1) for one in (query, key, value))
    return swap(jaxmem.ops.attention(query, key, value), split_axis=1, concat_axis=2)


def program(attention, form: str, length: int = 65536, layers: int = LAYERS):
    """The loss of a decoder and its arguments."""

    def array(shape, *axes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*axes)))

    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    mixed = jax.shard_map(
        attention, mesh=MESH, in_specs=(PLACE,) * 3, out_specs=PLACE, check_vma=False
    )

    def block(x, w):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(MESH, PLACE))
        y = (normalized(x) @ w["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
        query, key, value = (y[:, :, at] for at in range(3))
        x = x + mixed(query, key, value).reshape(x.shape) @ w["out"]
        return x + jax.nn.silu(normalized(x) @ w["up"]) @ w["down"]

    def loss(params, x):
        if form == "scan":
            x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params)
        else:
            x = functools.reduce(block, params, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    x = array((2, length, WIDTH), "data", "context")
    if form == "scan":
        return loss, ({name: array((layers, *shape)) for name, shape in shapes.items()}, x)
    return loss, ([{name: array(shape) for name, shape in shapes.items()}] * layers, x)


def normalized(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def compared(loss, args, share: float | None = None) -> dict:
    """First projection and compiled bytes of the gradient of a loss, or of a plan within a share
    of its bytes."""
    planned, options = loss, None
    plain = plan_for_budget(loss, args)
    projected = plain.plain_bytes
    if share is not None:
        plan = plan_for_budget(loss, args, int(share * projected))
        planned, projected, options = plan.apply(loss), plan.projected_bytes, plan.compiler_options
    report = jaxmem.memory(
        jax.value_and_grad(planned),
        *args,
        target=TARGET,
        compiler_options=options,
        timeline=False,
    )
    return {
        "projected": jaxmem.format_bytes(projected),
        "compiled": jaxmem.format_bytes(report.device),
        "off": f"{report.device / projected - 1:+.1%}",
    }


def plan_for_budget(loss, args, budget: int | None = None) -> jaxmem.Plan:
    """The first plan within a budget, or the one of the fewest bytes."""
    planned = functools.partial(jaxmem.plan, loss, *args, target=TARGET, compilations=0)
    try:
        return planned(budget=budget)
    except jaxmem.BudgetError:
        return planned()


def main():
    rows = []
    for attention in (ring, all_to_all):
        for form in ("scan", "unrolled"):
            loss, args = program(attention, form)
            for name, share in {"any": None, "80%": 0.8, "fewest": 0.01}.items():
                rows.append(
                    {
                        "attention": attention.__name__.replace("_", "-"),
                        "layers": form,
                        "within": name,
                    }
                    | compared(loss, args, share)
                )
                print(rows[-1], flush=True)
    record("Sequences over several devices", rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
