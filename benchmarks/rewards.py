"""What the rewards cost: graders a second on one core, `math` against math-verify alone, OCR with one worker and two.

    uv run benchmarks/rewards.py [--runs 5] [--no-ocr]

`math` and math-verify grade the same pairs in alternating runs; the ratio is the median of seconds of math-verify over
seconds of `math`, so above 1 is faster. No pair comes twice: no cache helps either side.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import _common  # noqa: F401

from rewards import RewardRequest, score

GOAL = 1.0
METADATA = {"choices": ["red", "green", "blue", "grey"], "pattern": r"<think>.*</think>\s*<answer>.*</answer>"}
IFEVAL = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def pairs(seed: int, count: int) -> list[tuple[str, str]]:
    """(answer, label) pairs as training on competition problems meets them, right and wrong; no two alike."""
    draw = random.Random(seed).randrange
    made: list[tuple[str, str]] = []
    for index in range(count):
        a, b, c = draw(2, 10_000), draw(2, 99), draw(2, 99)
        kinds = [
            (str(a), str(a)),
            (str(a), str(a + 1)),
            (str(-a), str(a)),
            (f"{a:,}000", f"{a}000"),
            (rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}"),
            (rf"\dfrac{{{2 * a}}}{{{2 * b}}}", rf"\frac{{{a}}}{{{b}}}"),
            (f"{a / 8}", rf"\frac{{{a}}}{{8}}"),
            (rf"{a}^\circ", str(a)),
            (rf"({a}, {b})", rf"\left({a},{b}\right)"),
            (rf"\{{{a},{b}\}}", rf"\{{{b},{a}\}}"),
            (rf"{a}\text{{ cm}}", str(a)),
            (f"x = {a}", str(a)),
            (rf"{b}\sqrt{{{a}}}", rf"\sqrt{{{a * b * b}}}"),
            (rf"\frac{{{a}\pi}}{{{b}}}", rf"{a}\pi/{b}"),
            (f"(x+{b})(x+{c})", f"x^2+{b + c}x+{b * c}"),
            (rf"{a}\sqrt{{2}}+{b}", rf"{a}\sqrt{{3}}+{b}"),
        ]
        made.append(kinds[index % len(kinds)])
    return made


def grade_with_math(batch: list[tuple[str, str]]) -> list[bool]:
    """The package's `math`."""
    requests = [RewardRequest(rf"So the answer is $\boxed{{{answer}}}$.", label) for answer, label in batch]
    return [value == 1.0 for value in score(requests, "math")]


def grade_with_math_verify(batch: list[tuple[str, str]]) -> list[bool]:
    """math-verify alone, as its documentation calls it."""
    from math_verify import parse, verify

    return [
        bool(verify(parse(f"${label}$"), parse(rf"So the answer is $\boxed{{{answer}}}$."))) for answer, label in batch
    ]


def compare(runs: int, count: int) -> tuple[list[float], dict[str, float]]:
    """The ratio of each of the alternating runs, and pairs a second of both."""
    for grade in (grade_with_math, grade_with_math_verify):
        grade(pairs(0, 64))  # imports, the helper process, the grammar's first steps
    seconds: dict[str, list[float]] = {"math": [], "math-verify": []}
    agreed = 0
    for run in range(1, runs + 1):
        batch = pairs(run, count)
        start = time.perf_counter()
        ours = grade_with_math(batch)
        middle = time.perf_counter()
        theirs = grade_with_math_verify(batch)
        seconds["math"].append(middle - start)
        seconds["math-verify"].append(time.perf_counter() - middle)
        agreed += sum(a == b for a, b in zip(ours, theirs, strict=True))
    ratios = [theirs / ours for ours, theirs in zip(seconds["math"], seconds["math-verify"], strict=True)]
    print(f"math and math-verify agree on {agreed} of {runs * count} pairs")
    return ratios, {name: count / statistics.median(values) for name, values in seconds.items()}


