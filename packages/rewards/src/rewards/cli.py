"""The command line: `rewards serve` and `rewards score`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from rewards.offline import Keys, score_file
from rewards.registry import get_spec
from rewards.request import RewardError
from rewards.scoring import prepare


@dataclass(frozen=True)
class Serve:
    """Serve one reward over HTTP: POST /score, POST /score_batch, GET /health, schema at /openapi.json."""

    rm_type: str
    """The reward, e.g. math or ocr."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for other machines."""
    port: int = 8000
    """Port to listen at."""
    rm_url: str | None = None
    """The service behind remote_rm."""
    options: str | None = None
    """Options of rewards: JSON such as '{"ocr": {"num_frames": 4}}', or a YAML or JSON file."""
    max_concurrency: int = 8
    """Requests scored at once."""
    max_waiting: int = 1024
    """Requests that may wait; more are refused with 503."""
    max_body_mb: float = 64.0
    """Largest request body in MB."""

    def run(self) -> None:
        """Build the scorer, then serve until stopped."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port {self.port} is no port: 0 to 65535")
        options = read_options(self.options, self.rm_url)
        from rewards.server import create_app, listen  # the serve extra

        app = create_app(
            self.rm_type,
            options,
            max_concurrency=self.max_concurrency,
            max_waiting=self.max_waiting,
            max_body_mb=self.max_body_mb,
        )
        listen(app, self.host, self.port)


@dataclass(frozen=True)
class ScoreFile:
    """Score a JSONL file; a run that was stopped goes on where it was."""

    input: Path
    """JSONL with one sample a line."""
    output: Path
    """JSONL: the rows of the input, each with its score."""
    rm_type: str | None = None
    """The reward; a row's metadata.rm_type goes before it."""
    rm_url: str | None = None
    """The service behind remote_rm."""
    options: str | None = None
    """Options of rewards: JSON such as '{"ocr": {"num_frames": 4}}', or a YAML or JSON file."""
    batch_size: int = 64
    """Rows scored together and written at once."""
    keys: Annotated[Keys, tyro.conf.arg(name="key")] = field(default_factory=Keys)
    """Names of the columns."""

    def run(self) -> None:
        """Score what is left of the file, and print the mean."""
        options = read_options(self.options, self.rm_url)
        if self.rm_type is not None:
            prepare(self.rm_type, options=options)
        summary = score_file(
            self.input,
            self.output,
            self.rm_type,
            options=options,
            keys=self.keys,
            batch_size=self.batch_size,
            show_progress=True,
        )
        mean = "no number scores" if summary.mean is None else f"mean score {summary.mean:.4f}"
        print(f"{summary.scored} scored, {summary.resumed} kept from before, {mean}: {self.output}")


def read_options(options: str | None, rm_url: str | None) -> dict[str, dict[str, Any]]:
    """Options of rewards from JSON, or from a YAML or JSON file; `--rm-url` is the url of `remote_rm`.

    Raises:
        ValueError: They are no mapping of mappings, or of a reward that is unknown.
    """
    parsed: Any = {}
    if options:
        import yaml

        inline = options.lstrip().startswith("{")
        try:
            parsed = json.loads(options) if inline else yaml.safe_load(Path(options).read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"--options {options!r:.200} cannot be read: {error}") from error
    if not isinstance(parsed, dict) or not all(isinstance(entry, dict) for entry in parsed.values()):
        raise ValueError(f'--options {options!r:.200} is to be like {{"ocr": {{"num_frames": 4}}}}')
    for name in parsed:
        get_spec(name)
    if rm_url is not None:
        parsed["remote_rm"] = {"url": rm_url, **parsed.get("remote_rm", {})}
    return parsed


def main(arguments: list[str] | None = None) -> None:
    """Run a subcommand; an error of the user's is one line and exit status 1."""
    commands = Annotated[Serve, tyro.conf.subcommand("serve")] | Annotated[ScoreFile, tyro.conf.subcommand("score")]
    command: Any = tyro.cli(commands, prog="rewards", args=arguments)  # type: ignore[call-overload]
    try:
        command.run()
    except (RewardError, ValueError, OSError) as error:
        print(f"rewards: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
