"""What benchmarks share. Importing it takes their folder off the search path, here and in Ray's workers.

`benchmarks/rewards.py` would be found in place of the package otherwise.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER]
