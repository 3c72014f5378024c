"""Compilations that end when XLA has assigned the buffers: the same answer, whole, and no more."""

import functools
import gc
import gzip
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import jaxmem
from jaxmem.ground.errors import CompileError
from jaxmem.reports import begin
from jaxmem.targets import Job, compilation, workers
from tests.faults import gone

F32 = jnp.float32


def shapes(*sizes, dtype=F32):
    return [jax.ShapeDtypeStruct(size, dtype) for size in sizes]


def layers(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def scanned(w, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])


def convolution(w, x):
    y = jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.sum(
        jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    )


def dropout(w, x, key):
    h = x @ w
    return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0) ** 2)


def branches(w, x):
    return jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: jnp.sin(x) @ w.T, x))


def until(x):
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 100, lambda x: 2 * x + 1, x)


def cross_entropy(w, x, labels):
    scores = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))


def adam(w, state, x):
    update, state = optax.adam(1e-3).update(jax.grad(layers)(w, x), state)
    return optax.apply_updates(w, update), state


MESH = AbstractMesh((8,), ("data",))


def replicas(w, x):
    def local(w, x):
        return jax.lax.psum(layers(w, x), "data")

    return jax.shard_map(local, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())(w, x)


def on_mesh(*sizes, axis="data"):
    sharding = NamedSharding(MESH, P(axis))
    return [jax.ShapeDtypeStruct(size, F32, sharding=sharding) for size in sizes]


def host_state():
    optimizer = jaxmem.offload(optax.adam(1e-3))
    step = jaxmem.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optimizer)
    batch = jax.ShapeDtypeStruct((64, 256), F32)
    return step, (jaxmem.eval_shape(step.init, jnp.ones((256, 256), F32)), batch)


SQUARE = shapes((64, 64), (32, 64))
GRADIENT = functools.partial(jax.grad, allow_int=True)
PROGRAMS = {
    "layers": (GRADIENT(layers), SQUARE),
    "bfloat16": (GRADIENT(layers), shapes((64, 64), (32, 64), dtype=jnp.bfloat16)),
    "half": (GRADIENT(layers), shapes((64, 64), (32, 64), dtype=jnp.float16)),
    "float64": (GRADIENT(layers), shapes((64, 64), (32, 64), dtype=jnp.float64)),
    "odd sizes": (GRADIENT(layers), shapes((37, 37), (5, 37))),
    "value": (layers, SQUARE),
    "scan": (GRADIENT(scanned), shapes((6, 64, 64), (32, 64))),
    "convolution": (GRADIENT(convolution), shapes((3, 3, 4, 8), (2, 16, 16, 4))),
    "dropout": (GRADIENT(dropout), [*SQUARE, jax.eval_shape(lambda: jax.random.key(0))]),
    "cond": (GRADIENT(branches), SQUARE),
    "while": (until, shapes((64,))),
    "labels": (GRADIENT(cross_entropy), [*SQUARE, jax.ShapeDtypeStruct((32,), jnp.int32)]),
    "remat": (GRADIENT(jaxmem.remat(layers, planner="sqrt")), SQUARE),
    "donated": (jax.jit(adam, donate_argnums=(0, 1)), None),
    "linear algebra": (lambda x: jnp.linalg.cholesky(x) @ x, shapes((64, 64))),
    "sort and fft": (lambda x: (jnp.sort(x), jnp.fft.rfft(x)), shapes((64, 64))),
    "several results": (lambda x: {"a": x + 1, "b": (x, x * 2)}, shapes((64, 64))),
    "constant": (lambda x: (jnp.arange(1000.0), x), shapes(())),
    "integers": (lambda x: jnp.bincount(x, length=64), shapes((512,), dtype=jnp.int32)),
    "sharded": (GRADIENT(layers), on_mesh((64, 64), (32, 64))),
    "shard_map": (GRADIENT(replicas), on_mesh((64, 64), axis=None) + on_mesh((32, 64))),
    "state on the host": (None, None),
}


