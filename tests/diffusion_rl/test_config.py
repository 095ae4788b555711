"""The frozen list of the diffusion run's flags, and their help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from diffusion_rl.config import TrainConfig
from shared_runtime.cli import flag_names

FLAGS = Path(__file__).with_name("flags.txt")


def test_flags_do_not_change_by_accident() -> None:
    """After a deliberate change: `python tests/diffusion_rl/test_config.py` writes the list anew."""
    assert flag_names(TrainConfig) == FLAGS.read_text().split()


def test_flag_names_are_unique() -> None:
    names = flag_names(TrainConfig)
    assert len(names) == len(set(names))


def test_help_imports_no_torch() -> None:
    code = "import sys; from diffusion_rl.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--diffusion-num-steps" in result.stdout


if __name__ == "__main__":
    FLAGS.write_text("\n".join(flag_names(TrainConfig)) + "\n")
