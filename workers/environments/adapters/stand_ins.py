"""Empty modules in place of packages that others import always and that are needed for little of what they do.

Imported in a sandbox alone. `pycosat`, compiled by its user, makes one family of reasoning-gym; `fastmcp` is for
environments of OpenEnv that are MCP servers. Where the real ones are installed, nothing is put in their place.
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
"""Name to the classes that are imported from it."""


def put() -> None:
    """Put them where a package is missing."""
    missing = {name for name in STAND_INS if "." not in name and find_spec(name) is None}
    for name, classes in STAND_INS.items():
        if name.partition(".")[0] in missing:
            module = ModuleType(name)
            for each in classes:
                setattr(module, each, type(each, (), {}))
            sys.modules[name] = module


if "/opt/farm/" in __file__:
    put()
