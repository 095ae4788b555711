"""Print the test folders that a change touches, dependants included, one a line.

    python scripts/ci_select.py --base origin/main
    folders=$(python scripts/ci_select.py --base origin/main) && [ -z "$folders" ] || uv run pytest $folders

A change of a package selects its tests, the tests of every package that depends on it, and `tests/e2e`, where scripts
and notebooks run. What the whole repository rests on (root pyproject, lock, CI, tests/conftest.py, anything unknown)
selects everything, prose selects nothing. Dependencies are read from the pyproject files. Compared are the files of the
working tree, uncommitted ones included, with the point where it left `--base`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

E2E = "tests/e2e"
WORKSPACE_TEST = "tests/test_workspace.py"
DOCUMENTATION_TESTS = ("tests/test_docs.py", "tests/llm_rl/test_docs.py", "tests/shared_runtime/test_readme.py")
USED_BY_E2E = ("scripts", "notebooks", "benchmarks")
HARMLESS = {"LICENSE", "NOTICE", ".gitignore"}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="git revision that the change is compared with")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the repository")
    arguments = parser.parse_args()
    try:
        files = changed_files(arguments.root, arguments.base)
    except subprocess.CalledProcessError as error:
        print(f"--base {arguments.base}: {error.stderr.strip()}", file=sys.stderr)
        return 2
    for folder in select(arguments.root, files):
        print(folder)
    return 0


def changed_files(root: Path, base: str) -> list[str]:
    """Paths that differ from the merge base with `base`; both paths of a renamed file.

    Raises:
        subprocess.CalledProcessError: If `base` is unknown or shares no history.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), "-c", "core.quotePath=false", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("rev-parse", "--verify", f"{base}^{{commit}}")
    start = git("merge-base", base, "HEAD").strip()
    tracked = git("diff", "--name-only", "--no-renames", "-z", start)
    untracked = git("ls-files", "--others", "--exclude-standard", "-z")
    return sorted({path for path in (tracked + untracked).split("\0") if path})


def select(root: Path, files: Iterable[str]) -> list[str]:
    """Existing test folders for the changed files, sorted."""
    packages = {path.parent.name: tomllib.loads(path.read_text()) for path in root.glob("packages/*/pyproject.toml")}
    dependants = read_dependants(packages, tomllib.loads((root / "pyproject.toml").read_text()))
    folders: set[str] = set()
    for file in files:
        touched = folders_of(PurePosixPath(file), dependants)
        if touched is None:
            return everything(root)
        folders |= touched
    return sorted(folder for folder in folders if (root / folder).exists())


def everything(root: Path) -> list[str]:
    """All folders and files directly under tests/ that hold tests."""
    found = [path for path in (root / "tests").iterdir() if path.is_dir() and not path.name.startswith(("_", "."))]
    found += (root / "tests").glob("test_*.py")
    return sorted(path.relative_to(root).as_posix() for path in found)


def folders_of(file: PurePosixPath, dependants: dict[str, set[str]]) -> set[str] | None:
    """Test folders that one changed file touches; `None` means all of them."""
    top, *rest = file.parts
    if top == "tests":
        if len(rest) == 1:
            return {file.as_posix()} if rest[0].startswith("test_") else None
        return {f"tests/{rest[0]}"}
    if is_prose(file):
        return set(DOCUMENTATION_TESTS)
    if top == "packages" and len(rest) > 1 and rest[0] in dependants:
        return {f"tests/{name}" for name in {rest[0]} | dependants[rest[0]]} | {WORKSPACE_TEST}
    if top in USED_BY_E2E and file.name != Path(__file__).name:
        return {E2E}
    return None


def is_prose(file: PurePosixPath) -> bool:
    """Whether nothing runs or installs the file; Markdown inside a package's sources may be its data."""
    if "src" in file.parts:
        return False
    return file.suffix == ".md" or file.parts[0] == "docs" or file.as_posix() in HARMLESS


def read_dependants(packages: dict[str, dict], root: dict) -> dict[str, set[str]]:
    """For each package folder the names under tests/ that rest on it, over any number of steps.

    Args:
        packages: Parsed pyproject of each folder of packages/.
        root: Parsed root pyproject, whose dependencies are what scripts and notebooks (`e2e`) use.
    """
    folder_of = {normalised(pyproject["project"]["name"]): folder for folder, pyproject in packages.items()}
    direct: dict[str, set[str]] = {folder: set() for folder in packages}
    for user, pyproject in [*packages.items(), ("e2e", root)]:
        for requirement in requirements(pyproject):
            folder = folder_of.get(normalised(requirement))
            if folder and folder != user:
                direct[folder].add(user)
    return {folder: _reachable(folder, direct) for folder in packages}


def requirements(pyproject: dict) -> list[str]:
    """All requirement strings of a pyproject: dependencies, extras and groups."""
    project = pyproject.get("project", {})
    lists = [project.get("dependencies", [])]
    lists += project.get("optional-dependencies", {}).values()
    lists += pyproject.get("dependency-groups", {}).values()
    return [item for items in lists for item in items if isinstance(item, str)]


def normalised(requirement: str) -> str:
    """The distribution's name in a requirement string, as PEP 503 writes it."""
    match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
    return re.sub(r"[-_.]+", "-", match[1]).lower() if match else ""


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    pending = [start]
    while pending:
        for name in edges.get(pending.pop(), set()) - found:
            found.add(name)
            pending.append(name)
    return found - {start}


if __name__ == "__main__":
    sys.exit(main())
