"""How much generation is in flight, and what frees room for more."""

from __future__ import annotations

from typing import Literal

Granularity = Literal["group", "sample"]


class SubmissionScheduler:
    """Counts the samples in flight. Whole groups are submitted, always.

    `group`: a group holds its room until its last sample is done. `sample`: every finished sample frees its own, so
    the next group goes out as soon as that many samples have finished, whichever groups they came from.
    """

    def __init__(self, max_in_flight: int | None = None, granularity: Granularity = "group") -> None:
        """`max_in_flight` is in samples; `None` is no limit."""
        if granularity not in ("group", "sample"):
            raise ValueError(f"--rollout-submission-granularity is group or sample, not {granularity!r}")
        self.max_in_flight = max_in_flight
        self.granularity = granularity
        self.in_flight = 0

    def has_room(self, group_size: int) -> bool:
        """Whether a group may be submitted. With nothing in flight it always may, so a small limit can't stop a run."""
        return self.max_in_flight is None or self.in_flight == 0 or self.in_flight + group_size <= self.max_in_flight

    def submitted(self, group_size: int) -> None:
        """A group went out."""
        self.in_flight += group_size

    def sample_done(self) -> None:
        """One sample was generated."""
        if self.granularity == "sample":
            self.in_flight -= 1

    def group_done(self, group_size: int) -> None:
        """The last sample of a group was generated."""
        if self.granularity == "group":
            self.in_flight -= group_size
