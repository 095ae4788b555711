"""`diffusion-rl train …`: the command line of this package. Help and checks import no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from diffusion_rl.config import TrainConfig, resolve
from shared_runtime.cli import parse

USAGE = """usage: diffusion-rl train [OPTIONS]

RL post-training of diffusion models.

  train   run the training loop (diffusion-rl train --help lists every flag)
"""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `diffusion-rl` command."""
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        raise SystemExit(0 if words else 2)
    if words[0] != "train":
        print(f"error: unknown command {words[0]!r}; the only one is train\n\n{USAGE}", file=sys.stderr)
        raise SystemExit(2)
    train_from_command_line(TrainConfig(), words[1:], recipe="diffusion-rl", prog="diffusion-rl train")


def train_from_command_line(
    default: TrainConfig,
    args: Sequence[str] | None = None,
    *,
    recipe: str,
    prog: str | None = None,
    description: str = "Train a diffusion model with RL.",
    prepare: Callable[[], None] | None = None,
) -> None:
    """Read flags over `default`, check everything, train. Recipes end in this call.

    Args:
        default: The recipe's settings.
        args: Command-line words; `None` takes the process's own.
        recipe: Name of the run's directory when `--run-name` is not given.
        prog: Program name in help.
        description: First lines of the help.
        prepare: Makes the recipe's model and data where they are not there yet.
    """
    invocation = parse(default, args, prog=prog, description=description, check=resolve)
    from diffusion_rl.train import run_from_command_line  # imports torch

    run_from_command_line(invocation.config, recipe=recipe, dry_run=invocation.dry_run, prepare=prepare)
