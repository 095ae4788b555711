"""The run directory `runs/<name>/`: who may write into it, what it holds, and where a run goes on."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from shared_runtime.tracking.config_diff import differences, drop_secrets, to_plain
from shared_runtime.tracking.run_lock import LOCK, RunDirectoryError, RunInUseError, acquire, release

CONFIG, STATE = "config.yaml", "state.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]*")


class RunStatus(StrEnum):
    """How a run stands. A run that was killed is still `running`, without a process that holds its lock."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class RunDirectory:
    """A run's directory, locked for this process until `close` or death. Made by :func:`open_run_directory`.

    Attributes:
        path: The directory.
        resumed: Whether an earlier start of this run is continued.
        next_rollout: The rollout id that the state file says comes next; 0 for a new run. The checkpoint has the
            last word: rows behind it are computed again.
    """

    def __init__(self, path: Path, lock: int, resumed: bool, next_rollout: int) -> None:
        self.path = path
        self.resumed = resumed
        self.next_rollout = next_rollout
        self._lock = lock

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def config_path(self) -> Path:
        """Resolved configuration; rerun it with `--config`."""
        return self.path / CONFIG

    @property
    def metrics_path(self) -> Path:
        """One row a step."""
        return self.path / "metrics.jsonl"

    @property
    def samples_path(self) -> Path:
        """What was sampled."""
        return self.path / "samples.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        """Checkpoints of the run."""
        return self.path / "checkpoints"

    @property
    def export_path(self) -> Path:
        """Hugging Face export of the trained model."""
        return self.path / "hf"

    @property
    def media_path(self) -> Path:
        """Pictures of samples."""
        return self.path / "media"

    @property
    def reward_plot_path(self) -> Path:
        """The picture of the run."""
        return self.path / "reward.png"

    @property
    def wandb_state_path(self) -> Path:
        """Id of the W&B run."""
        return self.path / "wandb.json"

    def update(self, next_rollout: int) -> None:
        """Note that every rollout before `next_rollout` is done."""
        self.next_rollout = next_rollout
        self._write_state(RunStatus.RUNNING)

    def finish(self) -> None:
        """Note that the run reached its end: it is not resumed any more."""
        self._write_state(RunStatus.FINISHED)

    def fail(self, message: str) -> None:
        """Note why the run stopped; it can be resumed."""
        self._write_state(RunStatus.FAILED, message)

    def close(self) -> None:
        """Let another process have the directory."""
        release(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and read_state(self.path).get("status") == RunStatus.RUNNING:
            self.fail(f"{type(error).__name__}: {error}")
        self.close()

    def _write_state(self, status: RunStatus, error: str | None = None) -> None:
        state = {"status": status.value, "next_rollout": self.next_rollout, "pid": os.getpid(), "updated": time.time()}
        if error:
            state["error"] = error
        _write_atomic(self.path / STATE, json.dumps(state) + "\n")


def open_run_directory(
    runs_dir: Path,
    recipe: str,
    config: Mapping[str, Any],
    run_name: str | None = None,
    *,
    ignore: Collection[str] = (),
    num_rollout: int | None = None,
) -> RunDirectory:
    """Create or resume a run's directory, lock it, and write its `config.yaml`.

    With `run_name`, that directory: new, or the unfinished run of the same configuration. Without it, the last
    unfinished run of the recipe with the same configuration that no live process writes, else a new one: `<recipe>`,
    `<recipe>-2`, `<recipe>-3`, …

    Args:
        runs_dir: `--runs-dir`.
        recipe: Name of the recipe or preset.
        config: The resolved configuration, nested; secrets (`wandb_key`) are left out of the file.
        run_name: `--run-name`.
        ignore: Keys that may differ between starts of one run, dotted; a prefix (`tracking`) covers what is below it.
        num_rollout: Length of the run; a finished run that was shorter may then go on.

    Raises:
        RunDirectoryError: If the named directory is another run's (lists the keys that differ), holds no run, or is
            finished, or if `runs_dir` can't be written; RunInUseError if a live process writes into it.
    """
    plain = to_plain(drop_secrets(config))
    _make_runs_dir(runs_dir)
    if run_name is not None:
        return _open_named(runs_dir, run_name, plain, ignore, num_rollout)
    _check_name(recipe)
    for number in reversed(_numbers(runs_dir, recipe)):
        try:
            run = _resume_if_same(runs_dir / _numbered(recipe, number), plain, ignore, num_rollout)
        except RunInUseError:
            continue
        if run:
            return run
    number = max(_numbers(runs_dir, recipe), default=0) + 1
    while True:
        path = runs_dir / _numbered(recipe, number)
        try:
            path.mkdir()
        except FileExistsError:  # another process took this number a moment ago
            number += 1
            continue
        return _start(path, acquire(path), plain)


def check_run_directory(
    runs_dir: Path,
    config: Mapping[str, Any],
    run_name: str | None = None,
    *,
    ignore: Collection[str] = (),
    num_rollout: int | None = None,
) -> None:
    """Find out whether :func:`open_run_directory` would work, without making anything.

    Raises:
        RunDirectoryError: As `open_run_directory` does.
    """
    there = next((path for path in (runs_dir, *runs_dir.absolute().parents) if path.exists()), runs_dir)
    if not there.is_dir():
        raise RunDirectoryError(f"--runs-dir {runs_dir} can't be made: {there} is a file")
    if not os.access(there, os.W_OK):
        raise RunDirectoryError(f"--runs-dir {runs_dir} can't be written")
    if run_name is None:
        return
    _check_name(run_name)
    path = runs_dir / run_name
    if path.exists():
        _is_this_run(path, to_plain(drop_secrets(config)), ignore, num_rollout)
        release(acquire(path))


def _make_runs_dir(runs_dir: Path) -> None:
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"--runs-dir {runs_dir} can't be made: {error.strerror}") from None
    if not os.access(runs_dir, os.W_OK):
        raise RunDirectoryError(f"--runs-dir {runs_dir} can't be written")


def read_state(path: Path) -> dict[str, Any]:
    """The state file of a run directory, `{}` when there is none."""
    try:
        return json.loads((path / STATE).read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunDirectoryError(f"{path / STATE} is damaged: {error}") from error


def read_config(path: Path) -> dict[str, Any] | None:
    """The configuration of a run directory, `None` when there is none."""
    try:
        return yaml.safe_load((path / CONFIG).read_text())
    except FileNotFoundError:
        return None
    except yaml.YAMLError as error:
        raise RunDirectoryError(f"{path / CONFIG} is damaged: {error}") from error


def _open_named(
    runs_dir: Path, name: str, config: dict[str, Any], ignore: Collection[str], num_rollout: int | None
) -> RunDirectory:
    _check_name(name)
    path = runs_dir / name
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"{path} is a file; choose another --run-name")
    path.mkdir(exist_ok=True)
    lock = acquire(path)
    try:
        begun = _is_this_run(path, config, ignore, num_rollout)
        return _resume(path, lock, config) if begun else _start(path, lock, config)
    except BaseException:
        release(lock)
        raise


def _is_this_run(path: Path, config: dict[str, Any], ignore: Collection[str], num_rollout: int | None) -> bool:
    """Whether the run has begun in this directory; one that may not be taken is an error."""
    if not path.is_dir():
        raise RunDirectoryError(f"{path} is a file; choose another --run-name")
    earlier = read_config(path)
    if earlier is None:
        if _has_content(path):
            raise RunDirectoryError(f"{path} holds files but no {CONFIG}: not a run; choose another --run-name")
        return False
    changed = differences(earlier, config, ignore)
    if changed:
        raise RunDirectoryError(
            f"{path} is a run with another configuration; choose another --run-name, or use its values:\n"
            + "\n".join(f"  {line}" for line in changed)
        )
    if _is_finished(path, num_rollout):
        rollouts = read_state(path).get("next_rollout")
        raise RunDirectoryError(f"{path} has finished ({rollouts} rollouts); to run it again choose another --run-name")
    return True


def _resume_if_same(
    path: Path, config: dict[str, Any], ignore: Collection[str], num_rollout: int | None
) -> RunDirectory | None:
    # Only a candidate is locked: a directory that another process is just making has no configuration yet.
    earlier = read_config(path)
    if earlier is None or differences(earlier, config, ignore):
        return None
    lock = acquire(path)
    if _is_finished(path, num_rollout):
        release(lock)
        return None
    return _resume(path, lock, config)


def _start(path: Path, lock: int, config: dict[str, Any]) -> RunDirectory:
    run = RunDirectory(path, lock, resumed=False, next_rollout=0)
    run.update(0)
    # Last: a directory without config.yaml is one whose creation was cut short, and is nobody's run.
    _write_config(path, config)
    return run


def _resume(path: Path, lock: int, config: dict[str, Any]) -> RunDirectory:
    run = RunDirectory(path, lock, resumed=True, next_rollout=int(read_state(path).get("next_rollout", 0)))
    run.update(run.next_rollout)
    _write_config(path, config)  # ignored keys may have changed
    return run


def _is_finished(path: Path, num_rollout: int | None) -> bool:
    state = read_state(path)
    if state.get("status") != RunStatus.FINISHED:
        return False
    return num_rollout is None or int(state["next_rollout"]) >= num_rollout


def _has_content(path: Path) -> bool:
    return any(entry.name not in (LOCK, STATE, STATE + ".tmp", CONFIG + ".tmp") for entry in path.iterdir())


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise RunDirectoryError(
            f"--run-name {name!r}: use letters, digits and . _ + = @ -, beginning with a letter or digit"
        )


def _numbered(recipe: str, number: int) -> str:
    return recipe if number == 1 else f"{recipe}-{number}"


def _numbers(runs_dir: Path, recipe: str) -> list[int]:
    """Numbers taken by runs of the recipe, ascending."""
    pattern = re.compile(rf"{re.escape(recipe)}(?:-([2-9]|[1-9]\d+))?")
    matches = (pattern.fullmatch(entry.name) for entry in runs_dir.iterdir() if entry.is_dir())
    return sorted(int(match[1] or 1) for match in matches if match)


def _write_config(path: Path, config: Mapping[str, Any]) -> None:
    _write_atomic(path / CONFIG, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def _write_atomic(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