# Every second one by `make test`, the others by `make test-all`.
@pytest.mark.parametrize(
    "name",
    [*[*PROGRAMS][::2], *(pytest.param(one, marks=pytest.mark.slow) for one in [*PROGRAMS][1::2])],
)
def test_the_answer_is_that_of_a_full_compilation(name, monkeypatch, tmp_path):
    paths = iter((tmp_path / "early", tmp_path / "full"))
    monkeypatch.setattr(compilation, "_result_path", lambda *_: next(paths))
    step, args = PROGRAMS[name]
    if name == "state on the host":
        step, args = host_state()
    elif args is None:
        w = SQUARE[0]
        args = [w, jax.eval_shape(optax.adam(1e-3).init, w), SQUARE[1]]
    sharded = "shard" in name
    target = jaxmem.target("h200", count=8) if sharded else "rtx-3090"
    early = jaxmem.memory(step, *args, target=target)
    full = jaxmem.memory(step, *args, target=target, compile="full")
    assert (early.on_device, early.on_host) == (full.on_device, full.on_host)
    assert early.hlo == full.hlo
    assert (early.peak_bytes, early.work, early.moved) == (
        full.peak_bytes,  # for which the totals of XLA's memory analysis are compared to the dump
        full.work,
        full.moved,
    )
    if name == "state on the host":
        assert early.host > 0


def test_other_kinds_of_compilation_are_refused():
    for timeout in (0, -1, "soon", None, float("nan")):
        with pytest.raises(jaxmem.JaxmemError, match="takes timeout=, seconds above 0; got "):
            jaxmem.memory(jnp.sin, jnp.ones(8), target="h100", timeout=timeout)
    with pytest.raises(jaxmem.JaxmemError, match="takes compile='buffers' or 'full'; got 'half'"):
        jaxmem.memory(layers, *SQUARE, target="h200", compile="half")


# ---- the worker, with a compiler that does as it is told

