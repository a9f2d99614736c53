"""Ray for the tests in this folder: `make test-ray`. Without FARM_RAY_PACKAGES none of them is collected."""

from __future__ import annotations

import os
import sys

if not os.environ.get("FARM_RAY_PACKAGES"):
    collect_ignore_glob = ["test_*.py"]
else:
    # after the packages of the farm, some of which Ray has, too
    sys.path.append(os.environ["FARM_RAY_PACKAGES"])
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
