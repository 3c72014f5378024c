"""GPUs that are not in the machine: their figures, and XLA's compiler for them."""

import dataclasses
import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import jaxmem
from jaxmem.targets import cache, compilation, known_targets, packages, workers
from jaxmem.targets.cuda import install
from jaxmem.targets.cuda.compiler import compile_module
from tests.faults import BUSY, IDLE, run_compiling, seconds_after

NAMES = [name for name, one in known_targets().items() if one.family == "cuda"]


def step(w, x):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


SHAPES = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(64, 32), (16, 64)]]


@pytest.fixture
def fresh_workers(monkeypatch, tmp_path):
    """Neither a worker nor a result of an earlier compilation is used."""
    count = itertools.count()
    monkeypatch.setattr(compilation, "_result_path", lambda *_: tmp_path / str(next(count)))
    monkeypatch.setattr(workers.Worker, "idle", [])
    yield
    while workers.Worker.idle:
        workers.Worker.idle.pop().close()


def test_a_target_prints_its_name_and_its_bytes():
    ti = jaxmem.target("rtx-2080-ti")
    assert 0 < ti.memory_bytes - ti.usable_bytes < ti.memory_bytes // 10
    sizes = [jaxmem.format_bytes(size) for size in (ti.memory_bytes, ti.usable_bytes)]
    assert str(ti) == "rtx-2080-ti: NVIDIA GeForce RTX 2080 Ti, {} ({} usable)".format(*sizes)
    assert str(jaxmem.target("h100", count=8)).startswith("h100: 8 x NVIDIA H100")


def test_names_may_be_written_as_their_makers_do():
    assert jaxmem.target("H100") == jaxmem.target("h100")
    assert jaxmem.target("RTX-2080-Ti", count=2).count == 2


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.target("h20")
    text = str(caught.value)
    assert text.startswith("There is no target named 'h20'. Did you mean 'h200'? The known ones")
    assert all(name in text for name in NAMES)
    assert "'local' for the attached device" in text
    # Those of several sizes are named by their size.
    with pytest.raises(jaxmem.JaxmemError, match="'A100'. Did you mean 'a100-80gb' or 'a100-40gb'"):
        jaxmem.target("A100")


def test_bad_targets():
    with pytest.raises(jaxmem.JaxmemError, match="asked for with count=0. Pass an int of 1"):
        jaxmem.target("h100", count=0)
    with pytest.raises(jaxmem.JaxmemError, match="target= takes a name .* got 7 of type int"):
        jaxmem.memory(step, *SHAPES, target=7)
    with pytest.raises(
        jaxmem.JaxmemError, match="count=99. takes 1 or more, up to the [0-9]+ device"
    ):
        jaxmem.target("local", count=99)


def test_local_is_the_attached_device():
    report = jaxmem.memory(step, *SHAPES, target="local")
    assert report.target.platform == "cpu"
    assert report.argument == 4 * (64 * 32 + 16 * 64)
    said = (
        "compiled for the CPU: these bytes hold for this CPU alone. An accelerator's compiler fuses"
    )
    assert f"note: {said}" in " ".join(str(report).split())
    with pytest.warns(jaxmem.JaxmemWarning, match=f"No target is named: {said}"):
        assert jaxmem.memory(step, *SHAPES).target == report.target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "v100-16gb"])
