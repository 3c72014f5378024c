"""On an attached GPU: step time and measured peak of the plans of frontiers.py, images per second.

    python benchmarks/gpu.py                    # all networks; without a GPU it says so and ends
    python benchmarks/gpu.py ResNet50

Value and gradient of the loss on random arguments, planned for the attached GPU; "peak" is the
allocator's less what else was in use, each plan in a process of its own (a peak cannot be reset),
with kernels chosen before. "ms" is the median of ten steps. "predicted" is jaxmem's, and its error
what the measured one is beside it. The last rows are whole training steps of ResNet50 in fp32 at
the largest batch that `jaxmem.max_batch_size` finds, and causal attention of 4 x 4,096 tokens in
bfloat16 (16 heads of 128, 4 of keys): as it is, by `jaxmem.ops` and by cuDNN, whose workspace no
compiled bytes have.
"""

import json
import pathlib
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # for who runs this file
import jaxmem
from benchmarks._gpu import attached, seconds
from benchmarks._record import record_parts
from benchmarks.planner.frontiers import NETWORKS, compiled, example, planned

GIB = 2**30
SHARES = (1.0, 0.6, 0.4, 0.0)
WHOLE = "ResNet50, whole step"
ATTENTION = {"plain": None, "jaxmem.ops": "xla", "cuDNN": "cudnn"}
LARGEST = {"plain": {}, "nn.remat on every block": {"every_block": True}, "dp": {"remat": "dp"}}


def random(tree):
    """Arrays of the shapes, small enough for any network; ints are 0."""

    def make(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return 0.02 * jax.random.normal(jax.random.key(leaf.size), leaf.shape, leaf.dtype)

    return jax.tree.map(make, tree)


def measured(network: str, share: float) -> dict:
    """One plan on this machine's GPU."""
    loss, args = NETWORKS[network]()
    plain = compiled(loss, args, "local")
    budget = 2**50 if share == 1 else max(int(share * plain.device), 1)
    plan, fits = planned(loss, args, budget, "local")
    has_aux = isinstance(jax.eval_shape(loss, *args), tuple)
    step = jax.jit(
        jax.value_and_grad(plan.apply(loss), has_aux=has_aux),
        compiler_options=plan.compiler_options,
    )
    args = random(args)
    run = jaxmem.measure(step, *args)
    return {
        "network": network,
        "plan": f"{share:.0%}" if fits else "floor",
        "compiled": plan.compiled_bytes,
        "peak": (run.peak or 0) - (run.others or 0),
        "predicted": 3 * plan.predicted.seconds + plan.predicted.recompute_seconds,
        "seconds": seconds(lambda: step(*args)),
    }


def largest(name: str) -> dict:
    """A whole training step at its largest batch."""
    import flax.linen as nn
    import optax

    model, levers = example("resnet50"), dict(LARGEST[name])
    block = model.Block
    if levers.pop("every_block", False):
        block = nn.remat(block, static_argnums=(2,))
    net = model.ResNet(block=block)
    step = jaxmem.train_step(model.make_loss(net), optax.sgd(0.1, momentum=0.9), **levers)
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    shapes = jax.eval_shape(lambda x: net.init(jax.random.key(0), x, True), image)

    def make_args(batch):
        images = jax.ShapeDtypeStruct((batch, *image.shape[1:]), jnp.float32)
        state = step.abstract(shapes["params"], model_state=shapes["batch_stats"])
        return state, {"image": images, "label": jax.ShapeDtypeStruct((batch,), jnp.int32)}

    found = jaxmem.max_batch_size(step, make_args, budget="90%", target="local")
    images = random(make_args(found.size)[1])
    variables = random(shapes)
    state = step.init(variables["params"], model_state=variables["batch_stats"])

    def run():
        nonlocal state
        state, metrics = step(state, images)
        return metrics

    taken = seconds(run)
    peak = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]
    return {
        "network": WHOLE,
        "plan": f"{name}, batch {found.size}: {found.size / taken:.0f} images/s",
        "compiled": found.report.device,
        "peak": peak,
        "predicted": None,
        "seconds": taken,
    }


def attention(name: str) -> dict:
    """Value and gradients of one attention, and how far these are from the plain ones."""

    def plain(query, key, value):
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return jnp.sum(mixed.astype(jnp.float32) ** 2)

    implementation = ATTENTION[name]
    fun = jaxmem.ops.swap(plain, implementation=implementation) if implementation else plain
    heads = [jax.ShapeDtypeStruct((4, 4096, count, 128), jnp.bfloat16) for count in (16, 4, 4)]
    args = [50 * one for one in random(heads)]
    step, same = (jax.jit(jax.value_and_grad(one, (0, 1, 2))) for one in (fun, plain))
    run = jaxmem.measure(step, *args)
    taken = seconds(lambda: step(*args))
    pairs = zip(jax.tree.leaves(step(*args)), jax.tree.leaves(same(*args)), strict=True)
    norm = jnp.linalg.norm
    off = max(float(norm((a - b).ravel()) / norm(b.ravel())) for a, b in pairs)
    return {
        "network": "attention",
        "plan": f"{name}, off by {off:.1e}",
        "compiled": jaxmem.memory(step, *args, target="local").device,
        "peak": (run.peak or 0) - (run.others or 0),
        "predicted": None,
        "seconds": taken,
    }


def apart(*words: str) -> dict:
    """The result of this script in a process of its own."""
    command = [sys.executable, str(pathlib.Path(__file__)), "--one", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def row(found: dict) -> dict:
    predicted, taken = found["predicted"], found["seconds"]
    return {
        "network": found["network"],
        "plan": found["plan"],
        "compiled": f"{found['compiled'] / GIB:.3f} GiB",
        "peak": f"{found['peak'] / GIB:.3f} GiB",
        "ms": f"{taken * 1e3:.1f}",
        "predicted": f"{predicted * 1e3:.1f}" if predicted else "",
        "error": f"{taken / predicted - 1:+.0%}" if predicted else "",
    }


def rows_of(network):
    """Each row is measured in a process of its own."""
    if network == WHOLE:
        found = [apart(name) for name in LARGEST]
    elif network == "attention":
        found = [apart(network, name) for name in ATTENTION]
    else:
        found = [apart(network, str(share)) for share in SHARES]
    return [row(one) for one in found]


def note(rows):
    about = __doc__.split("\n\n")[2]
    errors = [abs(float(one["error"].rstrip("%"))) for one in rows if one["error"]]
    if not errors:
        return about
    return (
        f"{about}\n\nMedian error of the predicted times: {statistics.median(errors):.0f} %; "
        "`time_error` of this GPU in jaxmem/targets/cuda/targets.csv is that over 100."
    )


def main():
    if not attached():
        print("No GPU is attached: step times, peaks and images per second were not measured.")
        return
    if sys.argv[1:2] == ["--one"]:
        network, *share = sys.argv[2:]
        if network == "attention":
            found = attention(*share)
        else:
            found = measured(network, float(share[0])) if share else largest(network)
        print(json.dumps(found))
        return
    parts = [*NETWORKS, WHOLE, "attention"]
    record_parts("Plans on an attached GPU", "network", parts, rows_of, note)


if __name__ == "__main__":
    main()
