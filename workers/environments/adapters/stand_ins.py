"""Empty modules in place of packages that third-party code always imports but rarely needs.

Imported only in a sandbox. `pycosat`, which must be compiled, is for one family of reasoning-gym; `fastmcp` is for
OpenEnv environments that are MCP servers. Installed packages are not replaced.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

STAND_INS: dict[str, tuple[str, ...]] = {
    "pycosat": (),
    "fastmcp": ("Client", "FastMCP"),
    "fastmcp.client": (),
    "fastmcp.client.client": ("CallToolResult",),
    "mcp": (),
    "mcp.types": ("TextContent",),
}
"""Module name to the classes imported from it."""


def put() -> None:
    """Add them for missing packages."""
    missing = {name for name in STAND_INS if "." not in name and find_spec(name) is None}
    for name, classes in STAND_INS.items():
        if name.partition(".")[0] in missing:
            module = ModuleType(name)
            for each in classes:
                setattr(module, each, type(each, (), {}))
            sys.modules[name] = module


if "/opt/farm/" in __file__:
    put()
