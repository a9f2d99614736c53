"""The env server of verifiers recognizes each client's wire by its frames: recorded ones, without that package.

`tests/data/verifiers_frames.json` has the frames of the clients of verifiers, in hexadecimal; `make test-trainers`
compares it with the clients themselves.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from farm.adapters.verifiers.client_wires import ClientWire, ClientWires, plain_request, reply

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "verifiers_frames.json").read_text())
CLIENT, OTHER = b"\x00one", b"\x00two"
EPISODE = {
    "id": "e",
    "ok": False,
    "traces": [
        {
            "id": "t",
            "version": 1,
            "task": {"type": "FarmTask"},
            "nodes": [{"parent": None}, {"parent": 0}],
            "calls": [{"node": 1}],
            "errors": [{"type": "SandboxError"}],
            "stop_condition": "sandbox_error",
        }
    ],
}


def frames_of(wire: ClientWire) -> list[tuple[bytes, Any]]:
    """Return the methods and payloads that a client sent."""
    return [(method, unpacked(payload)) for _, method, payload in (map(bytes.fromhex, each) for each in RECORDED[wire])]


def unpacked(packed: bytes) -> Any:
    """Return the value of these bytes of msgpack, with the types of the recording."""
    value, rest = _value(packed)
    assert rest == b""
    return value


def _value(packed: bytes) -> tuple[Any, bytes]:
    first, rest = packed[0], packed[1:]
    constants = {0xC0: None, 0xC2: False, 0xC3: True}
    if first in constants:
        return constants[first], rest
    if first <= 0x7F:
        return first, rest
    if numbers := {0xCB: ">d", 0xCD: ">H", 0xCE: ">I"}.get(first):
        size = struct.calcsize(numbers)
        return struct.unpack(numbers, rest[:size])[0], rest[size:]
    if first == 0xD9 or 0xA0 <= first <= 0xBF:
        size, rest = (rest[0], rest[1:]) if first == 0xD9 else (first & 0x1F, rest)
        return rest[:size].decode(), rest[size:]
    items: list[Any] = []
    if 0x90 <= first <= 0x9F:
        for _ in range(first & 0x0F):
            item, rest = _value(rest)
            items.append(item)
        return items, rest
    assert first == 0xDE or 0x80 <= first <= 0x8F, f"a type that was not recorded: {first:x}"
    size, rest = (int.from_bytes(rest[:2], "big"), rest[2:]) if first == 0xDE else (first & 0x0F, rest)
    for _ in range(2 * size):
        item, rest = _value(rest)
        items.append(item)
    return dict(zip(items[::2], items[1::2], strict=True)), rest


@pytest.mark.parametrize("wire", ClientWire)
def test_run_determines_the_wire_of_its_client(wire: ClientWire) -> None:
    health, run, cancel, evaluation, _ = frames_of(wire)
    assert health == (b"health", {}), "health is the same on both wires"
    assert cancel[0] == b"cancel"
    for method, payload in (run, evaluation):
        wires = ClientWires()
        assert (method, wires.of_run(CLIENT, payload)) == (b"run", wire)
        # a later probe, a cancel, and errors are answered in it
        assert [wires.of_probe(CLIENT, at) for at in (0, 10, 20, 30)] == [wire] * 4
        assert wires.of(CLIENT) is wire
        assert wires.of(OTHER) is ClientWire.WHOLE, "three frames end the reading of one of a60a606"


def test_each_run_is_answered_in_its_own_wire() -> None:
    wires = ClientWires()
    payloads = {wire: frames_of(wire)[1][1] for wire in ClientWire}
    for wire in (*ClientWire, *ClientWire):
        assert wires.of_run(CLIENT, payloads[wire]) is wire
    assert wires.of_run(CLIENT, {"client": 3}) is wires.of_run(CLIENT, None) is ClientWire.STREAMED
    assert wires.of_run(OTHER, {}) is ClientWire.WHOLE


def test_client_that_ignores_two_frames_is_sent_three() -> None:
    wires = ClientWires()
    # frames sent before the server existed arrive at once, and are no sign
    waiting = [wires.of_probe(CLIENT, 100 + 0.01 * number) for number in range(30)]
    assert waiting == [ClientWire.WHOLE] * 30
    assert wires.of_probe(CLIENT, 101.5) is ClientWire.WHOLE, "a client of a60a606 understands this one"
    assert wires.of_probe(CLIENT, 103.5) is ClientWire.STREAMED
    assert wires.of_probe(OTHER, 103.5) is ClientWire.WHOLE
    assert wires.of_run(CLIENT, frames_of(ClientWire.WHOLE)[1][1]) is ClientWire.WHOLE, "a run is more certain"


def test_number_of_remembered_clients_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.adapters.verifiers.client_wires._N_CLIENTS", 2)
    wires = ClientWires()
    run = frames_of(ClientWire.STREAMED)[1][1]
    for client in (CLIENT, OTHER, b"\x00three"):
        wires.of_run(client, run)
    assert [wires.of(client) for client in (CLIENT, OTHER)] == [ClientWire.WHOLE, ClientWire.STREAMED]


def test_both_wires_give_the_same_request() -> None:
    plain = [plain_request(frames_of(wire)[1][1]) for wire in ClientWire]
    wanted = {"temperature": 0.9, "max_tokens": 64, "top_k": 20, "cache_salt": "7"}
    assert [each["sampling"] for each in plain] == [wanted] * 2
    assert plain[0]["client"] == plain[1]["client"]
    assert (plain[0]["client"]["type"], plain[0]["client"]["renderer_model_name"]) == ("train", "m")
    assert plain[0]["task_data"]["fields"] == {"question": "How many hops?", "expected": None}
    assert plain_request({"client": 3, "sampling": None}) == {"client": 3, "sampling": None}


def test_headers_from_variables_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM", "blue")
    client = {"headers": {"X-One": "1"}, "headers_from_env": {"X-Team": "TEAM", "X-None": "NOT_SET"}, "timeout": {}}
    assert plain_request({"client": client}) == {"client": {"headers": {"X-One": "1", "X-Team": "blue"}}}


def test_episode_is_whole_or_streamed() -> None:
    [(kind, whole)] = ClientWire.WHOLE.messages(EPISODE)
    assert (kind, whole["success"], whole["error"], whole["episode"]["id"]) == ("reply", True, None, "e")
    assert ClientWire.WHOLE.frames(kind, b"...") == [b"..."]
    # a60a606 says of each broken trace that it ended by an error
    [trace] = whole["episode"]["traces"]
    assert trace == EPISODE["traces"][0] | {"stop_condition": "error"}  # type: ignore[index]
    (kind, delta), (last, rest) = ClientWire.STREAMED.messages(EPISODE)
    assert ClientWire.STREAMED.frames(kind, b"...") == [b"delta", b"..."]
    assert (last, rest["head"]) == ("reply", {"id": "e", "ok": False})
    assert rest["traces"] == [{"id": "t", "nodes": 2, "calls": 1}]
    assert delta["trace"] == "t"
    assert delta["open"] == {"version": 1, "id": "t", "task": {"type": "FarmTask"}}
    assert delta["set"] == {"stop_condition": "sandbox_error"}
    assert (len(delta["nodes"]), len(delta["calls"]), len(delta["errors"])) == (2, 1, 1)


def test_failure_reply_has_its_reason() -> None:
    assert reply("it is not so") == {"success": False, "error": "it is not so"}
    assert reply() == {"success": True, "error": None}
