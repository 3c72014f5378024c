"""The command line: ``jaxmem`` and ``python -m jaxmem``.

A step is named ``module:function``: a function without arguments, in a module that Python finds
from the working directory, that returns ``(step, args)``: a function or jitted function, and the
tuple of its arguments, real or `jax.ShapeDtypeStruct`. For ``max-batch`` it takes the batch size;
for ``plan`` it returns ``(loss, args)``, and for ``fit`` what `jaxmem.fit` takes, ``(loss_fn,
optimizer, params, batch)`` and perhaps a dict of its options, over which the command line wins.

Exit codes: 0; 1: an error, which is printed; 2: wrong usage; 3: the step does not fit the budget.
"""

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import json
import os
import pathlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxmem.fitting.largest import max_batch_size
from jaxmem.fitting.search import ALLOWED, KEPT, Search, fit
from jaxmem.ground.bytes import device_budget, format_bytes
from jaxmem.ground.errors import BudgetError, JaxmemError, JaxmemWarning
from jaxmem.levers.host.offloading import eval_shape
from jaxmem.rematerialization.plans import pareto, plan
from jaxmem.reports import Diff, MemoryReport, check_plot, diff, measure, memory, read_report
from jaxmem.targets import LocalDevice, Target, install_compiler, known_targets, target

_MISSED = 3
_STEP = "module:function that returns (step, args)"
_LOSS = "module:function that returns (loss, args), the first of them differentiated"
_FIT = "module:function that returns (loss_fn, optimizer, params, batch), and options if it likes"
_STEP_OF_BATCH = "module:function that takes a batch size and returns (step, args)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="jaxmem", description="Memory tools for JAX and Flax.")
    commands = parser.add_subparsers(metavar="command", required=True)
    for add in (
        *(_add_estimate, _add_profile, _add_plan, _add_fit, _add_max_batch, _add_diff),
        *(_add_targets, _add_install),
    ):
        add(commands)
    options = parser.parse_args(arguments)
    try:
        with _plain_warnings():
            return options.run(options)
    except JaxmemError as error:
        print(f"jaxmem: {error}", file=sys.stderr)
        return _MISSED if isinstance(error, BudgetError) and error.lowest else 1


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as a sentence, without the line of jaxmem's source that they come from."""
    usual = warnings.formatwarning

    def plain(message, category, *rest, **more):
        if issubclass(category, JaxmemWarning):
            return f"jaxmem: warning: {message}\n"
        return usual(message, category, *rest, **more)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _add_command(commands, name: str, run: Callable[[Any], int], about: str):
    parser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    return parser


# ---- estimate


def _add_estimate(commands) -> None:
    about = "compile a step for a GPU, which need not be there, and say where its memory goes"
    parser = _add_command(commands, "estimate", _estimate, about)
    parser.add_argument("step", help=_STEP)
    _add_target(parser)
    _add_files(parser)
    parser.add_argument("--budget", help="bytes, '11GiB' or '80%%'; exit code 3 if it is missed")


def _add_target(parser) -> None:
    parser.add_argument("--target", default="local", help="a GPU's name (default: local)")
    parser.add_argument("--count", type=int, default=1, help="GPUs of a sharded step (default: 1)")


def _add_files(parser) -> None:
    parser.add_argument("--html", metavar="FILE", help="write it as a page to open in a browser")
    parser.add_argument("--plot", metavar="FILE", help="draw the timeline as .png, .svg or .pdf")


def _estimate(options) -> int:
    _check_files(options)
    chosen = target(options.target, count=options.count)
    budget = _budget(options, chosen.usable_bytes, chosen.name)
    report = _compile(options.step, *_load(options.step), chosen)
    if options.json:
        about = json.loads(report.to_json())
        if budget:
            about |= {"budget": budget, "fits": report.device <= budget}
        print(json.dumps(about, indent=1))
    else:
        print(report)
    _write_files(report, options)
    return _compared("the step", report.device, budget)


def _budget(options, usable: int, name: str) -> int | None:
    """Bytes of the budget that was given, if one was, on that device."""
    return None if options.budget is None else device_budget(options.budget, usable, name)


def _check_files(options) -> None:
    """That what was asked for can be written, as far as names and folders tell."""
    if options.plot:
        check_plot(options.plot)
    for path in filter(None, (options.html, options.plot)):
        folder = pathlib.Path(path).resolve().parent
        if not folder.is_dir():
            raise JaxmemError(
                f"The report cannot be written to {path}: there is no folder {folder}."
            )


