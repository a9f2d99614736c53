"""Helm's engine and the schemas of Kubernetes for the tests in this folder: `make test-helm`."""

from __future__ import annotations

import os
import sys

if not os.environ.get("FARM_HELM_PACKAGES"):
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.append(os.environ["FARM_HELM_PACKAGES"])
