"""Checks the promises of the adapter of a trainer that takes results, given by its module name."""

from __future__ import annotations

import importlib
import json
import sys

from farm.adapters.conformance.result_promises import examine_results

if __name__ == "__main__":
    adapter = importlib.import_module(sys.argv[-1]).results
    print(json.dumps({each.promise: each.fault for each in examine_results(adapter)}))