def test_every_gpu_compiles(name, dtype):
    """A convolution, a matmul and their gradients."""

    def loss(kernel, w, x):
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jnp.tanh(y.reshape(4, -1) @ w)).astype(jnp.float32)

    shapes = [(3, 3, 8, 16), (8 * 8 * 16, 32), (4, 8, 8, 8)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    report = jaxmem.memory(jax.grad(loss, (0, 1)), *arguments, target=name)
    assert report.argument >= sum(a.size * a.dtype.itemsize for a in arguments)
    assert report.temp > 0
    assert report.work.convolutions == 2


@pytest.mark.slow
def test_several_targets_after_cpu_work_leave_the_process_as_it_was():
    code = """
        import os, jax, jax.numpy as jnp
        os.environ["XLA_FLAGS"] = flags = "--xla_cpu_enable_fast_math=false"
        print(jnp.ones(3).sum())
        import jaxmem
        f = lambda x: jnp.tanh(x @ x).sum()
        x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        bytes = {name: jaxmem.memory(jax.grad(f), x, target=name).device
                 for name in ("rtx-2080-ti", "h200", "rtx-2080-ti")}
        assert len(bytes) == 2 and min(bytes.values()) >= 2 * 128 * 128 * 4
        assert os.environ["XLA_FLAGS"] == flags
        assert jax.default_backend() == "cpu" and set(jax._src.xla_bridge._backends) == {"cpu"}
        print(jnp.ones(4).sum())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("3.0\n4.0\n", 0), done.stderr


@pytest.mark.slow
def test_nothing_is_said_by_jax_where_the_compiler_is_installed():
    """`import jax; jax.devices()`, with no variable that would silence it, prints no warning."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    code = "import jax; print(jax.devices())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert install.find_compiler(13).plugin.exists()
    assert (done.stderr, done.returncode) == ("", 0)
    assert "CpuDevice" in done.stdout


def test_your_own_gpu():
    small = dataclasses.replace(
        jaxmem.target("a100-40gb"), name="slice", description="A100 slice", memory_bytes=2**30
    )
    report = jaxmem.memory(step, *SHAPES, target=small)
    assert report.fits()
    assert not report.fits("1000B")
    assert "50% of 512.00 MiB usable" not in str(report)
    assert "slice: A100 slice, 1.00 GiB (512.00 MiB usable)" in str(report)


def sharded(count):
    mesh = AbstractMesh((count,), ("data",))

    def over(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    return over((512, 256), P("data")), over((64, 512), P())


def test_eight_gpus_report_the_bytes_of_one():
    report = jaxmem.memory(step, *sharded(8), target=jaxmem.target("h200", count=8))
    assert report.argument == 4 * (512 * 256 // 8 + 64 * 512)
    assert "all-reduce" in report.hlo


def test_a_mesh_of_another_size_is_an_error_that_says_the_count():
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.memory(step, *sharded(8), target="h200")
    assert "The step is partitioned over 8 devices, and the target is 1 of h200. Pass target=" in (
        str(caught.value)
    )
    assert "jaxmem.target('h200', count=8)" in str(caught.value)


def test_without_the_compiler_the_error_gives_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path))
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.memory(step, *SHAPES, target="h200")
    text = str(caught.value)
    version = packages.jaxlib_version()
    assert "    python -m jaxmem install-compiler --cuda 13\n" in text
    assert f"python -m pip install --target {tmp_path}/compilers/cuda13-{version}-py" in text
    assert f"jax-cuda13-plugin=={version} 'nvidia-cuda-nvcc>=13,<14'" in text


def test_v100_asks_for_the_compiler_of_cuda_12(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path))
    with pytest.raises(
        jaxmem.JaxmemError, match=r"install-compiler --cuda 12\n[\s\S]*cuda12-plugin"
    ):
        jaxmem.memory(step, *SHAPES, target="v100-16gb")


