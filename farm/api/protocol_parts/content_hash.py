"""Hashes of what is asked for, of which idempotency keys are made."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_CHARS = 32


def content_hash(value: Any) -> str:
    """Return 32 hexadecimal digits that are the same for the same JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_CHARS]
