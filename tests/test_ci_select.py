"""scripts/ci_select.py on a small repository of its own with other packages than ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ci_select
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "ci_select.py"

# base <- middle <- top, base <- side; scripts use `top` and `side`.
FILES = {
    "pyproject.toml": '[project]\nname="all"\ndependencies=["acme-top[x]", "acme_side"]\n',
    "packages/base/pyproject.toml": '[project]\nname="acme-base"\ndependencies=["numpy"]\n',
    "packages/middle/pyproject.toml": '[project]\nname="acme-middle"\ndependencies=["Acme.Base>=1;os_name>\'\'"]\n',
    "packages/top/pyproject.toml": '[project]\nname="acme-top"\n[project.optional-dependencies]\nx=["acme-middle"]\n',
    "packages/side/pyproject.toml": '[project]\nname="acme-side"\ndependencies=["acme-base"]\n',
    "packages/alone/pyproject.toml": '[project]\nname="acme-alone"\n',
    **{f"packages/{name}/src/{name}/x.py": "" for name in ("base", "middle", "top", "side", "alone")},
    **{f"tests/{name}/test_x.py": "" for name in ("base", "middle", "top", "side", "alone", "e2e")},
    "tests/conftest.py": "",
    "tests/test_workspace.py": "",
    "uv.lock": "",
    ".ci/run": "",
    "README.md": "",
    "docs/concepts.md": "",
    "docs/curve.png": "",
    "packages/base/README.md": "",
    "scripts/run.py": "",
    "scripts/ci_select.py": "",
    "notebooks/a.ipynb": "",
    "benchmarks/b.py": "",
    "Makefile": "",
}
ALL = [f"tests/{name}" for name in ("alone", "base", "e2e", "middle", "side", "test_workspace.py", "top")]


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "base")
    git(tmp_path, "checkout", "-q", "-b", "change")
    return tmp_path


def run(root: Path, base: str = "main") -> list[str]:
    command = [sys.executable, str(SCRIPT), "--base", base, "--root", str(root)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def change(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("changed")


@pytest.mark.parametrize(
    ("files", "folders"),
    [
        (["packages/top/src/top/x.py"], ["e2e", "test_workspace.py", "top"]),
        (["packages/middle/src/middle/x.py"], ["e2e", "middle", "test_workspace.py", "top"]),
        (["packages/base/src/base/x.py"], ["base", "e2e", "middle", "side", "test_workspace.py", "top"]),
        (["packages/side/src/side/new.py"], ["e2e", "side", "test_workspace.py"]),
        (["packages/alone/src/alone/x.py"], ["alone", "test_workspace.py"]),
        (["packages/alone/src/alone/prompt.md"], ["alone", "test_workspace.py"]),
        (["README.md", "docs/concepts.md", "docs/curve.png", "packages/base/README.md"], []),
        (["scripts/run.py"], ["e2e"]),
        (["notebooks/a.ipynb"], ["e2e"]),
        (["benchmarks/b.py"], ["e2e"]),
        (["tests/side/test_x.py"], ["side"]),
        (["tests/side/fixture.md"], ["side"]),
        (["tests/test_workspace.py"], ["test_workspace.py"]),
        (["tests/side/test_x.py", "scripts/run.py", "README.md"], ["e2e", "side"]),
    ],
)
def test_selection(repository, files, folders):
    change(repository, *files)
    assert run(repository) == [f"tests/{folder}" for folder in folders]  # not committed
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "change")
    assert run(repository) == [f"tests/{folder}" for folder in folders]


@pytest.mark.parametrize(
    "file", ["uv.lock", ".ci/run", "tests/conftest.py", "scripts/ci_select.py", "Makefile", "new.cfg"]
)
def test_what_all_rests_on_selects_everything(repository, file):
    change(repository, file)
    assert run(repository) == ALL


def test_root_pyproject_selects_everything(repository):
    with (repository / "pyproject.toml").open("a") as file:
        file.write("[tool.ruff]\nline-length = 100\n")
    assert run(repository) == ALL


def test_moved_file_selects_both_places(repository):
    git(repository, "mv", "packages/alone/src/alone/x.py", "packages/side/src/side/y.py")
    assert run(repository) == ["tests/alone", "tests/e2e", "tests/side", "tests/test_workspace.py"]


def test_removed_package_selects_everything(repository):
    git(repository, "rm", "-q", "-r", "packages/alone")
    assert run(repository) == ALL


def test_commits_on_the_base_branch_do_not_count(repository):
    change(repository, "tests/side/test_x.py")
    git(repository, "commit", "-q", "-a", "-m", "change")
    git(repository, "checkout", "-q", "main")
    change(repository, "uv.lock")
    git(repository, "commit", "-q", "-a", "-m", "others")
    git(repository, "checkout", "-q", "change")
    assert run(repository) == ["tests/side"]


def test_unknown_base_is_an_error(repository):
    command = [sys.executable, str(SCRIPT), "--base", "nowhere", "--root", str(repository)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "--base nowhere: fatal" in result.stderr


def test_on_this_repository():
    """Our own pyproject files give the order of the packages."""
    root = SCRIPT.parent.parent
    every = {
        name: f"packages/{name}/src/{name}/x.py" for name in ("rewards", "shared_runtime", "llm_rl", "diffusion_rl")
    }
    existing = set(ci_select.everything(root))
    for name, users in {
        "rewards": {"rewards", "llm_rl", "diffusion_rl", "e2e"},
        "shared_runtime": {"shared_runtime", "llm_rl", "diffusion_rl", "e2e"},
        "llm_rl": {"llm_rl", "e2e"},
        "diffusion_rl": {"diffusion_rl", "e2e"},
    }.items():
        wanted = {f"tests/{user}" for user in users} | {"tests/test_workspace.py"}
        assert set(ci_select.select(root, [every[name]])) == wanted & existing