def test_an_installation_that_fails_says_why_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path))
    monkeypatch.setattr(packages, "jaxlib_version", lambda: "0.0.1")
    monkeypatch.setattr(install, "jaxlib_version", packages.jaxlib_version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(jaxmem.JaxmemError, match=r"pip could not install[\s\S]*plugin==0\.0\.1"):
        jaxmem.install_compiler()
    assert list((tmp_path / "compilers").iterdir()) == []
    with pytest.raises(jaxmem.JaxmemError, match="for CUDA 12 and for CUDA 13, none for 11"):
        jaxmem.install_compiler(11)


@pytest.mark.usefixtures("fresh_workers")
@pytest.mark.parametrize("frames", [0, 40])
def test_an_abort_in_the_compiler_is_an_error_with_its_last_lines(frames, monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys; print('Check failed: false', file=sys.stderr); "
        f"print('frame\\n' * {frames}, end='', file=sys.stderr, flush=True); os.abort()"
    )
    monkeypatch.setattr(workers, "_PROGRAM", worker)
    with pytest.raises(jaxmem.CompileError) as caught:
        jaxmem.memory(step, *SHAPES, target="h200")
    text = str(caught.value)
    assert text.startswith("XLA died (exit code -6) while compiling for h200; this process is unh")
    shown = ["Check failed: false", *["frame"] * min(frames, 12)]
    assert text.endswith("\n".join(["Its last lines:", *shown]))
    assert workers.Worker.idle == []


@pytest.mark.usefixtures("fresh_workers")
def test_a_compilation_that_takes_too_long_is_stopped(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(workers, "_PROGRAM", worker)
    with pytest.raises(
        jaxmem.CompileError, match="within 0.5 s and was stopped. Pass a longer tim"
    ):
        jaxmem.memory(step, *SHAPES, target="h200", timeout=0.5)


@pytest.mark.usefixtures("fresh_workers")
def test_what_xla_refuses_is_an_error_and_the_worker_lives_on():
    with pytest.raises(
        jaxmem.CompileError, match=r"XLA could not compile .* h200:[\s\S]*no_such_f"
    ):
        jaxmem.memory(step, *SHAPES, target="h200", compiler_options={"xla_no_such_flag": 1})
    (worker,) = workers.Worker.idle
    assert jaxmem.memory(step, *SHAPES, target="h200").device > 0
    assert workers.Worker.idle == [worker]


@pytest.mark.usefixtures("fresh_workers")
def test_candidates_compile_side_by_side():
    def compile_width(width):
        x = jax.ShapeDtypeStruct((width, width), jnp.float32)
        return jaxmem.memory(lambda x: x @ x, x, target="h200").argument

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(compile_width, (16, 32, 48, 64))) == [
            4 * width**2 for width in (16, 32, 48, 64)
        ]
    assert 1 <= len(workers.Worker.idle) <= min(os.cpu_count() or 1, 4)


def test_results_are_kept_on_disk(monkeypatch):
    first = jaxmem.memory(step, *SHAPES, target="t4")
    monkeypatch.setattr(workers.Worker, "acquire", None)  # compiling again would fail
    assert jaxmem.memory(step, *SHAPES, target="t4") == first


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("NVIDIA L40", None),
        ("NVIDIA A10", None),
        ("NVIDIA GeForce RTX 2080", None),
    ],
)
@pytest.mark.parametrize("limit", [{"bytes_limit": 1000}, None])
def test_an_attached_gpu_has_the_figures_of_its_own_kind(monkeypatch, kind, name, limit):
    class Device:
        platform, device_kind = "gpu", kind

        def memory_stats(self):
            return limit

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    local = jaxmem.target("local")
    assert (local.known and local.known.name) == name
    otherwise = local.known.usable_bytes if local.known else 0
    assert local.usable_bytes == (1000 if limit else otherwise)


def test_names_of_other_types_are_refused():
    with pytest.raises(jaxmem.JaxmemError, match="no target named"):
        jaxmem.target(["h200"])
    with pytest.raises(jaxmem.JaxmemError, match="target= takes a name"):
        jaxmem.remat_policy(target=["h200"])


RESULT = cache.CachedProgram(
    {"hlo": b"a program", "live-range": b"x" * 9}, {"temp": 1471264, "argument": 7}
)


@pytest.fixture
def kept(tmp_path):
    """A result on disk."""
    path = cache.result_path(tmp_path / "compiled", "0123abcd")
    cache.write(path, RESULT)
    assert cache.read(path) == RESULT and list(path.parent.iterdir()) == [path]
    return path


def damaged(content: bytes):
    """Every byte changed, every shorter file, and files that never were one of ours."""
    for at in range(len(content)):
        yield content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        yield content[:at]
    rest = content.partition(b"\n")[2]
    yield content.replace(b"1471264", b"0176407")
    yield content + b"\n"
    yield rest  # without a checksum
    yield b'{"stats": {"temp": 1}, "parts": [["hlo", 0]]}\n'
    yield b"\0" * len(content)
    yield os.urandom(100)


def test_a_result_that_is_damaged_or_foreign_is_a_miss_and_is_replaced(kept):
    whole = kept.read_bytes()
    for content in damaged(whole):
        kept.write_bytes(content)
        assert cache.read(kept) is None, content
    other = cache.result_path(kept.parent, "another")
    other.write_bytes(whole)  # a whole one, of another program
    assert cache.read(other) is None
    cache.write(kept, RESULT)
    assert cache.read(kept) == RESULT
    other.unlink()
    other.mkdir()
    assert cache.read(other) is None
    cache.write(other, RESULT)
    assert sorted(kept.parent.iterdir()) == [kept, other]


