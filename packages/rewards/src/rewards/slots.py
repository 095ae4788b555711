"""Who sits where on a placement group: plain bookkeeping without Ray, so that a configuration can be checked by it."""

from __future__ import annotations

from collections.abc import Sequence


class SlotLedger:
    """Which bundles of a placement group are still free for reward workers: one slot a bundle, shared by all pools.

    Args:
        num_bundles: Bundles of the group.
    """

    def __init__(self, num_bundles: int) -> None:
        self._free = list(range(num_bundles))

    def take(self, count: int, name: str) -> list[int]:
        """Indices of `count` bundles, which are then taken.

        Raises:
            ValueError: There are not so many left.
        """
        if count > len(self._free):
            raise ValueError(
                f"{name} wants {count} colocated workers and {len(self._free)} bundles are free: "
                "lower --reward-num-workers, or place it standalone"
            )
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, bundles: Sequence[int]) -> None:
        """Free the bundles again."""
        self._free = sorted({*self._free, *bundles})
