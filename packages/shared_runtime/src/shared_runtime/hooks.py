"""User functions and classes by dotted path, checked against the signature they must have before anything starts."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class HookError(ValueError):
    """A hook path that can't be loaded or has the wrong shape. The message names the flag, the path and both shapes."""


@dataclass(frozen=True)
class HookSpec:
    """The shape a hook function must have.

    Attributes:
        parameters: Names of the positional arguments it is called with, for messages.
        is_async: `True`: it must be `async def`. `False`: it must not. `None`: either.
        optional: How many of the last `parameters` it may leave out.
        alternative: Another shape that will do as well.
    """

    parameters: tuple[str, ...]
    is_async: bool | None = False
    optional: int = 0
    alternative: HookSpec | None = None

    def describe(self, name: str) -> str:
        """The signature as a user would write it."""
        prefix = {True: "async def", False: "def", None: "[async] def"}[self.is_async]
        required = len(self.parameters) - self.optional
        shown = [p if i < required else f"{p} (optional)" for i, p in enumerate(self.parameters)]
        text = f"{prefix} {name}({', '.join(shown)})"
        return text if self.alternative is None else f"{text}` or `{self.alternative.describe(name)}"

    def problem(self, function: Callable[..., Any]) -> str | None:
        """Why a function has another shape, or `None` if it fits."""
        counts = range(len(self.parameters), len(self.parameters) - self.optional - 1, -1)
        if not any(accepts(function, count) for count in counts):
            found = f"it can't be called with {' or '.join(map(str, counts))} positional arguments"
        elif self.is_async is not None and is_async(function) != self.is_async:
            found = f"it must {'' if self.is_async else 'not '}be async"
        else:
            return None
        return found if self.alternative is None or self.alternative.problem(function) else None


@dataclass(frozen=True)
class ClassSpec:
    """The shape a hook class must have.

    Attributes:
        methods: Methods it must have.
        parameters: Names of the positional arguments its constructor is called with.
    """

    methods: tuple[str, ...]
    parameters: tuple[str, ...] = ("args",)


def load_function(path: str, flag: str, spec: HookSpec) -> Callable[..., Any]:
    """Load the function at `package.module.function`.

    The working directory is importable, as for a script that lies in it.

    Args:
        path: The dotted path.
        flag: The flag that gave it, for messages.
        spec: What the function must accept.

    Raises:
        HookError: If it doesn't import, is not there, is not callable or has another signature.
    """
    function = load_object(path, flag)
    name = path.rpartition(".")[2]
    if not callable(function) or inspect.isclass(function):
        raise HookError(f"{flag} {path}: expected `{spec.describe(name)}`, found {_kind(function)}")
    problem = spec.problem(function)
    if problem is not None:
        found = _describe(function, name)
        raise HookError(f"{flag} {path}: expected `{spec.describe(name)}`, found `{found}`: {problem}")
    return function


def load_class(path: str, flag: str, spec: ClassSpec) -> type:
    """Load the class at `package.module.Class` and check its constructor and methods.

    Raises:
        HookError: If it doesn't import, is no class, or lacks a method.
    """
    cls = load_object(path, flag)
    if not inspect.isclass(cls):
        raise HookError(f"{flag} {path}: expected a class, found {_kind(cls)}")
    missing = [name for name in spec.methods if not callable(getattr(cls, name, None))]
    if missing:
        raise HookError(f"{flag} {path}: the class lacks {', '.join(missing)}; it needs {', '.join(spec.methods)}")
    if not accepts(cls, len(spec.parameters)):
        found = _describe(cls, cls.__name__).removeprefix("def ")
        raise HookError(f"{flag} {path}: expected `{cls.__name__}({', '.join(spec.parameters)})`, found `{found}`")
    return cls


def load_hooks(
    paths: Mapping[str, str | None], specs: Mapping[str, HookSpec | ClassSpec]
) -> dict[str, Callable[..., Any] | None]:
    """Load every hook that is set, and report all that fail at once.

    Args:
        paths: Dotted path by flag (`--custom-rm-path`); `None` where a flag is unset.
        specs: What each of these flags expects.

    Returns:
        The function or class by flag, `None` where the flag is unset.

    Raises:
        HookError: With one line for each hook that can't be used.
    """
    loaded: dict[str, Callable[..., Any] | None] = {}
    problems: list[str] = []
    for flag, path in paths.items():
        loaded[flag] = None
        if path is None:
            continue
        spec = specs[flag]
        try:
            loaded[flag] = (
                load_class(path, flag, spec) if isinstance(spec, ClassSpec) else load_function(path, flag, spec)
            )
        except HookError as error:
            problems.append(str(error))
    if problems:
        raise HookError("\n".join(problems))
    return loaded


def load_object(path: str, flag: str) -> Any:
    """The object at a dotted path.

    Raises:
        HookError: If it doesn't import or is not there.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise HookError(f"{flag} {path!r}: is not a dotted path; write package.module.function")
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            where = f"looked in {directory} and on sys.path"
            raise HookError(f"{flag} {path}: no module named {error.name!r} ({where})") from error
        raise HookError(f"{flag} {path}: importing {module_name} failed: {error}") from error
    except Exception as error:
        raise HookError(f"{flag} {path}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {module_name}.{near[0]}?" if near else ""
        raise HookError(f"{flag} {path}: {module_name} ({_file(module)}) has no {name!r}{hint}") from None


def accepts(function: Callable[..., Any], count: int) -> bool:
    """Whether a call with `count` positional arguments and no keywords would bind; unknown signatures count as yes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Whether a call may pass `name=`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        p.kind is p.VAR_KEYWORD or (p.name == name and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
        for p in parameters
    )


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an `async def`, or an object with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _describe(function: Callable[..., Any], name: str) -> str:
    try:
        signature = str(inspect.signature(function))
    except (TypeError, ValueError):
        signature = "(…)"
    return f"{'async ' if is_async(function) else ''}def {name}{signature}"


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if inspect.isclass(value) else f"{type(value).__name__} {value!r}"[:80]


def _file(module: Any) -> str:
    return getattr(module, "__file__", None) or "built in"


DATA_SOURCE = ClassSpec(methods=("get_samples", "add_samples", "save", "load"))
BUFFER_FILTER = HookSpec(("args", "rollout_id", "buffer", "num_samples"))
DYNAMIC_FILTER = HookSpec(("args", "samples"))
SAMPLE_FILTER = HookSpec(("args", "data"))
ALL_SAMPLES = HookSpec(("args", "all_samples", "data_source"))
ROLLOUT_FUNCTION = HookSpec(("args", "rollout_id", "data_source", "evaluation"), is_async=None)
ROLLOUT_LOG = HookSpec(("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"))
EVAL_LOG = HookSpec(("rollout_id", "args", "data", "extra_metrics"))

# The hooks that both domains have, by flag. A domain adds its own.
SHARED_HOOKS: dict[str, HookSpec | ClassSpec] = {
    "--data-source-path": DATA_SOURCE,
    "--buffer-filter-path": BUFFER_FILTER,
    "--dynamic-sampling-filter-path": DYNAMIC_FILTER,
    "--rollout-sample-filter-path": SAMPLE_FILTER,
    "--rollout-all-samples-process-path": ALL_SAMPLES,
    "--rollout-function-path": ROLLOUT_FUNCTION,
    "--eval-function-path": ROLLOUT_FUNCTION,
    "--custom-rollout-log-function-path": ROLLOUT_LOG,
    "--custom-eval-rollout-log-function-path": EVAL_LOG,
}