def test_half_written_results_are_removed_and_full_disks_leave_nothing(kept):
    stale, fresh = (kept.parent / f"{name}.part" for name in ("stale", "fresh"))
    for part in (stale, fresh):
        part.write_bytes(b"half")
    os.utime(stale, (0, 0))
    cache.write(kept, RESULT)
    assert sorted(kept.parent.iterdir()) == [kept, fresh]  # a living process may be at it
    fresh.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        cache.write(kept.with_name("new.compiled"), RESULT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(kept.parent.iterdir()) == [kept]
    assert cache.read(kept) == RESULT


def test_the_results_used_last_are_kept_as_far_as_their_bytes_go(monkeypatch, tmp_path):
    paths = [cache.result_path(tmp_path, str(number)) for number in range(5)]
    cache.write(paths[0], RESULT)
    monkeypatch.setattr(cache, "_MOST", 3 * paths[0].stat().st_size)
    for age, path in enumerate(paths):
        cache.write(path, RESULT)
        os.utime(path, (1000 + age, 1000 + age))
    cache.read(paths[2])  # used now
    cache.write(cache.result_path(tmp_path, "last"), RESULT)
    assert {path.stem for path in tmp_path.iterdir()} == {"2", "4", "last"}


def test_a_shared_cache_that_may_only_be_read(monkeypatch, kept):
    def refuse(*_, **__):
        raise PermissionError("read-only")

    for name in ("utime", "replace"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert cache.read(kept) == RESULT
    cache.write(kept, RESULT)
    assert list(kept.parent.iterdir()) == [kept]


def test_a_damaged_result_is_compiled_again(monkeypatch, tmp_path):
    path = tmp_path / "result"
    monkeypatch.setattr(compilation, "_result_path", lambda *_: path)
    first = jaxmem.memory(step, *SHAPES, target="t4")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    assert jaxmem.memory(step, *SHAPES, target="t4") == first
    assert cache.read(path) is not None
    monkeypatch.setattr(workers.Worker, "acquire", None)  # compiling again would fail
    assert jaxmem.memory(step, *SHAPES, target="t4") == first


def test_a_cache_that_cannot_be_read(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path / ("long" * 100)))  # an OSError, to root too
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.memory(step, *SHAPES, target="h200")
    said = str(caught.value)
    assert said.startswith("The folder of jaxmem's compilers cannot be read (")
    assert "). Set JAXMEM_CACHE to one that can be.\nCompiling for a GPU that is not in" in said
    with pytest.raises(jaxmem.JaxmemError, match="Set JAXMEM_CACHE to a folder that can be writ"):
        jaxmem.install_compiler()
    monkeypatch.delenv("JAXMEM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as of a user without a home
    with pytest.raises(jaxmem.JaxmemError, match="There is no home folder .* Set JAXMEM_CACHE to"):
        jaxmem.memory(step, *SHAPES, target="h200")


def test_a_disk_that_is_full_while_installing_is_said_without_pips_traceback(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path))
    stale = tmp_path / "compilers" / "cuda13-0-py311x.part"
    stale.mkdir(parents=True)
    os.utime(stale, (0, 0))
    code = "import os; os.write(2, b'pip at work\\n'); raise OSError(28, os.strerror(28))"
    monkeypatch.setattr(packages.Packages, "pip", lambda *_: ["-c", code])
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.install_compiler()
    said = str(caught.value)
    assert "the compiler:\nNo space left on the disk: it takes about 700 MB in " in said
    assert "Free some, or set JAXMEM_CACHE and TMPDIR to folders that have it.\n(the " in said
    assert "Traceback" not in said and "File" not in said
    assert list((tmp_path / "compilers").iterdir()) == []


def test_without_a_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(compilation, "_result_path", lambda *_: tmp_path / "result")
    workers.close_idle()  # a worker has its folder for as long as it lives
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(jaxmem.CompileError, match="a temporary folder, and could not have them: "):
        jaxmem.memory(step, *SHAPES, target="h200")


# ---- processes that die, and forks


@pytest.mark.parametrize(
    ("how", "code", "wait"),
    [(signal.SIGKILL, BUSY, 4), (signal.SIGTERM, IDLE, 0)],
    ids=["compiling", "idle"],
)
def test_workers_end_with_their_parent_however_it_dies(how, code, wait):
    assert seconds_after(how, code, wait) < 60  # else they do not end by themselves


@pytest.mark.slow
def test_a_fork_compiles_while_its_parent_does():
    """In the fork nobody would give back the slots and the lock that its parent's threads hold."""
    done = run_compiling("""
        import os, sys, threading, time
        workers.cores = lambda: 1
        thread = threading.Thread(target=compile_short, daemon=True)
        modules, compile_module = [], compiler.compile_module
        request = workers.Worker.request
        def request_slowly(self, *args):
            locked.set()
            time.sleep(5)
            return request(self, *args)
        locked = threading.Event()
        from jaxmem import memory
        package = sys.modules["jaxmem.targets.cuda.family"]
        package.compile_module = lambda *args, **options: modules.append((args, options)) or (
            compile_module(*args, **options))
        compile_short()
        workers.Worker.request = request_slowly
        thread.start()
        locked.wait()
        workers.Worker.lock.acquire()
        child = os.fork()
        if not child:
            args, options = modules[0]
            workers.Worker.request = request
            os._exit(0 if compile_module(*args, **options).texts else 1)
        workers.Worker.lock.release()
        deadline = time.monotonic() + 60
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.05)
        print("child", ended[1] if ended[0] else os.kill(child, 9), flush=True)
        os._exit(0)
    """)
    assert done.communicate(timeout=120)[0].splitlines()[-1] == "child 0"


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path / "file"))
    with pytest.raises(jaxmem.JaxmemError, match="Set JAXMEM_CACHE to a folder that can be writ"):
        jaxmem.install_compiler()
    nowhere = tmp_path / "file" / "compiled" / "result"
    cache.write(nowhere, cache.CachedProgram({"hlo": b""}))  # costs the result, nothing else
    assert cache.read(nowhere) is None