COMPILER = """
import os, signal, subprocess, threading, time

DUMPED = {"hlo": "-program.txt", "buffer-assignment": "-buffers.txt"}

class Executable:
    argument_size_in_bytes = 7
    def get_compiled_memory_stats(self):
        return self

def prepare():
    return "ready"

def start_programs():
    while True:
        subprocess.run(["true"])

def write(path, text, seconds):
    with open(path, "w") as file:
        for part in (text[:3], text[3:]):
            file.write(part)
            file.flush()
            time.sleep(seconds)

def compile(prepared, *, options, order, slowly, then, begun):
    assert prepared == "ready"
    with open(begun, "a") as file:
        file.write(f"{os.getpid()}\\n")
    folder = dict(options)["xla_dump_to"]
    woken = threading.Event()
    signal.signal(signal.SIGCONT, lambda *_: woken.set())
    while then == "in company" and len(open(begun).readlines()) < 2:
        time.sleep(0.01)
    if then == "starts programs":
        for _ in range(4):
            threading.Thread(target=start_programs, daemon=True).start()
    if then == "sleeps":  # what it starts is there before anything is whole
        sleep = subprocess.Popen(["sleep", "60"])
        with open(os.path.join(os.path.dirname(begun), "sleeps"), "a") as file:
            file.write(f"{sleep.pid}\\n")
    for name in order:
        write(f"{folder}/1-{name}.txt", "all of the " + name, slowly)
    if then == "raises":
        raise ValueError("no such flag")
    if then == "dies":
        os.abort()
    if then == "sleeps":
        sleep.wait()
        with open(begun, "a") as file:
            file.write("slept\\n")
    if os.path.exists(begun + "-held"):  # it is stopped before it ends, however slow the machine
        for _ in range(1000):  # the signal may be another thread's, which does not end a wait
            if woken.wait(0.05):
                break
    if then == "writes again":
        time.sleep(0.1)
        os.makedirs(folder, exist_ok=True)
        write(f"{folder}/2-late.txt", "of code", 0)
    return Executable()
"""


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Asks a new worker with that compiler; (reply, what each compilation noted)."""
    path = tmp_path / "family.py"
    path.write_text(COMPILER)
    monkeypatch.setattr(workers.Worker, "idle", [])

    def asked(
        full=False,
        timeout=60.0,
        order=("program", "buffers"),
        slowly=0.0,
        then="ends",
        hold=False,
    ):
        command = workers.Command(path, ())
        held = tmp_path / "begun-held"
        held.touch() if hold else held.unlink(missing_ok=True)
        request = {"order": order, "slowly": slowly, "then": then, "begun": str(tmp_path / "begun")}
        reply = workers.ask(command, request, full, timeout, "a GPU", hold)
        return reply, (tmp_path / "begun").read_text().split()

    yield asked
    while workers.Worker.idle:
        workers.Worker.idle.pop().close()


WHOLE = {"hlo": "all of the program", "buffer-assignment": "all of the buffers"}


def read(reply):
    return {kind: gzip.decompress(text).decode() for kind, text in reply["texts"].items()}


@pytest.mark.parametrize("order", [("program", "buffers"), ("buffers", "program")])
def test_files_are_read_when_they_are_whole(ask, order):
    reply, noted = ask(order=order, slowly=0.2, then="sleeps")
    assert read(reply) == WHOLE
    assert reply["stats"] is None and reply["resident"] > 2**20
    assert len(noted) == 1 and "slept" not in noted  # the code was not waited for


def test_a_full_compilation_waits_for_its_end(ask):
    reply, _ = ask(full=True)
    assert read(reply) == WHOLE and reply["stats"] == {"argument": 7}


def forks(tmp_path):
    """The processes that compiled, or do."""
    return [int(line) for line in (tmp_path / "begun").read_text().split()]


def ends(process):
    """Within some seconds."""
    until = time.monotonic() + 60
    while not gone(process) and time.monotonic() < until:
        time.sleep(0.05)
    return gone(process)


def state(process):
    return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]


def test_a_held_compilation_goes_on_where_it_was(ask, tmp_path):
    reply, _ = ask(then="goes on", hold=True)
    assert read(reply) == WHOLE and reply["stats"] is None and reply["resident"] > 2**20
    (fork,) = forks(tmp_path)
    assert state(fork) == "T"
    reply, _ = ask(then="goes on", full=True)
    assert read(reply) == WHOLE and reply["stats"] == {"argument": 7}
    assert forks(tmp_path) == [fork]
    assert gone(fork)
    ask(then="goes on", full=True)  # nothing is held any more
    assert len(forks(tmp_path)) == 2


def test_what_starts_programs_can_be_held(ask, tmp_path):
    """As XLA starts ptxas: by a fork that shares memory, whose parent cannot stop before it is a
    program of its own. Nor may that be stopped first."""
    for _ in range(10):
        reply, _ = ask(slowly=0.01, then="starts programs", hold=True, timeout=120)
        assert read(reply) == WHOLE
    last = forks(tmp_path)[-1]
    assert state(last) == "T"
    reply, _ = ask(slowly=0.01, then="starts programs", full=True)
    assert read(reply) == WHOLE and reply["stats"] == {"argument": 7} and gone(last)


def test_what_is_held_ends_when_another_comes_or_its_worker_dies(ask, tmp_path):
    ask(then="goes on", hold=True)
    (worker,) = workers.Worker.idle
    ask(then="ends", full=True)
    first, second = forks(tmp_path)
    assert gone(first) and gone(second) and workers.Worker.idle == [worker]
    assert os.listdir(worker.folder) == []
    ask(then="goes on", hold=True)
    paused = forks(tmp_path)[-1]
    worker.process.kill()
    worker.process.wait()
    assert ends(paused)
    folder = worker.folder
    ask()
    assert not os.path.exists(folder)  # with the worker that was dead


def test_what_cannot_begin_leaves_nothing_held(ask, tmp_path):
    """A full disk, say, when the next one comes; then the first is asked for again."""
    ask(then="goes on", hold=True)
    (worker,) = workers.Worker.idle
    os.rename(worker.folder, worker.folder + "-away")
    reply, _ = ask(then="ends")
    assert reply["error"].startswith("FileNotFoundError: ")
    os.rename(worker.folder + "-away", worker.folder)
    assert gone(forks(tmp_path)[0])
    for _ in range(2):
        assert ask(then="goes on", full=True)[0]["stats"] == {"argument": 7}
    assert workers.Worker.idle == [worker]


def test_of_several_workers_the_one_is_asked_that_holds_it(ask, monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "cores", lambda: 2)
    slow = Job(lambda: ask(then="in company", slowly=0.02, hold=True))
    ask(then="in company", slowly=0.01, hold=True)
    slow.result()
    assert len(workers.Worker.idle) == 2
    ask(then="in company", slowly=0.02, full=True)
    ask(then="in company", slowly=0.01, full=True)
    assert len(forks(tmp_path)) == 2


def test_a_job_that_nobody_waits_for_ends(ask, tmp_path):
    job = Job(lambda: ask(then="sleeps", full=True))
    while not (tmp_path / "begun").exists() or not forks(tmp_path):
        time.sleep(0.05)
    job.stop()
    with pytest.raises(CompileError, match="XLA died"):
        job.result()
    assert ends(forks(tmp_path)[0]) and workers.Worker.idle == []


def test_an_interrupt_ends_what_it_waits_for(ask, monkeypatch, tmp_path):
    compiling = begin(jax.jit(jnp.sin), jnp.ones(3), target=jaxmem.target("h200"))
    sleep = lambda *_, **how: ask(then="sleeps", full=True)  # noqa: E731
    monkeypatch.setattr(type(compiling.family), "compile", sleep)
    compiling.start()

    def interrupt():
        while not (tmp_path / "begun").exists() or not forks(tmp_path):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell has it ignored in what it runs in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            compiling.report()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ends(forks(tmp_path)[0]) and compiling.job is None


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """An empty folder for temporary ones."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_worker_that_ends_leaves_no_folder(ask, temporary):
    ask(then="goes on", hold=True)
    (worker,) = workers.Worker.idle
    assert [str(path) for path in temporary.iterdir()] == [worker.folder]
    worker.process.stdin.close()  # as at the end of the idle time: the loop ends
    worker.process.wait()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_a_fork_that_is_woken_to_end_leaves_no_folder(ask, temporary, tmp_path, how):
    ask(then="writes again", hold=True)
    (worker,) = workers.Worker.idle
    if how == "kill":
        worker.process.kill()
    worker.close()
    assert ends(forks(tmp_path)[0])
    assert list(temporary.iterdir()) == []


