"""Weights & Biases. Imported only when a run asks for it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared_runtime.config.problems import ConfigError
from shared_runtime.tracking.config_diff import drop_secrets, to_plain
from shared_runtime.tracking.sink import LoggedImage, Metrics, Sink

if TYPE_CHECKING:
    import types

Mode = Literal["online", "offline", "disabled"]

_BEFORE_ALL = -2  # earlier than -1, the evaluation before training


class WandbSink(Sink):
    """One W&B run for one run directory, also over restarts.

    The run's id and the last step sent are kept in `state_path`, so a resumed run continues the same W&B run, and
    steps that it computes again (those behind its last checkpoint) are not sent twice: W&B keeps no way to take a
    row back. The x axis is `rollout/step`; the W&B step, which must not be negative, is one more.

    The key comes from `WANDB_API_KEY`, a login, or `api_key`; it is handed to this process's W&B settings and written
    nowhere.

    Args:
        state_path: Usually `wandb.json` of the run directory.
        project: W&B project.
        group: Optional group.
        name: Display name, usually the run's name.
        team: W&B entity.
        host: Address of a server of one's own.
        mode: Overrides `WANDB_MODE`.
        directory: Where W&B keeps its files (`<directory>/wandb`).
        config: The run's configuration; secrets are left out.
        api_key: See above.
        run_id: Id of a new run; the one in `state_path` goes before it.

    Raises:
        ImportError: If W&B is not installed; names the extra.
        ConfigError: If W&B refuses the settings, such as a run online without a login.
    """

    name = "wandb"

    def __init__(
        self,
        state_path: Path,
        project: str,
        *,
        group: str | None = None,
        name: str | None = None,
        team: str | None = None,
        host: str | None = None,
        mode: Mode | None = None,
        directory: Path | None = None,
        config: Mapping[str, Any] | None = None,
        api_key: str | None = None,
        run_id: str | None = None,
    ) -> None:
        self._wandb = _import_wandb()
        self._state_path = state_path
        state = json.loads(state_path.read_text()) if state_path.exists() else {}
        self._sent_before: int = state.get("last_step", _BEFORE_ALL)
        self._id = state.get("id") or run_id or secrets.token_hex(4)
        self._save_state(self._sent_before)
        settings = {"base_url": host, "api_key": api_key, "console": "off", "silent": True, "disable_git": True}
        try:
            self._run = self._wandb.init(
                project=project,
                entity=team,
                group=group,
                name=name,
                id=self._id,
                resume="allow",
                mode=mode,
                dir=str(directory) if directory else None,
                config=to_plain(drop_secrets(config or {})),
                settings=self._wandb.Settings(**{k: v for k, v in settings.items() if v is not None}),
            )
        except self._wandb.errors.UsageError as error:
            raise ConfigError([f"--use-wandb: {error} (or give --wandb-mode offline)"]) from None
        self._run.define_metric("rollout/step")
        self._run.define_metric("*", step_metric="rollout/step")

    @property
    def run_id(self) -> str:
        """Id of the W&B run."""
        return self._id

    def log(self, step: int, metrics: Metrics) -> None:
        """Send the finite metrics of a step that was not sent before."""
        if step <= self._sent_before:
            return
        finite = {key: value for key, value in metrics.items() if value is not None}
        self._run.log({**finite, "rollout/step": step}, step=step + 1)
        self._save_state(step)

    def log_images(self, step: int, key: str, images: Sequence[LoggedImage]) -> None:
        """Send pictures."""
        if step <= self._sent_before:
            return
        media = [self._wandb.Image(image.pixels, caption=image.caption or None) for image in images]
        self._run.log({key: media, "rollout/step": step}, step=step + 1)

    def close(self) -> None:
        """Finish the W&B run; waits for what is still to be sent."""
        self._run.finish()

    def _save_state(self, last_step: int) -> None:
        temporary = self._state_path.with_name(self._state_path.name + ".tmp")
        temporary.write_text(json.dumps({"id": self._id, "last_step": last_step}))
        temporary.replace(self._state_path)


def _import_wandb() -> types.ModuleType:
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            "--use-wandb needs the package wandb: install tandem-shared-runtime[wandb], or leave the flag out"
        ) from error
    return wandb
