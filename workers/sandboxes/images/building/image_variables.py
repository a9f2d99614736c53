"""The variables that an image sets for its programs, such as PATH: read from the runtime when the image is built."""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path

from workers.sandboxes.images.building.builder import environment, runtime_words

log = logging.getLogger(__name__)

_ASK_S = 60.0
_FILE = "variables.json"
_OPTIONS = (
    *("--containall", "--cleanenv", "--no-home", "--no-mount", "sys,tmp,home,cwd,bind-paths", "--no-init"),
    *("--net", "--network", "none"),
)
# without `env`, which an image may lack; only variables passed to bash, not those that bash adds
_PRINT = "while IFS= read -r -d '' each; do printf '%s\\0' \"$each\"; done </proc/self/environ"
_OF_THE_RUNTIME = ("APPTAINER_", "SINGULARITY_")
_OF_THE_SANDBOX = {"HOME", "PWD", "OLDPWD", "SHLVL", "TERM", "USER", "LOGNAME", "PS1", "PROMPT_COMMAND", "_"}
_LIBRARIES = "/.singularity.d/libs"


def write_variables(root: Path, place: Path, folder: Path) -> None:
    """Write the variables of an image in its work folder to `folder`; none if its scripts fail. Blocks."""
    command = [*runtime_words("exec", "-s"), *_OPTIONS, str(root), "bash", "--norc", "--noprofile", "-c", _PRINT]
    try:
        done = subprocess.run(
            command, env=environment(place), stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S
        )
        complaint = done.stderr.decode(errors="replace").strip()[-300:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        complaint = f"no answer within {_ASK_S:.0f} s"
    if complaint:
        log.warning("Image %s: environment variables are unknown: %s", root, complaint)
        return
    text = done.stdout.decode(errors="replace")
    pairs = dict(pair.partition("=")[::2] for pair in text.split("\0") if "=" in pair)
    (folder / _FILE).write_text(json.dumps(_own(pairs)))


def read_variables(folder: Path) -> dict[str, str]:
    """Return the variables that were written to a folder; empty if there are none."""
    try:
        return dict(json.loads((folder / _FILE).read_text()))
    except FileNotFoundError:
        return {}


def _own(pairs: dict[str, str]) -> dict[str, str]:
    """Return the image's variables, without those of the runtime and the caller."""
    own = {
        name: value
        for name, value in pairs.items()
        if not name.startswith(_OF_THE_RUNTIME) and name not in _OF_THE_SANDBOX
    }
    libraries = [path for path in own.pop("LD_LIBRARY_PATH", "").split(":") if path not in {"", _LIBRARIES}]
    if libraries:
        own["LD_LIBRARY_PATH"] = ":".join(libraries)
    if own.get("LANG") == "C":
        # the runtime sets it if the image does not
        del own["LANG"]
    return own
