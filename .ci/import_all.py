"""Import every module of an installed package: `python -I import_all.py PACKAGE`.

A module that needs an extra may refuse, but only with an error that names the extra.
"""

import importlib
import pkgutil
import re
import sys

package = importlib.import_module(sys.argv[1])
imported, refused, failed = [package.__name__], [], []
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    if module.name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(module.name)
        imported.append(module.name)
    except ImportError as error:
        names_extra = re.search(r"\w\[[a-z0-9,-]+\]", str(error))
        (refused if names_extra else failed).append(f"{module.name}: {error}")
print(f"{package.__name__}: {len(imported)} modules imported from {package.__path__[0]}")
for line in refused:
    print(f"  needs an extra: {line}")
for line in failed:
    print(f"  FAILED: {line}")
sys.exit(bool(failed))
