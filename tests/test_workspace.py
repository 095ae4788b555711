"""What holds for every package: what it imports, what it ships, how it is documented."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ci_select import normalised, requirements

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rewards", "shared_runtime", "llm_rl", "diffusion_rl")
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / "packages" / name / "src").rglob("*.py"))
HEAVY = ("torch", "transformers", "diffusers", "sglang", "megatron", "ray", "wandb", "matplotlib")
MAX_LINES = 500


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "module",
    ["rewards", "shared_runtime", "shared_runtime.config", "shared_runtime.tracking", "llm_rl", "llm_rl.config",
     "llm_rl.cli", "diffusion_rl"],
)  # fmt: skip
def test_import_is_light(module):
    """Help and validation answer at once, and a package can be used without what it doesn't need."""
    script = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


@pytest.mark.parametrize("name", PACKAGES)
def test_package_is_complete(name):
    folder = ROOT / "packages" / name
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == f"tandem-{name.replace('_', '-')}"
    assert project["license"] == "Apache-2.0"
    assert (folder / "src" / name / "py.typed").exists()
    assert (folder / "README.md").read_text().startswith("# tandem-")
    missing = [
        relative(path)
        for path in (folder / "src" / name).rglob("*")
        if path.is_dir() and any(path.glob("*.py")) and not (path / "__init__.py").exists()
    ]
    assert missing == []


def test_everything_public_is_documented():
    undocumented = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        if tree.body and not ast.get_docstring(tree):
            undocumented.append(f"{relative(path)}: the module")
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                undocumented.append(f"{relative(path)}:{node.lineno}: {node.name}")
    assert undocumented == []


def test_files_have_one_subject():
    tests = (ROOT / "tests").rglob("*.py")
    scripts = (ROOT / "scripts").rglob("*.py")
    lengths = {relative(path): len(path.read_text().splitlines()) for path in [*SOURCES, *tests, *scripts]}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_package_with_code_has_tests(package):
    sources = [path for path in SOURCES if path.is_relative_to(ROOT / "packages" / package)]
    has_code = any(isinstance(node, ast.FunctionDef) for path in sources for node in ast.parse(path.read_text()).body)
    assert not has_code or list((ROOT / "tests" / package).rglob("test_*.py"))


def test_lock_knows_one_index_without_credentials():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    registries = {package["source"]["registry"] for package in lock["package"] if "registry" in package["source"]}
    assert len(registries) == 1
    assert "@" not in registries.pop()


@pytest.mark.parametrize(
    ("importer", "imported", "kept"),
    [
        ("llm_rl", "shared_runtime", True),
        ("diffusion_rl", "rewards", True),
        ("llm_rl", "diffusion_rl", False),
        ("diffusion_rl", "llm_rl", False),
        ("shared_runtime", "rewards", False),
        ("rewards", "shared_runtime", False),
        ("shared_runtime", "llm_rl", False),
        ("rewards", "diffusion_rl", False),
    ],
)
def test_import_contract_forbids_what_the_design_forbids(tmp_path, importer, imported, kept):
    """The contract of our pyproject, on four empty packages of the same names of which one imports another."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    lines = ["[importlinter]", "root_packages =", *(f"    {name}" for name in contract["root_packages"])]
    for number, section in enumerate(contract["contracts"]):
        lines += [f"[importlinter:contract:{number}]", f"name = {section['name']}", f"type = {section['type']}"]
        lines += ["layers =", *(f"    {layer}" for layer in section["layers"])]
    (tmp_path / ".importlinter").write_text("\n".join(lines) + "\n")
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"import {imported}\n" if name == importer else "")
    script = (
        "import sys; sys.path.insert(0, '.')\n"
        "from importlinter.cli import lint_imports; sys.exit(lint_imports('.importlinter', no_cache=True))"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode == 0) is kept, result.stdout + result.stderr
    assert ("BROKEN" in result.stdout) is not kept


def test_every_dependency_is_explained():
    """docs/dependencies.md has a line for each direct dependency of each package and of development."""
    text = (ROOT / "docs" / "dependencies.md").read_text()
    names = {"uv", "hatchling"}
    for path in [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]:
        names |= {normalised(requirement) for requirement in requirements(tomllib.loads(path.read_text()))}
    unexplained = {name for name in names if f"`{name}`" not in text and not name.startswith("tandem-")}
    assert unexplained == set()
