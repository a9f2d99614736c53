from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import absent

ASKING = """
import subprocess, sys
from workers.sandboxes.isolation.linux import mounted_below
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", f"{sys.argv[1]}/one two\\\\three/point"], check=True)
print(mounted_below([f"{sys.argv[1]}/one two\\\\three", f"{sys.argv[1]}/one", f"{sys.argv[1]}/other"]))
"""


def test_mount_in_a_folder_with_any_name_is_found(tmp_path: Path) -> None:
    for name in ("one two\\three/point", "one", "other"):
        (tmp_path / name).mkdir(parents=True)
    argv = ["unshare", "-rm", sys.executable, "-c", ASKING, str(tmp_path)]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    if "unshare" in ran.stderr:
        absent(f"no user namespaces: {ran.stderr}")
    assert ran.stdout == "[True, False, False]\n", ran.stderr
