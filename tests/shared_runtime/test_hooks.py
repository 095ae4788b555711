"""Hooks: loaded by dotted path, with an error that says what was expected and what was found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shared_runtime.hooks import (
    DATA_SOURCE,
    DYNAMIC_FILTER,
    ClassSpec,
    HookError,
    HookSpec,
    load_class,
    load_function,
    load_hooks,
    takes_keyword,
)

MODULE = """
import functools

def good(args, samples): return "good"
def with_keywords(args, samples, **kwargs): return "kw"
def with_default(args, samples, evaluation=False): return "default"
def short(args): ...
def long(args, samples, more): ...
def keyword_only(args, samples, *, needed): ...
async def coroutine(args, samples): ...
def any_number(*args): ...
partial = functools.partial(long, more=1)
number = 3

class Callable:
    async def __call__(self, args, samples): ...
instance = Callable()

class Source:
    def __init__(self, args): ...
    def get_samples(self, n): ...
    def add_samples(self, groups): ...
    def save(self, directory): ...
    def load(self, directory): ...

class Half:
    def __init__(self): ...
    def get_samples(self, n): ...
    save = None
"""
FLAG = "--dynamic-sampling-filter-path"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package in the working directory, which is not on sys.path."""
    name = f"hooks_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "mine.py").write_text(MODULE)
    (tmp_path / name / "broken.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / name / "raising.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    return name


@pytest.mark.parametrize("name", ["good", "with_keywords", "with_default", "any_number", "partial"])
def test_what_fits_is_loaded(package: str, name: str) -> None:
    function = load_function(f"{package}.mine.{name}", FLAG, DYNAMIC_FILTER)
    assert function is getattr(sys.modules[f"{package}.mine"], name)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("short", "def short(args)"),
        ("long", "def long(args, samples, more)"),
        ("keyword_only", "def keyword_only(args, samples, *, needed)"),
        ("coroutine", "async def coroutine(args, samples)"),
        ("instance", "async def instance(args, samples)"),
        ("number", "int 3"),
        ("Source", "the class Source"),
    ],
)
def test_what_does_not_fit_says_both_shapes(package: str, name: str, found: str) -> None:
    path = f"{package}.mine.{name}"
    with pytest.raises(HookError) as caught:
        load_function(path, FLAG, DYNAMIC_FILTER)
    message = str(caught.value)
    assert message.startswith(f"{FLAG} {path}: expected `def {name}(args, samples)`, found ")
    assert found in message


def test_async_where_it_matters(package: str) -> None:
    needs_async = HookSpec(("args", "samples"), is_async=True)
    either = HookSpec(("args", "samples"), is_async=None)
    load_function(f"{package}.mine.coroutine", "--f", needs_async)
    load_function(f"{package}.mine.instance", "--f", needs_async)
    with pytest.raises(HookError, match="it must be async"):
        load_function(f"{package}.mine.good", "--f", needs_async)
    for name in ("good", "coroutine"):
        load_function(f"{package}.mine.{name}", "--f", either)


def test_optional_parameters(package: str) -> None:
    spec = HookSpec(("args", "samples", "more"), optional=2)
    for name in ("short", "good", "long"):
        load_function(f"{package}.mine.{name}", "--f", spec)
    with pytest.raises(HookError, match="3 or 2 positional"):
        load_function(f"{package}.mine.short", "--f", HookSpec(("a", "b", "c"), optional=1))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("{p}.mine.goood", r"mine.py\) has no 'goood'; did you mean .*mine\.good\?"),
        ("{p}.nothing.f", "no module named '.*nothing'"),
        ("no_such_package_here.f", "no module named 'no_such_package_here' .looked in "),
        ("{p}.broken.f", "importing .*broken failed: No module named 'a_package_that_is_not_there'"),
        ("{p}.raising.f", "importing .*raising failed: ZeroDivisionError"),
        ("f", "is not a dotted path"),
        ("my file.py:f", "is not a dotted path"),
    ],
)
def test_paths_that_do_not_load(package: str, path: str, expected: str) -> None:
    with pytest.raises(HookError, match=expected) as caught:
        load_function(path.format(p=package), FLAG, DYNAMIC_FILTER)
    assert str(caught.value).startswith(FLAG)


def test_classes(package: str) -> None:
    assert load_class(f"{package}.mine.Source", "--data-source-path", DATA_SOURCE).__name__ == "Source"
    with pytest.raises(HookError, match="lacks add_samples, save, load; it needs get_samples"):
        load_class(f"{package}.mine.Half", "--data-source-path", DATA_SOURCE)
    with pytest.raises(HookError, match=r"expected `Half\(args\)`, found `Half\(\)`"):
        load_class(f"{package}.mine.Half", "--data-source-path", ClassSpec(("get_samples",)))
    with pytest.raises(HookError, match="expected a class"):
        load_class(f"{package}.mine.good", "--data-source-path", DATA_SOURCE)


def test_all_hooks_at_once_with_all_their_problems(package: str) -> None:
    specs = {"--a": DYNAMIC_FILTER, "--b": DYNAMIC_FILTER, "--c": DATA_SOURCE, "--d": DYNAMIC_FILTER}
    loaded = load_hooks({"--a": f"{package}.mine.good", "--c": f"{package}.mine.Source", "--d": None}, specs)
    assert loaded["--d"] is None
    assert loaded["--a"] is sys.modules[f"{package}.mine"].good
    with pytest.raises(HookError) as caught:
        load_hooks({"--a": f"{package}.mine.short", "--b": f"{package}.mine.good", "--c": "x.y"}, specs)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["--a", "--c"]


def test_keywords_are_passed_only_where_taken(package: str) -> None:
    mine = package + ".mine."
    takes = {
        name: takes_keyword(load_function(mine + name, FLAG, DYNAMIC_FILTER), "evaluation")
        for name in ("good", "with_keywords", "with_default", "any_number")
    }
    assert takes == {"good": False, "with_keywords": True, "with_default": True, "any_number": False}


def test_alternative_shapes(package: str) -> None:
    spec = HookSpec(("args", "samples", "more"), alternative=HookSpec(("input",)))
    for name in ("short", "long"):
        load_function(f"{package}.mine.{name}", "--f", spec)
    with pytest.raises(HookError, match=r"expected `def good\(args, samples, more\)` or `def good\(input\)`, found"):
        load_function(f"{package}.mine.good", "--f", spec)