def test_a_worker_that_cannot_start_leaves_no_folder(ask, temporary, monkeypatch):
    monkeypatch.setattr(sys, "executable", "no such program")
    with pytest.raises(CompileError, match="needs a process of its own and a temporary folder"):
        ask()
    assert list(temporary.iterdir()) == []


def test_what_runs_for_a_compilation_ends_with_it(ask, tmp_path):
    ask(then="sleeps")
    (worker,) = workers.Worker.idle
    of_worker = pathlib.Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children")
    assert of_worker.read_text() == ""
    sleeps = (tmp_path / "sleeps").read_text().split()
    assert all(map(gone, map(int, sleeps)))


@pytest.mark.parametrize("full", [False, True])
def test_errors_and_deaths_are_told_and_the_worker_lives_on(ask, full):
    assert ask(order=(), then="raises", full=full)[0] == {"error": "ValueError: no such flag"}
    (worker,) = workers.Worker.idle
    with pytest.raises(CompileError, match=r"XLA died \(exit code -6\) while compiling for a GPU"):
        ask(order=(), then="dies", full=full)
    assert ask(order=(), full=full)[0]["error"].startswith("OSError: XLA wrote none of the files")
    assert read(ask(full=full)[0]) == WHOLE
    assert workers.Worker.idle == [worker]


def test_a_compilation_that_takes_too_long_is_stopped_with_all_it_started(ask):
    with pytest.raises(CompileError, match="did not finish compiling for a GPU within 0.7 s"):
        ask(order=("program",), then="sleeps", timeout=0.7)
    assert workers.Worker.idle == []


def test_an_idle_worker_is_asked_for_a_minute(ask, monkeypatch):
    ask()
    (first,) = workers.Worker.idle
    ask()
    assert workers.Worker.idle == [first]
    monkeypatch.setattr(first, "since", first.since - 51)
    ask()
    assert first.process.poll() is not None and workers.Worker.idle != [first]


def test_there_is_room_for_what_memory_and_cores_allow(monkeypatch):
    slots = workers._Slots()
    monkeypatch.setattr(workers, "cores", lambda: 3)
    monkeypatch.setattr(workers, "free_memory", lambda: 2.5 * slots.resident)
    with slots.taken():
        assert slots._room()
        with slots.taken():
            assert not slots._room()  # for the memory of a third
        slots.learn(slots.resident * 2)
        monkeypatch.setattr(workers, "free_memory", lambda: 2**40)
        with slots.taken(), slots.taken():
            assert not slots._room()  # for want of a core
    assert slots.running == 0
    assert 0 < workers.free_memory() < 2**50


@pytest.mark.parametrize("on", [True, False])
def test_no_garbage_is_looked_for_while_a_program_is_traced(on):
    """And the collector is as it was afterwards, whatever happened."""
    seen: list[bool] = []

    def loss(w):
        seen.append(gc.isenabled())
        if len(seen) > 1:
            raise ValueError("the user's own")
        return jaxmem.memory(jnp.sin, w, target="h100").device * w.sum()  # one in another

    was = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        jaxmem.plan(loss, *shapes((8,)))
        assert gc.isenabled() == on
        for call in (jaxmem.plan, functools.partial(jaxmem.memory, target="h100")):
            with pytest.raises(ValueError, match="the user's own"):
                call(loss, *shapes((8,)))
            assert gc.isenabled() == on
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == [False] * 3
