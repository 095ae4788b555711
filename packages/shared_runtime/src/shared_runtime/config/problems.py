"""Every problem of a configuration at once, in the user's words."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """The configuration can't work. `problems` holds one sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        if len(problems) == 1:
            super().__init__(problems[0])
        else:
            super().__init__(f"{len(problems)} problems:\n" + "\n".join(f"  - {p}" for p in problems))


class Problems:
    """Collects problems, so that a user sees all of them in one go."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, message: str) -> None:
        """Note one problem."""
        self.found.append(message)

    def require(self, condition: bool, message: str) -> None:
        """Note `message` unless `condition` holds."""
        if not condition:
            self.add(message)

    def collect(self, action: Callable[[], T]) -> T | None:
        """The action's result; what it finds wrong is noted, and gives `None`."""
        try:
            return action()
        except (ValueError, ImportError) as error:
            for line in error.problems if isinstance(error, ConfigError) else str(error).splitlines():
                self.add(line)
            return None

    def positive(self, **values: float | None) -> None:
        """Each given value (unless `None`) must be above 0; keyword names are field names."""
        for name, value in values.items():
            self.require(value is None or value > 0, f"{flag(name)} must be above 0, got {value}")

    def not_negative(self, **values: float | None) -> None:
        """Each given value (unless `None`) must be at least 0."""
        for name, value in values.items():
            self.require(value is None or value >= 0, f"{flag(name)} must be at least 0, got {value}")

    def raise_if_any(self) -> None:
        """Raise all of them together.

        Raises:
            ConfigError: If anything was noted.
        """
        if self.found:
            raise ConfigError(self.found)


def flag(field_name: str) -> str:
    """`rollout_batch_size` -> `--rollout-batch-size`."""
    return "--" + field_name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or nothing when no known name is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
