"""MaxText's remat policies on slices of TPUs, and what `fit` chooses within their bytes.

    python -m benchmarks.scale.maxtext             # both slices, a quarter of an hour on two cores
    python -m benchmarks.scale.maxtext "v5e, 256"  # these rows; the others stay

A Llama of 8 billion parameters (`examples/llama`) in bfloat16, AdamW in float32, a sequence of
8,192 tokens for each chip, all spread (FSDP), with `jaxmem.ops` in the place of attention and
cross-entropy. The policies are MaxText's (github.com/AI-Hypercomputer/maxtext, `remat_policy` in
its configuration): the names that it keeps of each layer, or lets wait in host memory, in a
`jax.checkpoint` on the layer that a scan goes over; "custom" is one with the layer's input on the
host. The budget of `fit` is what the policy takes, or the chip's memory if that is less; it may use
host memory where the policy does, and takes the step of the least predicted time. FLOPs are those
of matmuls in the optimised HLO beside the same step's without any region.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name as named
from jax.sharding import AbstractMesh

import jaxmem
from benchmarks._models import GIB, example
from benchmarks._record import record_parts

LLAMA = example("llama")
LENGTH = 8192
SLICES = {"v5e, 256": ("v5e", 256), "v6e, 64": ("v6e", 64)}
# MaxText's names of the results of a layer's matmuls.
NAMES = {name: f"{name}_proj" for name in ("query", "key", "value", "out")}
NAMES |= {"gate": "mlpwi_0", "up": "mlpwi_1", "down": "mlpwo"}
ATTENTION = tuple(NAMES[name] for name in ("query", "key", "value"))
MATMULS = tuple(NAMES.values())
# Names that are kept, and names that wait in host memory.
POLICIES: dict[str, tuple] = {
    "full": ((), ()),
    "save_qkv_proj": (ATTENTION, ()),
    "save_dot_except_mlpwi": ((*ATTENTION, "out_proj", "mlpwo"), ()),
    "minimal": (MATMULS, ()),
    "qkv_proj_offloaded": ((), ATTENTION),
    "minimal_offloaded": ((), MATMULS),
    "custom": ((), ("decoder_layer_input",)),
}


@dataclasses.dataclass(frozen=True)
class Named(LLAMA.Llama):
    """The same model with MaxText's names, its layers under a policy; None: without a region."""

    policy: Any = None

    def block(self, x, layer):
        if self.policy is None:
            return self.layer(x, layer)
        return jax.checkpoint(self.layer, policy=self.policy)(x, layer)

    def layer(self, x, layer):
        return super().block(named(x, "decoder_layer_input"), layer)

    def times(self, x, layer, name):
        return named(super().times(x, layer, name), NAMES[name])


def model(policy=None):
    return Named(**dataclasses.asdict(LLAMA.SIZES["8b"]), policy=policy)


def policy_of(saved, offloaded):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


def rows(name: str):
    chip, count = SLICES[name]
    target, mesh = jaxmem.target(chip, count=count), AbstractMesh((count,), ("data",))
    tokens = jax.ShapeDtypeStruct((count, LENGTH), jnp.int32)
    fsdp, adamw = jaxmem.shard(mesh, stage=3), optax.adamw(1e-4)

    def compiled(policy):
        loss = jaxmem.ops.swap(model(policy).loss)
        step = jaxmem.train_step(loss, fsdp.optimizer(adamw), sharding=fsdp)
        return step.memory(step.abstract(model().params()), tokens, target=target)

    plain = compiled(None)
    for policy, (saved, offloaded) in POLICIES.items():
        theirs = compiled(policy_of(saved, offloaded))
        row = {
            "slice": name,
            "policy": policy,
            "its bytes": jaxmem.format_bytes(theirs.device),
            "its host bytes": jaxmem.format_bytes(theirs.host),
            "its FLOPs": f"{theirs.work.flops / plain.work.flops:.3f}x",
        }
        chosen = jaxmem.fit(
            model().loss,
            adamw,
            model().params(),
            tokens,
            target=target,
            mesh=mesh,
            budget=min(theirs.device, target.usable_bytes),
            allow=("operations",),
            keep=() if offloaded else ("placement",),
        ).fitting.chosen
        yield row | {
            "chosen": chosen.name,
            "bytes": f"{chosen.compiled / GIB:.2f} GiB",
            "host bytes": jaxmem.format_bytes(chosen.report.host),
            "FLOPs": f"{chosen.report.work.flops / plain.work.flops:.3f}x",
        }


def main():
    about = __doc__.split("\n\n", 2)[2]
    record_parts("MaxText's policies on TPUs", "slice", list(SLICES), rows, about)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