def _compared(what: str, device: int, budget: int | None) -> int:
    """The exit code of what takes so many bytes; says so if that is over the budget."""
    if budget is None or device <= budget:
        return 0
    print(
        f"jaxmem: {what} takes {format_bytes(device)}, {format_bytes(device - budget)} more than "
        f"the budget of {format_bytes(budget)}.",
        file=sys.stderr,
    )
    return _MISSED


def _compile(name: str, step: Callable, args: tuple, chosen: Target | LocalDevice) -> MemoryReport:
    with _progress(f"compiling {name} for {chosen.name}"):
        return memory(step, *args, target=chosen)


def _write_files(report: MemoryReport | Diff, options) -> None:
    for path, write in ((options.html, report.to_html), (options.plot, report.plot)):
        if path:
            _write(path, write)


def _write(path: str, write: Callable[[str], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise JaxmemError(f"The report cannot be written: {error}.") from error
    print(f"wrote {path}", file=sys.stderr)


def _load(name: str, what: str = "step") -> tuple[Callable, tuple]:
    """The step (or the loss) and the arguments that ``module:function`` returns."""
    form = _STEP if what == "step" else _LOSS
    function = _function(name, form, (), f"({what}, args)", f"one that makes the {what}")
    return _step_of(name, function(), what)


def _function(name: str, form: str, args: tuple, returns: str, what: str) -> Callable:
    """The function that ``module:function`` names, if it takes these arguments."""
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise JaxmemError(f"A step is given as {form}, such as train:make; got {name!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise JaxmemError(
            f"The module {module_name!r} of {name!r} cannot be imported from {os.getcwd()}: "
            f"{error}."
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    function = getattr(module, function_name, None)
    if not callable(function):
        raise JaxmemError(f"The module {module_name!r} has no function {function_name!r}.")
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError) as error:
        how = "with the batch size" if args else "without arguments"
        raise JaxmemError(
            f"{name} is called {how} and must return {returns}: {error}. Name {what} and its "
            "arguments."
        ) from error
    return function


def _step_of(name: str, made: Any, what: str = "step") -> tuple[Callable, tuple]:
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise JaxmemError(
            f"{name} must return ({what}, args): a function and the tuple of its arguments. It "
            f"returned {_described(made)}."
        )
    step, args = made
    if not isinstance(args, tuple | list):
        example = "(step, (state, batch))" if what == "step" else "(loss, (params, batch))"
        raise JaxmemError(
            f"{name} must return ({what}, args) with args a tuple, as in {example}; its args are "
            f"{_described(args)}."
        )
    return step, tuple(args)


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(type(part).__name__ for part in value)})"
    return f"a value of type {type(value).__name__}"


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """Seconds on stderr while something takes long; on a terminal in one line."""
    began, done = time.monotonic(), threading.Event()
    live = sys.stderr.isatty()

    def tell():
        print(f"{what} ...", file=sys.stderr, end="" if live else "\n", flush=True)
        while live and not done.wait(1):
            seconds = time.monotonic() - began
            print(f"\r{what} ... {seconds:.0f} s", file=sys.stderr, end="", flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
        print(f"{chr(13) if live else ''}{what}: {time.monotonic() - began:.1f} s", file=sys.stderr)


# ---- profile


def _add_profile(commands) -> None:
    about = "run a step once on the attached device: the allocator's peak beside the compiled bytes"
    parser = _add_command(commands, "profile", _profile, about)
    parser.add_argument("step", help=_STEP)
    about = "exit code 3 if the measured peak (on a CPU: the compiled bytes) is over it"
    parser.add_argument("--budget", help=about)
    _add_files(parser)


def _profile(options) -> int:
    _check_files(options)
    budget = _budget(options, target("local").usable_bytes, "the attached device")
    step, args = _load(options.step)
    with _progress(f"running {options.step}"):
        measured = measure(step, *args)
    if options.json:
        fields = ("arguments", "before", "after", "earlier_peak", "peak", "phases", "unexplained")
        about = {name: getattr(measured, name) for name in fields}
        print(json.dumps({**about, "compiled": json.loads(measured.compiled.to_json())}, indent=1))
    else:
        print(measured)
    _write_files(measured.compiled, options)
    return _compared("the step", measured.peak or measured.compiled.device, budget)


# ---- plan and fit


def _add_plan(commands) -> None:
    about = "plan what a loss saves and recomputes within a budget; exit code 3 if none fits"
    parser = _add_command(commands, "plan", _plan, about)
    parser.add_argument("loss", help=_LOSS)
    parser.add_argument("--target", help="a GPU's name: compile the plan for it, and correct it")
    parser.add_argument("--budget", help="bytes, '11GiB' or '80%%' (default: the least memory)")
    parser.add_argument("--reserved", default="0", help="of it, for the optimizer's state, say")
    parser.add_argument("--planner", default="dp", help="dp, dots or sqrt (default: dp)")
    about = "let residuals of scans wait in host memory"
    parser.add_argument("--offload", action="store_true", help=about)
    parser.add_argument("--plot", metavar="FILE", help="draw the frontier as .png, .svg or .pdf")
    about = "write the compiled timeline of value and gradient under the plan as a page (--target)"
    parser.add_argument("--html", metavar="FILE", help=about)


def _plan(options) -> int:
    _check_files(options)
    if options.html and not options.target:
        raise JaxmemError("--html shows what was compiled: name a GPU to compile for (--target).")
    loss, args = _load(options.loss, "loss")
    reserved = 0 if options.reserved == "0" else options.reserved
    common: dict[str, Any] = {"planner": options.planner, "target": options.target}
    with _progress(f"planning {options.loss}"):
        has_aux = isinstance(eval_shape(loss, *args), tuple)
        found = plan(
            loss,
            *args,
            budget=options.budget,
            reserved=reserved,
            has_aux=has_aux,
            offload=options.offload,
            **common,
        )
    print(found.to_json() if options.json else found)
    if options.html:
        step = jax.jit(
            jax.value_and_grad(found.apply(loss), has_aux=has_aux),
            compiler_options=found.compiler_options,
        )
        _write(options.html, _compile(options.loss, step, args, target(options.target)).to_html)
    if options.plot:
        with _progress("planning the frontier"):
            frontier = pareto(loss, *args, reserved=reserved, **common)
        _write(options.plot, frontier.plot)
    return 0


def _add_fit(commands) -> None:
    about = "choose the levers that make a step fit; exit code 3 if nothing does"
    parser = _add_command(commands, "fit", _fit, about)
    parser.add_argument("problem", help=f"{_FIT}; options given here win")
    parser.add_argument("--target", help="a GPU's name (default: local)")
    parser.add_argument("--budget", help="bytes, '11GiB' or '80%%' (default: the target's)")
    for name, about, known in (
        ("allow", "what may be done although it changes the numerics", ALLOWED),
        ("keep", "what may NOT be done although it changes no numerics", KEPT),
    ):
        what = "; ".join(f"'{word}', {text}" for word, text in known.items())
        about = f"{about}, by name (may be repeated): {what}"
        parser.add_argument(f"--{name}", action="append", default=[], metavar="NAME", help=about)
    parser.add_argument("--compilations", type=int, help="at most (default: 6)")
    _add_files(parser)


def _fit(options) -> int:
    _check_files(options)
    returns = "(loss_fn, optimizer, params, batch)"
    made = _function(options.problem, _FIT, (), returns, "one that makes the loss, the optimizer")()
    parts = made if isinstance(made, tuple) else ()
    extra = parts[4] if len(parts) == 5 else {}
    if len(parts) not in (4, 5) or not callable(parts[0]) or not isinstance(extra, dict):
        raise JaxmemError(
            f"{options.problem} must return {returns}, with a dict of "
            f"jaxmem.fit's options after it if it likes. It returned {_described(made)}."
        )
    unknown = sorted(map(str, extra.keys() - inspect.signature(fit).parameters))
    if unknown:
        raise JaxmemError(f"{options.problem} returns options that jaxmem.fit has not: {unknown}.")
    names = ("budget", "target", "allow", "keep", "compilations")
    given = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in given.items() if value not in (None, [])}
    chosen = {"compilations": 6, **extra, **given}
    compilations = chosen.pop("compilations")
    fitting = Search(*parts[:4], **chosen).run(compilations).fitting
    print(json.dumps(fitting.to_dict(), indent=1) if options.json else fitting)
    _write_files(fitting.report, options)
    return 0


