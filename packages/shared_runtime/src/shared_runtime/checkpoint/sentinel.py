"""A checkpoint on demand: the user touches a file, and the file goes when the checkpoint is on disk."""

from __future__ import annotations

from pathlib import Path


class SaveSentinel:
    """The file of `--save-trigger-sentinel`.

    A request counts from the moment at which a save point sees it. It is acknowledged only when a checkpoint that
    began after that is durable, so a run that dies while saving leaves the request for its next start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = False

    def requested(self) -> bool:
        """Whether the file is there; remembered until `acknowledge`."""
        self._seen = self.path.exists()
        return self._seen

    def acknowledge(self) -> None:
        """Remove the file if the checkpoint that is durable now was asked for by it."""
        if self._seen:
            self.path.unlink(missing_ok=True)
            self._seen = False
