"""Namespaces of the responses API: groups of functions, which the policy sees as functions with longer names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.policy.gateway.dialects import model_api
from workers.policy.gateway.dialects.model_api import AnsweredToolCall, BadRequest

_JOIN = "__"


def flat_name(namespace: str, name: str) -> str:
    """Return the policy's name for a function of a namespace; unchanged if it is in none."""
    return f"{namespace}{_JOIN}{name}" if namespace else name


class Namespaces:
    """The namespaces of the tools in one rollout's requests."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, str]] = {}

    def flattened(self, tools: object) -> list[Mapping[str, Any]]:
        """Return the tools with namespaces replaced by their functions, under longer names. Raises BadRequest."""
        result: list[Mapping[str, Any]] = []
        for number, tool in enumerate(model_api.mappings(tools or [], "tools")):
            where = f"tools[{number}]"
            if tool.get("type") != "namespace":
                if tool.get("type") == "function" and str(tool.get("name")) in self._places:
                    raise BadRequest(
                        f"a function of a namespace is also named {tool['name']!r}: rename one", f"{where}.name"
                    )
                result.append(tool)
                continue
            namespace = model_api.word(tool.get("name"), f"{where}.name")
            for place, inner in enumerate(model_api.mappings(tool.get("tools") or [], f"{where}.tools")):
                if inner.get("type") != "function":
                    result.append(inner)
                    continue
                name = model_api.word(inner.get("name"), f"{where}.tools[{place}].name")
                self._places[flat_name(namespace, name)] = (namespace, name)
                described = [
                    each for each in (tool.get("description"), inner.get("description")) if place == 0 and each
                ]
                more = {"description": "\n".join(map(str, described))} if described else {}
                result.append({**inner, **more, "name": flat_name(namespace, name)})
        return result

    def within(self, call: AnsweredToolCall) -> AnsweredToolCall:
        """Return a call of the policy with the client's name of the function."""
        if call.name not in self._places:
            return call
        namespace, name = self._places[call.name]
        return replace(call, name=name, namespace=namespace)
