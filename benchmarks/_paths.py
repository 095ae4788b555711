"""Imported first by benchmarks: takes their folder off the search path, here and in Ray's workers.

`rewards.py` beside this file would be found in place of the package.
"""

import sys
from pathlib import Path

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