def grader_rates() -> dict[str, float]:
    """Samples a second of every grader that needs no service and no weights, on the core this process is pinned to."""
    prose = "We add the numbers, then divide. " * 30
    program = "```python\ndef add(a, b):\n    return a + b\n```"
    image = image_with("Miles", 256)
    cases: dict[str, tuple[RewardRequest, int]] = {
        "math": (RewardRequest(prose + r"\boxed{131}", "132"), 5000),
        "dapo": (RewardRequest(prose + "\nAnswer: 131", "132"), 5000),
        "deepscaler": (RewardRequest(prose + r"</think>\boxed{131}", "132"), 5000),
        "gemma_math": (RewardRequest(prose + r"<channel|>\boxed{131}", "132"), 5000),
        "f1": (RewardRequest(prose, "numbers that we divide"), 2000),
        "gpqa": (RewardRequest(prose + "The answer is B.", "B", metadata=METADATA), 2000),
        "format": (RewardRequest(f"<think>{prose}</think><answer>1</answer>", metadata=METADATA), 2000),
        "random": (RewardRequest(), 5000),
        "deterministic_random": (RewardRequest(prose, tokens=list(range(500))), 2000),
        "ifbench": (RewardRequest(prose, metadata=IFEVAL), 2000),
        "code": (RewardRequest(program, "assert add(1, 2) == 3"), 20),
        "jpeg_compressibility": (RewardRequest(image=image), 50),
        "ocr": (RewardRequest(prompt='"Miles"', image=image), 10),
    }
    rates = {}
    for name, (request, count) in cases.items():
        try:
            score([request], name)
        except ImportError as error:
            print(f"{name}: left out, {error}")
            continue
        start = time.perf_counter()
        score([request] * count, name)
        rates[name] = count / (time.perf_counter() - start)
    return rates


def image_with(text: str, size: int) -> Any:
    """Black text on white, (size, size, 3), uint8."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(image).text((20, size // 3), text, fill="black", font=ImageFont.load_default(size=size // 5))
    return np.asarray(image)


def ocr_rates(count: int = 48) -> dict[str, float]:
    """Images a second of the OCR pool with one worker and with two."""
    import ray
    from ray._private import ray_constants

    from rewards.pool import RewardPool

    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False  # the workers use this interpreter
    ray.init(include_dashboard=False, num_cpus=2, log_to_driver=False, logging_level=logging.ERROR)
    requests = [RewardRequest(prompt=f'"w{i}"', image=image_with(f"w{i}", 256)) for i in range(count)]
    rates = {}
    for workers in (1, 2):
        pool = RewardPool("ocr", num_workers=workers, batch_size=4)
        pool.score(requests[: 4 * workers])  # starts the workers, loads the engine
        start = time.perf_counter()
        pool.score(requests)
        rates[f"ocr, {workers} worker{'s' * (workers > 1)}"] = count / (time.perf_counter() - start)
        pool.shutdown()
    ray.shutdown()
    return rates


def on_one_core(work: Callable[[], Any]) -> Any:
    """Run with this process, and the ones it starts, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        return work()
    finally:
        os.sched_setaffinity(0, cores)


def table(title: str, rates: dict[str, float]) -> None:
    """Print rates with the time for one."""
    print(f"\n{title:32}{'per second':>14}{'each':>14}")
    for name, rate in rates.items():
        print(f"{name:32}{rate:14,.0f}{1e6 / rate:11,.0f} us")


def main() -> None:
    """Run all of it; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="alternating runs of math and math-verify")
    parser.add_argument("--pairs", type=int, default=320, help="pairs a run")
    parser.add_argument("--no-ocr", action="store_true", help="leave out the OCR pool")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    ratios, rates = on_one_core(lambda: compare(options.runs, options.pairs))
    table("the same pairs, one core", rates)
    table("samples, one core", on_one_core(grader_rates))
    if not options.no_ocr:
        table("images", ocr_rates())
    print()
    runs = [round(ratio, 2) for ratio in ratios]
    print(json.dumps({"benchmark": "rewards", "ratio": statistics.median(runs), "goal": GOAL, "runs": runs}))


if __name__ == "__main__":
    main()
