"""The batching client: one worker call for what comes together, an even and deterministic split, errors passed on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_runtime.engines.client import BatchingClient
from shared_runtime.engines.split import split_by_cost
from shared_runtime.placement.groups import InProcessGroup

finite = st.floats(0, 1e6)


@given(st.lists(finite, max_size=60), st.lists(finite, min_size=1, max_size=6))
def test_every_request_goes_somewhere_once_in_order(costs: list[float], loads: list[float]) -> None:
    parts = split_by_cost(costs, loads)
    assert len(parts) == len(loads)
    assert [position for part in parts for position in part] == list(range(len(costs)))
    assert parts == split_by_cost(costs, loads)


@given(st.lists(st.floats(1, 100), min_size=1, max_size=80), st.integers(1, 6))
def test_idle_engines_get_equal_cost_up_to_one_request(costs: list[float], engines: int) -> None:
    parts = split_by_cost(costs, [0.0] * engines)
    for part in parts:
        assert abs(sum(costs[i] for i in part) - sum(costs) / engines) <= max(costs) + 1e-6


def test_split_by_hand() -> None:
    assert split_by_cost([1] * 6, [0, 0, 0]) == [[0, 1], [2, 3], [4, 5]]
    assert split_by_cost([4, 1, 1, 1, 1], [0, 0]) == [[0], [1, 2, 3, 4]]
    # Engine 1 already has 4 to do: the level is (4 + 4) / 2.
    assert split_by_cost([1, 1, 1, 1], [0, 4]) == [[0, 1, 2, 3], []]
    assert split_by_cost([1, 1, 1, 1], [0, 2]) == [[0, 1, 2], [3]]
    # One request goes to the least loaded.
    assert split_by_cost([1], [3, 2, 5]) == [[], [0], []]
    assert split_by_cost([], [0, 0]) == [[], []]


class Group:
    """Two workers whose answers arrive when the test says so."""

    size = 2

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[Any]]] = []
        self.release = asyncio.Event()
        self.answer = lambda requests: [request * 10 for request in requests]

    def start(self, method: str, *args: Any, workers: Sequence[int] | None = None) -> list[Any]:
        assert method == "generate"
        assert workers is not None
        self.calls.append((workers[0], args[0]))
        return [len(self.calls) - 1]

    async def wait_async(self, handle: int) -> Any:
        await self.release.wait()
        return self.answer(self.calls[handle][1])


def test_concurrent_requests_are_one_call_a_worker() -> None:
    async def late(client: BatchingClient[int, int], request: int) -> int:
        # A task that needs a few ticks more than the others still joins.
        await asyncio.sleep(0)
        return await client.generate(request)

    async def main() -> None:
        group = Group()
        client: BatchingClient[int, int] = BatchingClient(group, max_batch_size=3)  # type: ignore[arg-type]
        tasks = [asyncio.ensure_future(client.generate(i)) for i in range(7)]
        tasks.append(asyncio.ensure_future(late(client, 7)))
        while not group.calls:
            await asyncio.sleep(0)
        assert group.calls == [(0, [0, 1, 2]), (0, [3]), (1, [4, 5, 6]), (1, [7])]
        assert client.loads == [4, 4]
        tasks.append(asyncio.ensure_future(client.generate(8)))
        tasks[3].cancel()
        group.release.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [r for i, r in enumerate(results) if i != 3] == [10 * i for i in range(9) if i != 3]
        assert client.loads == [0, 0]

    asyncio.run(main())


def test_errors_reach_every_caller() -> None:
    async def failing(group: Any) -> list[Any]:
        client: BatchingClient[int, int] = BatchingClient(group)
        return await asyncio.gather(*(client.generate(i) for i in range(3)), return_exceptions=True)

    class Broken:
        def generate(self, requests: list[int]) -> list[int]:
            raise MemoryError("no room")

    class Short:
        def generate(self, requests: list[int]) -> list[int]:
            return requests[:1]

    in_process = asyncio.run(failing(InProcessGroup(Broken())))
    assert [type(r) for r in in_process] == [MemoryError] * 3
    short = asyncio.run(failing(InProcessGroup(Short())))
    assert [str(r) for r in short] == ["engine 0 answered 1 of 3 requests"] * 3


def test_an_engine_that_goes_away_fails_only_its_own() -> None:
    async def main() -> None:
        group = Group()
        group.release.set()

        def answer(requests: list[int]) -> list[int]:
            if 0 in requests:
                raise ConnectionError("gone")
            return requests

        group.answer = answer
        client: BatchingClient[int, int] = BatchingClient(group)  # type: ignore[arg-type]
        results = await asyncio.gather(*(client.generate(i) for i in range(4)), return_exceptions=True)
        assert [type(r) for r in results] == [ConnectionError, ConnectionError, int, int]
        assert client.loads == [0, 0]

    asyncio.run(main())


def test_no_request_no_call() -> None:
    group = InProcessGroup(object())
    with pytest.raises(AttributeError):
        asyncio.run(BatchingClient(group).generate(1))
