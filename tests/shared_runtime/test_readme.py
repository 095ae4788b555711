"""The example in the package's README runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "shared_runtime" / "README.md"


def test_the_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *groups, metrics = result.stdout.splitlines()
    # Members 2n and 2n+1 of group n differ where one of them is a multiple of 3: n % 3 is 0 or 1.
    assert groups == [
        "Is 0 odd? [0.0, 1.0]",
        "Is 1 odd? [0.0, 1.0]",
        "Is 3 odd? [1.0, 0.0]",
        "Is 4 odd? [1.0, 0.0]",
    ]
    assert "'rollout/dynamic_filter/drop_zero_std_1': 1.0" in metrics
