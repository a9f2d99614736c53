"""Arrays as tensors of a real torch, which is installed with vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

CODE = """
import json
from farm.adapters.arrays import arrays
from tests.unit.farm.adapters.ended_rollout import rollout
given = arrays([rollout(0, 0, 2), rollout(1, 0, 3)])
tensors = given.as_torch()
print(json.dumps({
    "same": all(getattr(tensors[name], "tolist", lambda: tensors[name])() == getattr(values, "tolist", lambda: values)()
                for name, values in given.as_dict().items()),
    "names": tensors["rollout_ids"],
    "kinds": sorted({str(value.dtype) for value in tensors.values() if hasattr(value, "dtype")}),
    "shape": list(tensors["response_ids"].shape),
}))
"""


def test_arrays_become_tensors_with_the_same_values(vllm_python: Path) -> None:
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([vllm_python, "-c", CODE], env=env, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "same": True,
        "names": ["b.0.0", "b.1.0"],
        "kinds": ["torch.bool", "torch.float32", "torch.float64", "torch.int32", "torch.uint8"],
        "shape": [2, 3],
    }
