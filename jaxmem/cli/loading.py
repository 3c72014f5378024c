"""What ``module:function`` on the command line returns."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from jaxmem.ground.errors import JaxmemError

STEP = "module:function that returns (step, args)"


LOSS = "module:function that returns (loss, args), the first of them differentiated"


FIT = "module:function that returns (loss_fn, optimizer, params, batch), and options if it likes"


STEP_OF_BATCH = "module:function that takes a batch size and returns (step, args)"


def load(name: str, what: str = "step") -> tuple[Callable, tuple]:
    """The step (or the loss) and the arguments that ``module:function`` returns."""
    form = STEP if what == "step" else LOSS
    function = load_function(name, form, (), f"({what}, args)", f"one that makes the {what}")
    return step_of(name, function(), what)


def load_function(name: str, form: str, args: tuple, returns: str, what: str) -> Callable:
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


def step_of(name: str, made: Any, what: str = "step") -> tuple[Callable, tuple]:
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise JaxmemError(
            f"{name} must return ({what}, args): a function and the tuple of its arguments. It "
            f"returned {described(made)}."
        )
    step, args = made
    if not isinstance(args, tuple | list):
        example = "(step, (state, batch))" if what == "step" else "(loss, (params, batch))"
        raise JaxmemError(
            f"{name} must return ({what}, args) with args a tuple, as in {example}; its args are "
            f"{described(args)}."
        )
    return step, tuple(args)


def described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(type(part).__name__ for part in value)})"
    return f"a value of type {type(value).__name__}"
