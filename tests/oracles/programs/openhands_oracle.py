"""Results of OpenHands' stuck detector, run in its own environment: `openhands_oracle.py QUESTION < CASES`.

`repetitions`: the number of the turn after which an agent is stuck for the first time; 0 if it never is. The module is
imported without the packages around it, which would import code that serves models.
"""

from __future__ import annotations

import json
import logging
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

spec = find_spec("openhands")
assert spec is not None
assert spec.submodule_search_locations is not None
root = Path(spec.submodule_search_locations[0])


def stand_in(name: str, folder: str | None = None, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    if folder is not None:
        module.__path__ = [str(root / folder)]
    sys.modules[name] = module


stand_in("litellm", ModelResponse=object)
stand_in("openhands.llm", "llm")
stand_in("openhands.events", "events")
stand_in("openhands.controller", "controller")
stand_in("openhands.controller.state", "controller/state")
stand_in("openhands.controller.state.state", State=object)
stand_in("openhands.core.logger", openhands_logger=logging.getLogger("openhands"))

from openhands.events import event as events  # noqa: E402

for member in ("Event", "EventSource", "RecallType"):
    setattr(sys.modules["openhands.events"], member, getattr(events, member))

from openhands.controller.stuck import StuckDetector  # noqa: E402
from openhands.events.action import CmdRunAction, MessageAction  # noqa: E402
from openhands.events.action.mcp import MCPAction  # noqa: E402
from openhands.events.observation import CmdOutputObservation, ErrorObservation  # noqa: E402
from openhands.events.observation.mcp import MCPObservation  # noqa: E402


def events_of(turn: dict[str, Any]) -> list[Any]:
    if "said" in turn:
        said, heard = MessageAction(content=turn["said"]), MessageAction(content=turn["heard"])
        said._source, heard._source = events.EventSource.AGENT, events.EventSource.USER
        return [said, heard]
    made: list[Any] = []
    for call in turn["calls"]:
        thought = turn.get("thought", "")
        if "command" in call:
            action: Any = CmdRunAction(command=call["command"], thought=thought)
            # the process id differs each time
            result: Any = CmdOutputObservation(content=call["result"], command=call["command"])
            result.metadata.exit_code, result.metadata.pid = call["code"], len(made)
        else:
            action = MCPAction(name=call["name"], arguments=call["arguments"], thought=thought)
            result = MCPObservation(content=call["result"], name=call["name"], arguments=call["arguments"])
        if call.get("failed"):
            result = ErrorObservation(content=call["result"])
        action._source, result._source = events.EventSource.AGENT, events.EventSource.ENVIRONMENT
        made += [action, result]
    return made


def repetitions(case: list[dict[str, Any]]) -> int:
    history: list[Any] = []
    detector = StuckDetector(SimpleNamespace(history=history))
    for number, turn in enumerate(case, start=1):
        history += events_of(turn)
        if detector.is_stuck(headless_mode=True):
            return number
    return 0


QUESTIONS = {"repetitions": repetitions}


def main() -> None:
    logging.getLogger("openhands").setLevel(logging.CRITICAL)
    answer = QUESTIONS[sys.argv[1]]
    cases = json.load(sys.stdin)["cases"]
    json.dump({name: {"value": answer(case)} for name, case in cases.items()}, sys.stdout)


if __name__ == "__main__":
    main()
