"""Prompt sets and the source that hands them out."""

from shared_runtime.data.files import DataError
from shared_runtime.data.prompts import PromptDataset, PromptRow
from shared_runtime.data.source import DataSource, RolloutDataSource, pop_first

__all__ = ["DataError", "DataSource", "PromptDataset", "PromptRow", "RolloutDataSource", "pop_first"]
