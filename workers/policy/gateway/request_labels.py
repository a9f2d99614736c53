"""Labels of a call from its request's headers: the agent of a program, and that agent's conversation."""

from __future__ import annotations

from collections.abc import Mapping

_LABEL = "x-label-"
"""The prefix of header names that set labels, for programs written for the farm."""
_KNOWN = {
    "session_id": "session",
    "x-session-id": "session",
    "x-claude-code-session-id": "session",
    "conversation_id": "conversation",
    "x-openai-subagent": "subagent",
    "x-agent-id": "agent",
    "x-agent-name": "agent",
    "user-agent": "client",
}
_MAX_LABELS = 16
_MAX_CHARS = 200


def header_labels(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the labels in a request's headers."""
    result: dict[str, str] = {}
    for name, value in headers.items():
        label = _KNOWN.get(name) or (name.removeprefix(_LABEL) if name.startswith(_LABEL) else "")
        if label and value and len(result) < _MAX_LABELS:
            result[label[:64]] = value[:_MAX_CHARS]
    return result