@pytest.mark.usefixtures("fresh_workers")
def test_an_idle_worker_that_died_is_replaced():
    first = jaxmem.memory(step, *SHAPES, target="h200")
    (worker,) = workers.Worker.idle
    worker.process.kill()
    worker.process.wait()
    assert jaxmem.memory(step, *SHAPES, target="h200") == first
    assert len(workers.Worker.idle) == 1
    assert workers.Worker.idle != [worker]


REFUSED = (
    "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %{name} = bf16[{shape}]{{1,0}} "
    "{name}(%bitcast.53, %parameter_1.4), lhs_contracting_dims={{1}}"
)
OFF = ("xla_gpu_enable_triton_gemm", False)


@pytest.mark.parametrize(
    ("errors", "last"),
    [
        ([REFUSED.format(name="dot", shape="8188,256")], ((8188, 256),)),
        (
            [REFUSED.format(name="dot", shape=shape) for shape in ("7,5", "2,3,1")],
            ((7, 5), (2, 3, 1)),
        ),
        ([REFUSED.format(name="dot", shape="7,5")] * 2, OFF),  # barriers were of no use
        ([REFUSED.format(name="dot", shape="7,5"), "INTERNAL: something else"], OFF),
        ([REFUSED.format(name="fusion", shape="7,5")], OFF),  # no matmul is named
        ([REFUSED.format(name="dot", shape=f"7,{n}") for n in range(7)], OFF),
    ],
)
def test_what_own_kernels_refuse_is_compiled_apart_or_without_them(monkeypatch, errors, last):
    replies, asked = [*({"error": one} for one in errors), {"texts": {}, "stats": {}}], []

    def ask(command, request, *_):
        asked.append(request)
        return replies[len(asked) - 1]

    monkeypatch.setattr(compilation, "ask", ask)
    monkeypatch.setattr(compilation, "read", lambda path: None)
    monkeypatch.setattr(compilation, "write", lambda *_: None)
    compile_module(b"module", jaxmem.target("h100"))
    assert len(asked) == len(replies)
    if last is OFF:
        assert OFF in asked[-1]["flags"] and "apart" not in asked[-1]
    else:
        assert asked[-1]["apart"] == last and OFF not in asked[-1]["flags"]


def test_other_errors_are_raised_at_once(monkeypatch):
    monkeypatch.setattr(compilation, "read", lambda path: None)
    refusals = iter([{"error": "INTERNAL: something else"}])
    monkeypatch.setattr(compilation, "ask", lambda *_: next(refusals))
    with pytest.raises(jaxmem.CompileError, match="something else"):
        compile_module(b"module", jaxmem.target("h100"))
    refusals = iter([{"error": REFUSED.format(name="dot", shape="7,5")}])
    options = dict([OFF])
    with pytest.raises(jaxmem.CompileError, match="find output tile sizes"):
        compile_module(b"module", jaxmem.target("h100"), options=options)
