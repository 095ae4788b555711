"""Where presets keep what they make; see `shared_runtime.cache`."""

from shared_runtime.cache import built_once, cache_root

__all__ = ["built_once", "cache_root"]
