"""A key-value cache that appends in place."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer


class AppendLayer(DynamicLayer):
    """A `DynamicLayer` with spare room: a new token is written behind the others instead of copying all of them.

    `keys` and `values` are views of the part that is in use, so whatever reads or reorders a dynamic layer works.

    Args:
        max_length: No row will become longer than this. Room grows by halves up to it.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self._max_length = max_length
        self._stores: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to the cache and return all of it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        assert self.keys is not None
        assert self.values is not None
        old = self.keys.shape[-2]
        new = old + key_states.shape[-2]
        if self._stores is None or self._stores[0].shape[-2] < new:
            room = max(new, min(old + old // 2 + 16, self._max_length))
            self._stores = (_with_room(self.keys, room), _with_room(self.values, room))
        for store, states in zip(self._stores, (key_states, value_states), strict=True):
            store[:, :, old:new] = states
        self.keys, self.values = (store[:, :, :new] for store in self._stores)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._stores = None


def _with_room(states: torch.Tensor, room: int) -> torch.Tensor:
    batch, heads, length, width = states.shape
    store = states.new_empty(batch, heads, room, width)
    store[:, :, :length] = states
    return store


def append_cache(config: PretrainedConfig, max_length: int) -> DynamicCache:
    """The cache that a model's config asks for, its full-attention layers replaced by appending ones."""
    cache = DynamicCache(config=config)
    cache.layers = [AppendLayer(max_length) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
