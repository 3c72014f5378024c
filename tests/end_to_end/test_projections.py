"""What a plan is projected to take is what XLA's program takes, at any depth of regions."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import pytest

import jaxmem

pytestmark = pytest.mark.slow
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
GIB = 2**30


def model_of(example):
    spec = importlib.util.spec_from_file_location(example, EXAMPLES / example / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def abstract(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def resnet():
    module = model_of("resnet50")
    net = module.ResNet()
    loss_fn = module.make_loss(net)
    image = abstract(200, 224, 224, 3)
    variables = jax.eval_shape(lambda x: net.init(jax.random.key(0), x, False), image)
    batch = {"image": image, "label": abstract(200, dtype=jnp.int32)}

    def loss(params, batch_stats, batch):
        value, new, metrics = loss_fn(params, batch, model_state=batch_stats)
        return value, (new, metrics)

    return loss, (variables["params"], variables["batch_stats"], batch)


def unet():
    module = model_of("unet")
    net = module.UNet()
    image = abstract(16, 256, 256, 3)
    params = jax.eval_shape(net.init, jax.random.key(0), image)["params"]
    return module.make_loss(net), (params, {"image": image, "mask": abstract(16, 256, 256)})


@pytest.mark.parametrize(
    ("network", "budget"),
    [(resnet, 5.0), (resnet, 4.0), (unet, 4.0), (unet, 2.4)],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_the_projection_holds(network, budget):
    """XLA runs nested regions one after the other, and looks for the places of the largest values
    in a pooling when it needs them."""
    loss, args = network()
    plan = jaxmem.plan(loss, *args, budget=int(budget * GIB), has_aux=True)
    step = jax.value_and_grad(plan.apply(loss), has_aux=True)
    report = jaxmem.memory(
        step, *args, target="h200", compiler_options=plan.compiler_options, timeline=False
    )
    # Measured: 43 regions in regions of a ResNet50 take 5.2 % less than is projected.
    assert -0.06 < report.device / plan.projected_bytes - 1 < 0.05
    plain = jaxmem.memory(
        jax.value_and_grad(loss, has_aux=True), *args,
        target="h200", compiler_options=plan.compiler_options, timeline=False,
    )  # fmt: skip
    again = report.work.flops - plain.work.flops
    assert again == pytest.approx(plan.predicted.recompute_flops, rel=0.01, abs=1e9)
