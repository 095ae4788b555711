"""Generate functions: how one microgroup, some images of one prompt, comes from the engine.

A generate function (`--custom-generate-function-path`) has the form

    async def generate(args, microgroup: list[Sample], sampling_params: dict, *, evaluation=False) -> list[Sample]: ...

and reaches the engine through `current_state()`, or by calling :func:`generate`, the stock one. `evaluation` may be
left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

from diffusion_rl.algorithms.step_strategies import Steps, check_strategy
from diffusion_rl.sample import GenerateRequest, Sample, SamplingParams, fill_samples, request_seed
from shared_runtime.engines.contract import EngineClient
from shared_runtime.hooks import HookSpec, takes_keyword
from shared_runtime.rollout.types import RolloutError
from shared_runtime.sample import Status

GENERATE_HOOK = HookSpec(("args", "microgroup", "sampling_params"), is_async=True)

StepStrategy = Callable[[Any, Any, int, int], Steps]
"""`(args, sample, num_steps, seed) -> (sde steps, latents to return)`."""
GenerateFunction = Callable[..., Awaitable[list[Sample]]]


@dataclass
class GenerateState:
    """What generating a microgroup needs besides its samples.

    Attributes:
        args: The run's flat arguments, for step strategies and generate functions.
        client: The engines.
        params: How to denoise.
        strategy: Which steps are stochastic; `None` makes all of them so.
        strategy_path: Its name, for messages.
        microgroup_size: Images a request.
        rollout_seed: Every draw derives from it and the sample's place in the run.
        weight_version: Version of the published weights, stamped on samples at dispatch.
        generate_function: `--custom-generate-function-path`, default :func:`generate`.
        evaluation: Whether these are evaluation sets.
    """

    args: Any
    client: EngineClient
    params: SamplingParams
    strategy: StepStrategy | None = None
    strategy_path: str = ""
    microgroup_size: int = 1
    rollout_seed: int = 0
    weight_version: int | None = None
    generate_function: GenerateFunction | None = None
    evaluation: bool = False


_STATE: ContextVar[GenerateState] = ContextVar("generate_state")


def current_state() -> GenerateState:
    """The state of the rollout that is running.

    Raises:
        RolloutError: Outside of a rollout.
    """
    try:
        return _STATE.get()
    except LookupError:
        raise RolloutError("there is no rollout running: generate functions get their engine from one") from None


def set_current_state(state: GenerateState) -> None:
    """Make `current_state` return this in the current task and in those it starts."""
    _STATE.set(state)


async def generate(
    args: Any, microgroup: list[Sample], sampling_params: dict[str, Any], *, evaluation: bool = False
) -> list[Sample]:
    """One request: the prompt of the first sample goes in, each sample gets an image of it and its trajectory.

    Args:
        args: The run's flat arguments.
        microgroup: Samples of one prompt, with consecutive `seed`s.
        sampling_params: Fields of `SamplingParams`, and `sde_steps` and `return_steps` as in `GenerateRequest`.
        evaluation: Whether these are evaluation sets.
    """
    first, params = microgroup[0], dict(sampling_params)
    sde_steps, return_steps = params.pop("sde_steps", None), params.pop("return_steps", None)
    assert first.seed is not None
    request = GenerateRequest(
        request_id=f"{first.group_index}.{first.index}",
        prompt=str(first.prompt),
        num_outputs=len(microgroup),
        seed=first.seed,
        params=SamplingParams(**params),
        sde_steps=None if sde_steps is None else tuple(sde_steps),
        return_steps=None if return_steps is None else tuple(return_steps),
        sample_ids=tuple(sample.index for sample in microgroup),
    )
    fill_samples(microgroup, request, await current_state().client.generate(request))
    for sample in microgroup:
        sample.status = Status.COMPLETED
    return microgroup


async def generate_microgroup(state: GenerateState, group: list[Sample], part: range) -> list[Sample]:
    """Draw the images of some members of a group.

    Seeds depend on the samples' places in the run alone, so neither the microgroup size nor a restart changes an
    image. All members of a group have the same stochastic steps.

    Args:
        state: What to work with.
        group: All samples of a prompt.
        part: Positions of those to draw.
    """
    base, params = request_seed(state.rollout_seed, group[0].group_index, len(group)), state.params
    steps: Steps = (None, None)
    if state.strategy is not None:
        chosen = state.strategy(state.args, group[0], params.num_steps, base)
        steps = check_strategy(chosen, params.num_steps, state.strategy_path)
    microgroup = [group[position] for position in part]
    for position, sample in zip(part, microgroup, strict=True):
        sample.seed = base + position
        sample.weight_version_dispatched = state.weight_version
    function = state.generate_function or generate
    told = {"evaluation": state.evaluation} if takes_keyword(function, "evaluation") else {}
    set_current_state(state)
    sampling_params = asdict(params) | {"sde_steps": steps[0], "return_steps": steps[1]}
    return await function(state.args, microgroup, sampling_params, **told)
