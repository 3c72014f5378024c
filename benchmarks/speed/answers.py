"""What answers take beside one plain compilation of the same program.

Each call runs in a process of its own with an empty cache, and so does the plain compilation:
`jit(...).trace().lower()` and then the same compiler without jaxmem's options for dumps, to the
end. Clock and CPU seconds (workers and what they start among them) begin when all is imported and
end when the answer is printed; a worker's start is in them. Ratios need a quiet machine.

    python -m benchmarks.speed.answers               # all
    python -m benchmarks.speed.answers plan fit      # some kinds
"""

import json
import os
import pathlib
import pickle
import resource
import subprocess
import sys
import tempfile
import time

import jax
import optax

import jaxmem
from benchmarks._models import example, resnet50
from benchmarks._record import record_parts
from benchmarks.planner.planner_gpt import workload as gpt2_medium
from jaxmem import jaxprs
from jaxmem.targets import workers
from jaxmem.targets.cache import cache_folder
from jaxmem.targets.cuda.compiler import worker_command
from jaxmem.targets.cuda.install import find_compiler

KINDS = ["memory", "plan", "fit"]
RESNET, GPT, SCAN = "ResNet50, batch 100", "GPT-2 medium, unrolled", "GPT-2 medium, scan"
CASES = [
    *[("memory", RESNET), ("memory", GPT), ("memory", SCAN)],
    *[("plan", RESNET), ("plan", GPT), ("plan", SCAN)],
    *[("fit", RESNET), ("fit", GPT), ("fit", SCAN)],
]
TARGET = "h200"
COMPILE = """
import pickle, runpy, sys
functions = runpy.run_path(sys.argv[1])
compiler = functions["prepare"](*sys.argv[3:])
functions["compile"](compiler, **pickle.load(open(sys.argv[2], "rb")), options=[])
"""


def workload(name):
    """A loss without and with metrics, and (params, batch, model state)."""
    if name == RESNET:
        model = example("resnet50")
        _, (params, state, batch) = resnet50(100)
        return model.make_loss(model.ResNet()), (params, batch, state), optax.sgd(0.1, momentum=0.9)
    loss, (params, batch) = gpt2_medium("scan" if name == SCAN else "unrolled")
    return loss, (params, batch, None), optax.adamw(1e-3)


def program(kind, name):
    """The jitted program that is to be compiled, and its arguments."""
    loss, (params, batch, state), optimizer = workload(name)
    if kind == "plan":
        chosen = loss_of(name)
        arguments = (params, batch) if state is None else (params, batch, state)
        return jax.jit(jax.value_and_grad(chosen)), arguments
    step = jaxmem.train_step(loss, optimizer)
    made = step.abstract(params) if state is None else step.abstract(params, model_state=state)
    return step, (made, batch)


def loss_of(name):
    """The loss alone, as a function of (params, batch, ...)."""
    loss = workload(name)[0]
    if name == RESNET:
        return lambda params, batch, state: loss(params, batch, model_state=state)[0]
    return loss


def plain(kind, name):
    """One compilation without jaxmem."""
    step, args = program(kind, name)
    lowered = step.trace(*args).lower(lowering_platforms=("cuda",))
    module, _ = jaxprs.to_bytecode(lowered, locations=True)
    compiler = find_compiler(13)
    command = worker_command(compiler)
    flags = [("xla_gpu_autotune_level", "0"), ("xla_gpu_cuda_data_dir", str(compiler.toolkit))]
    request = {
        "module": module,
        "config": jaxmem.target(TARGET).config(),
        "count": 1,
        "flags": flags,
    }
    path = os.pathsep.join([*command.path, os.environ["PATH"]])
    with tempfile.NamedTemporaryFile() as file:
        pickle.dump(request, file)
        file.flush()
        arguments = [str(command.family), file.name, *command.arguments]
        start = [sys.executable, "-W", "ignore", "-c", COMPILE, *arguments]
        subprocess.run(start, check=True, env=os.environ | {"PATH": path}, capture_output=True)
    return ""


def answer(kind, name, plain_bytes):
    """jaxmem's answer, and a word about it."""
    if kind == "memory":
        step, args = program(kind, name)
        report = jaxmem.memory(step, *args, target=TARGET)
        str(report)
        return str(report.device)
    loss, (params, batch, state), optimizer = workload(name)
    options = {"budget": plain_bytes // 2, "target": TARGET}
    if kind == "plan":
        arguments = (params, batch) if state is None else (params, batch, state)
        plan = jaxmem.plan(loss_of(name), *arguments, compilations=5, **options)
        return f"{plan.compiled_bytes / plain_bytes:.1%} of the bytes"
    step = jaxmem.fit(loss, optimizer, params, batch, model_state=state, compilations=6, **options)
    return f"{step.fitting.chosen.compiled / plain_bytes:.1%} of the bytes"


def in_this_process(kind, name, plain_bytes):
    began, cpu = time.monotonic(), time.process_time()
    said = answer(kind, name, int(plain_bytes)) if int(plain_bytes) else plain(kind, name)
    clock = time.monotonic() - began
    workers.close_idle()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = time.process_time() - cpu + children.ru_utime + children.ru_stime
    print(json.dumps({"clock": clock, "cpu": cpu, "said": said}))


def measured(kind, name, plain_bytes=0):
    """What a process with an empty cache measures."""
    with tempfile.TemporaryDirectory() as cache:
        (pathlib.Path(cache) / "compilers").symlink_to(cache_folder() / "compilers")
        environment = os.environ | {"JAXMEM_CACHE": cache, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "benchmarks.speed.answers", "--one", kind, name]
        done = subprocess.run(
            [*command, str(plain_bytes)], check=True, env=environment, stdout=subprocess.PIPE
        )
    return json.loads(done.stdout.splitlines()[-1])


def rows(kind):
    for name in [name for chosen, name in CASES if chosen == kind]:
        before = measured(kind, name)
        step, args = program(kind, name)
        whole = jaxmem.memory(step, *args, target=TARGET, timeline=False).device
        after = measured(kind, name, whole)
        row = {
            "call": kind,
            "program": name,
            "plain compilation, s": round(before["clock"], 1),
            "answer, s": round(after["clock"], 1),
            "ratio": round(after["clock"] / before["clock"], 2),
            "plain, CPU s": round(before["cpu"], 1),
            "answer, CPU s": round(after["cpu"], 1),
            "ratio of CPU": round(after["cpu"] / before["cpu"], 2),
            "answer": "" if kind == "memory" else after["said"],
        }
        print(row, flush=True)
        yield row


def main():
    if sys.argv[1:2] == ["--one"]:
        in_this_process(*sys.argv[2:])
        return
    note = (
        f"{__doc__.split(chr(10) * 2)[1]}\n\nFor an H200, on {workers.cores()} cores; `plan` and "
        "`fit` within half of the plain bytes, with five and six compilations allowed."
    )
    record_parts("Answers beside a compilation", "call", KINDS, rows, note)


if __name__ == "__main__":
    main()
