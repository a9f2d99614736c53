"""A base image for tasks in tests, made from programs of this machine: bash, the usual tools, Python and pytest.

Its `apt-get` and `pip` succeed and do nothing, as the packages that tasks install are already there.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from importlib.metadata import files
from pathlib import Path

from tests.services.images import PROGRAMS, root_folder

_TOOLS = (
    *PROGRAMS,
    *("chmod", "cp", "cut", "date", "dirname", "env", "find", "head", "id", "ln", "mkfifo", "mv", "nohup", "ps"),
    *(
        "cmp",
        "readlink",
        "rmdir",
        "seq",
        "sha256sum",
        "sort",
        "stat",
        "tac",
        "tail",
        "tee",
        "tr",
        "wc",
        "whoami",
        "git",
        "gzip",
        "tar",
    ),
)
_NOTHING = "#!/bin/bash\nexit 0\n"
_PASSWD = "root:x:0:0:root:/root:/bin/bash\nagent:x:1500:1500::/home/agent:/bin/bash\n"
_LIBRARY = f"python{sys.version_info.major}.{sys.version_info.minor}"
_LEFT_OUT = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "__pycache__",
    "idlelib",
    "ensurepip",
    "config-*",
    "tkinter",
)


def task_base(folder: Path) -> Path:
    """Fill a folder with a root file system in which sample tasks can run and be scored."""
    root = root_folder(folder, [each for each in _TOOLS if shutil.which(each)])
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, root / "usr/lib" / _LIBRARY, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    shutil.copy(Path(sys.base_prefix) / "bin" / _LIBRARY, root / "usr/bin" / _LIBRARY)
    (root / "usr/bin/python3").symlink_to(_LIBRARY)
    for shared in Path(sys.base_prefix, "lib").glob("libpython3.*.so*"):
        shutil.copy(shared, root / "usr/lib" / shared.name)
    of_debian = "deb_system" in sysconfig.get_scheme_names()
    packages = root / "usr/lib" / ("python3/dist-packages" if of_debian else f"{_LIBRARY}/site-packages")
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        _copy_package(name, packages)
    for name in ("apt-get", "pip", "useradd"):
        _write(root / "usr/bin" / name, _NOTHING, 0o755)
    _write(root / "etc/passwd", _PASSWD)
    _write(root / "etc/group", "root:x:0:\nagent:x:1500:\n")
    for name in ("root", "home/agent", "var/lib/apt/lists"):
        (root / name).mkdir(parents=True)
    return root


def _copy_package(name: str, target: Path) -> None:
    for file in files(name) or ():
        place = Path(str(file))
        if ".." not in place.parts and "__pycache__" not in place.parts:
            (target / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(str(file.locate())), target / place)


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.write_text(text)
    path.chmod(mode)
