"""Hashes of requests, for idempotency keys."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_CHARS = 32


def content_hash(value: Any) -> str:
    """Return 32 hexadecimal digits that are equal for equal JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_CHARS]