# ---- max-batch


def _add_max_batch(commands) -> None:
    about = "find the largest batch that fits, by compiling a few; exit code 3 if none does"
    parser = _add_command(commands, "max-batch", _max_batch, about)
    parser.add_argument("step", help=_STEP_OF_BATCH)
    _add_target(parser)
    _add_files(parser)
    parser.add_argument("--budget", help="bytes, '11GiB' or '80%%' (default: the target's)")
    parser.add_argument("--multiple", type=int, help="of which the batch is one (default: 8)")


def _max_batch(options) -> int:
    _check_files(options)
    chosen = target(options.target, count=options.count)
    what = "a function of the batch size that makes the step"
    function = _function(options.step, _STEP_OF_BATCH, (8,), "(step, args)", what)
    found = max_batch_size(
        _step_of(options.step, function(options.multiple or 8))[0],
        lambda batch: _step_of(options.step, function(batch))[1],
        budget=options.budget,
        target=chosen,
        multiple=options.multiple,
    )
    if options.json:
        fields = ("size", "too_large", "multiple", "budget", "compiled", "exact", "reason")
        about = {name: getattr(found, name) for name in fields}
        print(json.dumps(about | {"report": json.loads(found.report.to_json())}, indent=1))
    else:
        print(found)
    _write_files(found.report, options)
    return 0 if found.size else _MISSED


