"""One call that makes a step fit."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxmem import jaxprs
from jaxmem.fitting.meshes import Split
from jaxmem.fitting.search import LeverSearch
from jaxmem.fitting.workload import Workload
from jaxmem.ground.progress import show
from jaxmem.ground.warn import warn
from jaxmem.levers.mixed_precision.loss_scale import LossScale
from jaxmem.levers.mixed_precision.policy import Precision
from jaxmem.targets import LocalDevice, Target, resolve
from jaxmem.training import TrainStep


def fit(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
    *,
    budget: int | str | None = None,
    target: str | Target | LocalDevice | None = None,
    model_state: Any = None,
    key: jax.Array | None = None,
    precision: str | Precision | None = None,
    loss_scale: LossScale | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    devices: int | Sequence[jax.Device] | None = None,
    split: Split | None = None,
    allow: str | Collection[str] = (),
    keep: str | Collection[str] = (),
    compilations: int = 6,  # chosen: it bounds the time; most searches end sooner
) -> TrainStep:
    """The training step of the least predicted time whose compiled bytes fit a budget.

    Searches rematerialization plans (with residuals of a scan in host memory, where that takes less
    time), microbatches and the optimizer's state in host memory together, on a mesh ZeRO's stages,
    and what ``allow`` names besides. A candidate's time is predicted: its kernels by their
    arithmetic and memory traffic one after the other, the update and the sums of gradients by the
    bytes they move, transfers to the host and between devices by the links, with nothing overlapped
    but those of residuals. Candidates are compiled for the target in the order of their times; what
    the compiler says of one corrects the projected bytes of the next. So the first that fits is the
    one, unless a nearer plan takes less recomputation.

    Everything that was considered is printed, with bytes, time and the reason for each refusal, and
    stays in ``step.fitting``. ``logging.getLogger("jaxmem").setLevel("WARNING")`` silences that.

    Args:
        loss_fn, optimizer: as for `jaxmem.train_step`; the optimizer not offloaded yet, if its
            place is to be searched.
        params, batch, model_state, key: what the step takes, real or abstract
            (`jax.ShapeDtypeStruct`): nothing is allocated. ``params`` may be a Flax nnx module.
        budget: device bytes for the whole step, an int or text; None: what is usable on the target,
            which counts too where the budget is more (`JaxmemWarning`).
        target: the accelerator, present or not; None: the attached one.
        precision, loss_scale: as for `jaxmem.train_step`; not changed.
        mesh: of devices of the target, real or abstract: ZeRO's stages 1 to 3 along its last axis
            (`jaxmem.shard`) are searched too, and the budget is each device's.
        devices: how many there are, in the place of a mesh (or they themselves, as a list): its
            shape is searched too. Along axis "data" parameters are spread, along "replica" they are
            copied: between nodes, and within them where nothing else divides the step. Others are
            those of ``split``. The mesh is ``step.sharding.mesh``.
        split: axes that the model names, as for `jaxmem.shard`; with ``devices`` their sizes are
            searched, within a node where parameters are cut along them.
        allow: what may be done although it changes the mathematics: ``"precision"`` (bfloat16
            compute by `jaxmem.autocast`), ``"moments"`` (`jaxmem.optim.small_moments`),
            ``"operations"`` (`jaxmem.ops.swap`: attention and cross-entropy of 64 MiB or more
            without their scores and logits; the table says what they hold), ``"kernels"``
            (attention in 16 bits by the target's own kernel, as cuDNN has one: such a step runs
            nowhere else), ``"statistics"`` (microbatches where a slice's loss is not
            proved to be its share of the whole one: under batch norm each slice is normalised by
            its own statistics; a mean over what a mask leaves becomes a mean of means). That a loss
            is a mean, or a sum, over examples is proved from its program, for every size of slice
            that is searched; the table names the operation that stands in the way. From ``key``
            each slice draws other random numbers (dropout masks) than the whole batch would.
        keep: what may not be done although it does not: ``"batch"`` (no microbatches),
            ``"placement"`` (no transfers to host memory), ``"residuals"`` (no recomputation),
            ``"regions"`` (the loss's own regions, `jax.checkpoint` or ``nn.remat``, stay; else they
            are opened, and the budget decides what is recomputed).
        compilations: how many at most. Where they end before the search does, the table says so;
            the only one goes to a plan with room for what projections miss. Before a budget is
            refused that the step may meet as it is, that one is compiled besides.

    Returns:
        A `TrainStep` whose ``fitting`` is the table, and which is compiled with XLA's own
        rematerialization pass off, as it was here. It was compiled in full once; the other
        candidates until their buffers were assigned.

    Raises:
        BudgetError: nothing that was compiled fits: names the lowest bytes met, what holds them,
            and what else could be allowed; or the budget does not parse.
        CompileError: XLA generates no code for any step that was found to fit.
        JaxmemError: an unknown name in ``allow`` or ``keep``, a target that is not known, or
            what `jaxmem.train_step` raises.

    Warns:
        JaxmemWarning: parameters have shardings of their own on a mesh, and no ``split`` says what
            they are for: `fit` lays them out by itself.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> def loss_fn(params, batch):
    ...     return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)
    >>> params = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
    >>> batch = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    >>> step = jaxmem.fit(
    ...     loss_fn, optax.adam(1e-3), params, batch, budget="2GiB", target="h200"
    ... )  # doctest: +ELLIPSIS
    jaxmem.fit: fits: 3... MiB of 2.00 GiB, the step as it is
    ...
    >>> print(step.fitting.chosen.levers)
    precision as it is
    """
    spread = mesh is not None or devices is not None
    if spread and split is None:
        _tell_of_shardings(params)
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(jaxprs.in_place_of_attached(resolve(target)))
        if spread:  # steps are traced on meshes of their own
            contexts.enter_context(jaxprs.mesh_in_force(None))
        workload = Workload(
            loss_fn,
            optimizer,
            params,
            batch,
            budget=budget,
            target=target,
            model_state=model_state,
            key=key,
            precision=precision,
            loss_scale=loss_scale,
            mesh=mesh,
            devices=devices,
            split=split,
            allow=allow,
            keep=keep,
        )
        step = LeverSearch(workload).run(compilations)
    show(step.fitting)
    return step


def _tell_of_shardings(params: Any) -> None:
    """Warns of parameters that are cut on a mesh of several axes. (On one of a single axis they are
    spread as by ZeRO's third stage.)"""
    cut = [
        f"params{jax.tree_util.keystr(path)} by {sharding.spec}"
        for path, leaf in jax.tree.leaves_with_path(params)
        if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding)
        and not sharding.is_fully_replicated
        and sum(size > 1 for size in sharding.mesh.shape.values()) > 1
    ]
    if cut:
        more = f" and {len(cut) - 1} more" if cut[1:] else ""
        warn(
            "jaxmem.fit lays parameters out by itself, by ZeRO's stages, and not as they are "
            f"given: {cut[0]}{more}. For axes of the model's own, such as tensor parallelism, pass "
            "split=.",
        )
