"""Rollouts as JSONL files: `--save-debug-rollout-data` and `--load-debug-rollout-data`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shared_runtime.data.files import DataError
from shared_runtime.data.serialize import sample_from_dict, sample_to_dict
from shared_runtime.sample import BaseSample

S = TypeVar("S", bound=BaseSample)


def recording_path(template: str, rollout_id: int) -> Path:
    """The file of one rollout; the template contains `{rollout_id}`."""
    return Path(template.replace("{rollout_id}", str(rollout_id)))


def save_recording(template: str, rollout_id: int, groups: list[list[S]]) -> Path:
    """Write the groups of a rollout, one sample a line; the file appears only when it is complete."""
    path = recording_path(template, rollout_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w") as file:
        for group in groups:
            for sample in group:
                file.write(json.dumps(sample_to_dict(sample)) + "\n")
    partial.replace(path)
    return path


def check_recording(template: str, rollout_id: int) -> None:
    """Refuse a rollout that was not recorded; of a whole run the last one tells, whatever it starts from.

    Raises:
        DataError: If its file is missing.
    """
    path = recording_path(template, rollout_id)
    if not path.exists():
        raise DataError(f"--load-debug-rollout-data: {path} does not exist, so rollout {rollout_id} can't be replayed")


def load_recording(template: str, rollout_id: int, make_sample: Callable[..., S]) -> list[list[S]]:
    """Read what `save_recording` wrote.

    Raises:
        DataError: If the file is missing or a line is not a sample; the line is named.
    """
    check_recording(template, rollout_id)
    path = recording_path(template, rollout_id)
    groups: dict[int, list[S]] = {}
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                sample = sample_from_dict(make_sample, json.loads(line))
            except (ValueError, TypeError) as error:
                raise DataError(f"{path}:{number}: not a recorded sample: {error}") from error
            groups.setdefault(sample.group_index, []).append(sample)
    if not groups:
        raise DataError(f"{path}: has no samples")
    return list(groups.values())