# ---- diff


def _add_diff(commands) -> None:
    about = "compare two steps: what grew, what shrank, and a verdict"
    parser = _add_command(commands, "diff", _diff, about)
    of = f"a file that estimate --json wrote, or {_STEP}"
    parser.add_argument("before", help=of)
    parser.add_argument("after", help=of)
    _add_target(parser)
    _add_files(parser)
    parser.add_argument("--budget", help="exit code 3 if the second one does not fit it")


def _diff(options) -> int:
    _check_files(options)
    chosen = target(options.target, count=options.count)
    names = (options.before, options.after)
    given = [_read_or_load(name) for name in names]
    of = given[1] if isinstance(given[1], dict) else None
    usable, name = (of["usable"], of["target"]) if of else (chosen.usable_bytes, chosen.name)
    budget = _budget(options, usable, name)
    both = [
        one if isinstance(one, dict) else _compile(name, *one, chosen)
        for name, one in zip(names, given, strict=True)
    ]
    found = diff(*both)
    print(found.to_json() if options.json else found)
    _write_files(found, options)
    return _compared(options.after, found.after["device"], budget)


def _read_or_load(name: str) -> dict[str, Any] | tuple[Callable, tuple]:
    """A report that a file holds, or a step and its arguments."""
    path = pathlib.Path(name)
    if path.is_file():
        try:
            return read_report(path.read_text())
        except (JaxmemError, ValueError) as error:
            raise JaxmemError(f"{name}: {error}") from error
    if ":" not in name:
        raise JaxmemError(f"There is no file {name!r}; a step is given as {_STEP}.")
    return _load(name)


# ---- targets and their compilers


def _add_targets(commands) -> None:
    _add_command(commands, "targets", _targets, "list the GPUs that can be compiled for")


def _targets(options) -> int:
    known = known_targets()
    if options.json:
        print(json.dumps([dataclasses.asdict(one) for one in known.values()], indent=1))
        return 0
    print(f"{'name':14}{'usable':>11}{'GB/s':>7}{'fp32':>7}{'half':>6} TFLOP/s  description")
    for one in known.values():
        print(
            f"{one.name:14}{format_bytes(one.usable_bytes):>11}"
            f"{one.memory_bandwidth / 1e9:>7.0f}{one.fp32_flops / 1e12:>7.1f}"
            f"{one.half_flops / 1e12:>6.0f}          {one.description}"
        )
    return 0


def _add_install(commands) -> None:
    about = "install XLA's compiler for GPUs that are not in the machine"
    parser = commands.add_parser("install-compiler", help=about, description=about)
    parser.set_defaults(run=_install)
    parser.add_argument("--cuda", type=int, default=13, help="13, or 12 for V100 (default: 13)")


def _install(options) -> int:
    print("XLA's GPU compiler: installing once for this version of jaxlib", flush=True)
    print(f"XLA's GPU compiler is in {install_compiler(options.cuda)}")
    return 0
