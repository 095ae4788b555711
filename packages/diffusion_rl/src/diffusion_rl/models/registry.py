"""Which family a checkpoint belongs to. A new family is one file and one entry of `FAMILIES`. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from diffusion_rl.models.family import ModelFamily
from diffusion_rl.models.qwen_image import QwenImage
from diffusion_rl.models.sd3 import SD3
from shared_runtime.hooks import load_object

FAMILIES: dict[str, ModelFamily] = {family.name: family for family in (SD3(), QwenImage())}

_OWN_FAMILY = "--train-pipeline-config-path"
_DECLARED = ("name", "pipeline_classes", "tasks", "components", "condition_inputs", "block_modules")


class FamilyError(ValueError):
    """A checkpoint of no known family, or one that isn't what its family says. The message says what to do."""


def get_family(name: str) -> ModelFamily:
    """The family of a `--diffusion-model-family`.

    Raises:
        FamilyError: For an unknown name; the message lists the known ones.
    """
    if name not in FAMILIES:
        raise FamilyError(f"--diffusion-model-family {name!r} is not known. Known families: {_known()}.")
    return FAMILIES[name]


def match_family(checkpoint: str) -> ModelFamily | None:
    """The family whose pattern is the longest one in a checkpoint's name, `None` without a match.

    The name is the last part of a local path, or a repository id whole.
    """
    path = Path(checkpoint)
    name = (path.resolve().name if path.exists() else checkpoint).lower()
    matches = [
        (len(pattern), family) for family in FAMILIES.values() for pattern in family.name_patterns if pattern in name
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def resolve_family(checkpoint: str, name: str | ModelFamily | None = None) -> ModelFamily:
    """The family of `--hf-checkpoint`, or of `--diffusion-model-family` where it is given, or one of your own.

    Raises:
        FamilyError: If neither says one; the message lists the known families.
    """
    if isinstance(name, ModelFamily):
        return name
    if name is not None:
        return get_family(name)
    family = match_family(checkpoint)
    if family is not None:
        return family
    declared = _pipeline_class(Path(checkpoint))
    hint = next((f.name for f in FAMILIES.values() if declared in f.pipeline_classes), None)
    advice = f"Its model_index.json says {declared}: pass --diffusion-model-family {hint}. " if hint else ""
    raise FamilyError(
        f"--hf-checkpoint {checkpoint}: its name matches no known model family. {advice}"
        f"Known families: {_known()}. "
        "Pass --diffusion-model-family, or --train-pipeline-config-path for one of your own."
    )


def check_task(family: ModelFamily, task: str) -> None:
    """Refuse a task that the family lacks.

    Raises:
        FamilyError: The message lists the family's tasks.
    """
    if task not in family.tasks:
        raise FamilyError(f"--diffusion-task {task!r}: the {family.name} family has {', '.join(family.tasks)}.")


def check_checkpoint(checkpoint: str, family: ModelFamily) -> None:
    """Look at a local checkpoint before anything is loaded: is it a pipeline, of this family, and complete?

    A name that is no local path is left to the hub.

    Raises:
        FamilyError: The message says what is missing or different.
    """
    path = Path(checkpoint)
    if not path.exists():
        return
    declared = _pipeline_class(path)
    if declared is None:
        raise FamilyError(
            f"--hf-checkpoint {checkpoint} is no diffusers pipeline: it has no readable model_index.json. "
            f"Known families: {_known()}."
        )
    if declared not in family.pipeline_classes:
        raise FamilyError(
            f"--hf-checkpoint {checkpoint} is a {declared}; the {family.name} family needs "
            f"{' or '.join(family.pipeline_classes)}. Known families: {_known()}."
        )
    index = json.loads((path / "model_index.json").read_text(encoding="utf-8"))
    missing = [
        component
        for component in family.components
        if component not in index or (index[component] != [None, None] and not (path / component).is_dir())
    ]
    if missing:
        raise FamilyError(f"--hf-checkpoint {checkpoint} lacks {', '.join(missing)}, which {family.name} needs.")


def _pipeline_class(path: Path) -> str | None:
    try:
        index = json.loads((path / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    declared = index.get("_class_name") if isinstance(index, dict) else None
    return declared if isinstance(declared, str) else None


def _known() -> str:
    return "; ".join(f"{f.name} (names with {' or '.join(f.name_patterns)})" for f in FAMILIES.values())


def own_family(path: str) -> ModelFamily:
    """The family at a `--train-pipeline-config-path`.

    Raises:
        HookError: If there is no such class.
        FamilyError: If it is no complete subclass of `ModelFamily`.
    """
    cls = load_object(path, _OWN_FAMILY)
    if not (isinstance(cls, type) and issubclass(cls, ModelFamily)):
        raise FamilyError(f"{_OWN_FAMILY} {path}: expected a subclass of diffusion_rl.models.family.ModelFamily")
    missing = sorted(cls.__abstractmethods__) + [name for name in _DECLARED if not hasattr(cls, name)]
    if missing:
        raise FamilyError(f"{_OWN_FAMILY} {path}: the class lacks {', '.join(missing)}")
    return cls()
