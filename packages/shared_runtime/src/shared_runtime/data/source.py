"""Where groups of samples come from: epochs over a prompt set, a buffer in front of it, and their exact state."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from shared_runtime.data.files import DataError
from shared_runtime.data.prompts import PromptDataset
from shared_runtime.data.serialize import sample_from_dict, sample_to_dict
from shared_runtime.sample import BaseSample

S = TypeVar("S", bound=BaseSample)
BufferFilter = Callable[[Any, int | None, list[list[S]], int], list[list[S]]]

STATE_FILE = "data_source.json"
FORMAT = 1


class DataSource(Protocol[S]):
    """What a rollout asks for prompts; `--data-source-path` names a class with these methods."""

    def get_samples(self, num_samples: int) -> list[list[S]]:
        """`num_samples` groups of unstarted samples."""

    def add_samples(self, samples: list[list[S]]) -> None:
        """Take groups back; they are given out again before new prompts."""

    def save(self, directory: Path) -> None:
        """Write the state into a checkpoint directory."""

    def load(self, directory: Path) -> None:
        """Read what `save` wrote."""


def pop_first(args: Any, rollout_id: int | None, buffer: list[list[S]], num_samples: int) -> list[list[S]]:
    """Take the groups that have waited longest out of the buffer."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def epoch_order(num_prompts: int, epoch: int, shuffle: bool, seed: int) -> np.ndarray:
    """Positions of the prompts in one epoch, int64 of shape `(num_prompts,)`: a function of seed and epoch alone."""
    if not shuffle:
        return np.arange(num_prompts)
    return np.random.default_rng([seed, epoch]).permutation(num_prompts)


class RolloutDataSource(Generic[S]):
    """Groups over epochs of a prompt set, seeded shuffle, buffer first.

    A group is `n_samples_per_prompt` samples of one prompt. `index` and `group_index` count over the whole run. An
    epoch that ends inside a batch is followed by the next one in the same batch, so no prompt is skipped.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        make_sample: Callable[..., S],
        *,
        n_samples_per_prompt: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        buffer_filter: BufferFilter[S] | None = None,
        args: Any = None,
    ) -> None:
        """Start at the first prompt of epoch 0.

        Args:
            dataset: The prompts.
            make_sample: The domain's sample class, or a function called with the keywords `index`, `group_index`,
                `prompt`, `label` and `metadata`.
            n_samples_per_prompt: Samples a group.
            shuffle: A new order each epoch.
            seed: What the orders derive from.
            buffer_filter: Chooses groups out of the buffer and removes them from it (default `pop_first`).
            args: Passed to `buffer_filter`.
        """
        self.dataset = dataset
        self.make_sample = make_sample
        self.n_samples_per_prompt = n_samples_per_prompt
        self.shuffle = shuffle
        self.seed = seed
        self.buffer_filter: BufferFilter[S] = buffer_filter or pop_first
        self.args = args
        self.rollout_id: int | None = None
        self.epoch = 0
        self.position = 0
        self.next_index = 0
        self.next_group_index = 0
        self.buffer: list[list[S]] = []
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def get_samples(self, num_samples: int) -> list[list[S]]:
        """`num_samples` groups: out of the buffer first, then new prompts.

        Raises:
            ValueError: If the buffer filter returns more groups than were asked for.
        """
        groups: list[list[S]] = []
        if self.buffer:
            groups = list(self.buffer_filter(self.args, self.rollout_id, self.buffer, num_samples))
            if len(groups) > num_samples:
                raise ValueError(f"--buffer-filter-path returned {len(groups)} groups, asked for {num_samples}")
        while len(groups) < num_samples:
            groups.append(self._next_group())
        return groups

    def add_samples(self, samples: list[list[S]]) -> None:
        """Put groups into the buffer, behind those that wait there."""
        self.buffer.extend(samples)

    def _next_group(self) -> list[S]:
        if self.position >= len(self.dataset):
            self.epoch += 1
            self.position = 0
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, epoch_order(len(self.dataset), self.epoch, self.shuffle, self.seed))
        row = self.dataset[int(self._order[1][self.position])]
        group = [
            self.make_sample(
                index=self.next_index + member,
                group_index=self.next_group_index,
                prompt=row.prompt,
                label=row.label,
                metadata=dict(row.metadata),
            )
            for member in range(self.n_samples_per_prompt)
        ]
        self.position += 1
        self.next_index += len(group)
        self.next_group_index += 1
        return group

    def state_dict(self) -> dict[str, Any]:
        """The whole state as plain JSON-able data, exact to the sample."""
        return {
            "format": FORMAT,
            "num_prompts": len(self.dataset),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "next_index": self.next_index,
            "next_group_index": self.next_group_index,
            "buffer": [[sample_to_dict(sample) for sample in group] for group in self.buffer],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. A state at an epoch's end goes on with the next epoch.

        Raises:
            DataError: If the state belongs to another prompt set, seed or order.
        """
        if state.get("format") != FORMAT:
            raise DataError(f"state of the data source has format {state.get('format')!r}, this version reads {FORMAT}")
        here = {"num_prompts": len(self.dataset), "shuffle": self.shuffle, "seed": self.seed}
        flags = {"num_prompts": "--prompt-data", "shuffle": "--rollout-shuffle", "seed": "--rollout-seed"}
        changed = [
            f"{flags[name]}: {name.replace('_', ' ')} was {state[name]}, is {value}"
            for name, value in here.items()
            if state[name] != value
        ]
        if changed:
            raise DataError(
                f"can't resume the data source over {self.dataset.path}: " + "; ".join(changed) + ". "
                "Give the same values as the run that saved it, or start a new run."
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.next_index, self.next_group_index = int(state["next_index"]), int(state["next_group_index"])
        self.buffer = [[sample_from_dict(self.make_sample, fields) for fields in group] for group in state["buffer"]]
        self._order = None

    def save(self, directory: Path) -> None:
        """Write the state as `data_source.json` into `directory`."""
        (Path(directory) / STATE_FILE).write_text(json.dumps(self.state_dict()))

    def load(self, directory: Path) -> None:
        """Read `data_source.json` out of `directory`.

        Raises:
            DataError: If it is missing or belongs to other prompts.
        """
        path = Path(directory) / STATE_FILE
        if not path.exists():
            raise DataError(f"{path}: the checkpoint has no state of the data source")
        self.load_state_dict(json.loads(path.read_text()))
