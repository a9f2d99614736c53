"""Invalid input, wherever it comes in: one clear error that names the place, nothing half done, no crash."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import Connection, func, select, text

import farm
from examples.problems import math_problems
from farm.cli import display
from farm.client.local import LocalFarm
from farm.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable, UnknownHandler
from farm.notifications import Signals
from farm.records.request import MAX_INSTANCE_BYTES, BatchRequest
from farm.records.rollout import State
from farm.store import migrations
from farm.store.database import Store
from farm.store.rollouts import batches
from farm.store.sql.schema import InstanceRow, RolloutRow
from testkit.postgres import postgres_database
from tests.doubles import EngineDouble
from tests.services.farms import NOOP, embedded, farm_folder
from tests.services.preloaded import completed
from tests.services.unruly import installed_in
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving


def nested(n: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(n):
        value = {"a": value}
    return value


def self_reference() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["me"] = value
    return value


def fields(value: Any) -> dict[str, Any]:
    return {"instances": [NOOP, {"data_source": "noop", "fields": value}]}


def one(**values: Any) -> dict[str, Any]:
    return {"instances": [NOOP]} | values


def named(*values: dict[str, Any]) -> dict[str, Any]:
    return {"instances": [{"data_source": "noop", "instance_id": "same", "fields": each} for each in values]}


@cache
def refused_requests() -> dict[str, tuple[Any, str]]:
    """Return requests and their expected errors; some are huge."""
    return {
        "no mapping": ([1], "request: "),
        "nothing": (None, "request: "),
        "no instances": ({}, "instances: "),
        "an empty batch": ({"instances": []}, "instances: "),
        "a text for instances": ({"instances": "abc"}, "instances: "),
        "a number for an instance": ({"instances": [NOOP, 3]}, r"instances\[1\]: "),
        "too many instances": (
            {"instances": [NOOP] * 100_001},
            "instances: there are 100001; at most 100000 are allowed",
        ),
        "no fields": ({"instances": [{"data_source": "noop"}]}, r"instances\[0\]\.fields: "),
        "an unknown key": (one(foo=1), "foo: "),
        "a malformed instance": (fields({"seconds": -1}), r"instances\[1\]\.fields\.seconds: "),
        "an unknown field of an instance": (fields({"what": 1}), r"instances\[1\]\.fields\.what: "),
        "a field of 100 MB": (
            fields({"kind": "x" * 100_000_000}),
            rf"instances\[1\]\.fields: .*{MAX_INSTANCE_BYTES} bytes",
        ),
        "a NUL": (fields({"fail": "a\0b"}), r"instances\[1\]\.fields: fail has a NUL"),
        "a NUL in a key": (fields({"a\0": 1}), r"instances\[1\]\.fields: .*NUL"),
        "half a surrogate pair": (
            fields({"fail": ["\ud800"]}),
            r"instances\[1\]\.fields: fail\[0\] has an unpaired surrogate",
        ),
        "no number": (fields({"seconds": float("nan")}), r"instances\[1\]\.fields: seconds is nan"),
        "an infinite number": (fields({"seconds": float("inf")}), r"instances\[1\]\.fields: seconds is inf"),
        "a huge integer": (fields({"seconds": 2**64}), r"instances\[1\]\.fields: seconds is an integer beyond 64 bits"),
        "what nests deep": (fields(nested(100_000)), r"instances\[1\]\.fields: .*nested more than 64 deep"),
        "what nests in itself": (fields(self_reference()), r"instances\[1\]\.fields: .*nested more than 64 deep"),
        "bytes": (fields({"fail": b"x"}), r"instances\[1\]\.fields: fail is a bytes"),
        "a key that is no text": (fields({"a": {1: 2}}), r"instances\[1\]\.fields: a has the key 1"),
        "zero samples": (one(n_samples=0), "n_samples: "),
        "a negative limit": (one(limits={"max_turns": -1}), r"limits\.max_turns: "),
        "a limit that is no number": (one(limits={"run_s": float("nan")}), r"limits\.run_s: "),
        "a limit of the wrong type": (one(limits={"max_tokens": "many"}), r"limits\.max_tokens: "),
        "a huge limit": (one(limits={"max_turns": 2**70}), r"limits\.max_turns: "),
        "two problems of one name": (
            named({}, {}, {"seconds": 1}),
            r"instances: instances\[0\] and instances\[2\] .*'same'",
        ),
        "an id that is no text": ({"instances": [NOOP | {"instance_id": "\udfff"}]}, r"instances\[0\]\.instance_id: "),
        "an empty key": (one(idempotency_key=""), "idempotency_key: "),
        "a key with a NUL": (one(idempotency_key="\0"), "idempotency_key: "),
        "a long key": (one(idempotency_key="k" * 201), "idempotency_key: "),
        "metadata of other things": (one(metadata={"a": {1, 2}}), "metadata: a is a set"),
        "metadata that is a list": (one(metadata=[1]), "metadata: "),
        "metadata of 2 MB": (one(metadata={"a": "x" * 2_000_000}), "metadata: .*1000000 bytes"),
        "an unknown agent": (one(agent="nobody"), "agent: there is no agent 'nobody'"),
        "an unknown row builder": (one(row_builder="nobody"), "row_builder: there is no row_builder 'nobody'"),
        "an unknown sandbox": (one(sandbox="castle"), "sandbox: there is no sandbox 'castle'"),
    }


@pytest.fixture
def service(store: Store) -> LocalFarm:
    return LocalFarm(store, Signals(""), 1_000_000)


def n_rows(store: Store) -> list[int]:
    def count(connection: Connection) -> list[int]:
        tables = (batches, InstanceRow.__table__, RolloutRow.__table__)
        return [connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables]

    return store.read(count)


def test_invalid_request_is_refused_by_field_and_stores_nothing(service: LocalFarm) -> None:
    wrong = []
    for name, (request, message) in refused_requests().items():
        try:
            with pytest.raises(InvalidRequest, match=message) as refused:
                service.submit(request)
            assert "\n" not in str(refused.value)
            assert len(str(refused.value)) < 500
        except (AssertionError, pytest.fail.Exception) as error:
            wrong.append(f"{name}: {error}")
    assert wrong == []
    assert n_rows(service.store) == [0, 0, 0]


def test_unknown_handler_is_refused_and_the_installed_ones_are_named(service: LocalFarm) -> None:
    with pytest.raises(UnknownHandler, match=r"instances\[1\]\.data_source: no handler for 'chess'; .*noop"):
        service.submit({"instances": [NOOP, {"data_source": "chess", "fields": {}}]})
    assert n_rows(service.store) == [0, 0, 0]


def test_duplicate_instances_are_allowed(service: LocalFarm) -> None:
    assert len(service.rollouts(service.submit(named({"seconds": 1}, {"seconds": 1})))) == 2


@pytest.mark.parametrize(
    "id", ["", "b0", "x y", "b\0", "b.1.2.3", "b.-1", "b.1.x", "\ud800", "b" * 1000, "b0.99999999999"]
)
def test_unknown_id_is_not_found(service: LocalFarm, id: str) -> None:
    asks: list[Any] = [service.status, service.rollouts, service.rollout, service.calls, service.timings]
    asks += [service.rewards, service.cancel, service.rescore, service.conservation, service.violations]
    asks += [service.artefacts, lambda id: service.artefact(id, "x"), lambda id: list(service.stream(id))]
    for ask in asks:
        with pytest.raises(NotFound):
            ask(id)


def test_cancel_with_an_unknown_id_cancels_nothing(service: LocalFarm) -> None:
    batch_id = service.submit(one(n_samples=2))
    for wrong in (f"{batch_id}.1", f"{batch_id}.0.2"):
        with pytest.raises(NotFound, match=wrong):
            service.cancel(wrong)
    with pytest.raises(NotFound, match=r"b0\.0\.0"):
        service.cancel(batch_id, [f"{batch_id}.0.0", "b0.0.0"])
    assert service.status(batch_id).n_cancelled == 0
    assert service.cancel(batch_id, []) == []


def test_acknowledgement_of_an_unfinished_rollout_is_refused(service: LocalFarm) -> None:
    batch_id = service.submit(one())
    (rollout,) = service.rollouts(batch_id)
    with pytest.raises(InvalidRequest, match="has not ended"):
        service.acknowledge(rollout)
    for consumer in ("", "a b", "\0", "x" * 65):
        with pytest.raises(InvalidRequest, match="consumer"):
            service.acknowledged(batch_id, consumer)


def test_idempotency_key_ignores_settings_at_their_defaults(service: LocalFarm) -> None:
    batch_id = service.submit(one(idempotency_key="k"))
    written_out = BatchRequest.model_validate(one(idempotency_key="k")).model_dump()
    assert service.submit(written_out) == batch_id, "what is at its default may as well not be there"
    with pytest.raises(Conflict, match="'k'"):
        service.submit(one(idempotency_key="k", max_losses=3))


def test_database_of_another_revision_is_refused_with_a_remedy(store_url: str, tmp_path: Path) -> None:
    store = Store(store_url)
    migrations.migrate(store)
    older = "at schema revision none, this version needs .*farm migrate"
    newer = "at schema revision 9999, unknown to this version: .*newer"
    changes = {
        "none": ("DELETE FROM alembic_version", older),
        "9999": ("INSERT INTO alembic_version VALUES ('9999')", newer),
    }
    for revision, (change, message) in changes.items():
        store.write(lambda connection, change=change: connection.execute(text(change)))  # type: ignore[misc]
        with pytest.raises(StoreUnavailable, match=message):
            farm.connect(store_url)
        env = os.environ | {
            "FARM_STORE_URL": store_url,
            "FARM_BROKER_URL": "redis://127.0.0.1:1",
            "FARM_HOME": str(tmp_path),
        }
        node = completed("workers.node", [], env, 120)
        assert node.returncode != 0
        output = node.stdout + node.stderr
        assert f"at schema revision {revision}" in output
        assert "Traceback" not in output
    store.close()


UGLY = "\0 \x1b[31m \ufffd \U0001f600 \u2028"
BAD_CALLS = (
    ScriptedCall(name="bash", arguments='{"command": "echo a\\u0000b"}'),
    ScriptedCall(name="bash", arguments='{"command": "echo \\ud800"}'),
    ScriptedCall(name="bash", arguments="{" * 5000),
    ScriptedCall(name="bash", arguments='{"command": NaN}'),
    ScriptedCall(name="bash", arguments='{"command": 1e999}'),
    ScriptedCall(name="no\ufffdtool", arguments='{"\\ud800": "\\u0000"}'),
    ScriptedCall(name="edit", arguments='{"command": "create", "path": "/workspace/\\u0000", "file_text": "\\udfff"}'),
    ScriptedCall(name="python", arguments='{"code": "print(chr(0) + chr(0xd800) + chr(27))"}'),
    ScriptedCall(
        name="bash", arguments=json.dumps({"command": r"printf 'a\000b\377\355\240\200'; head -c 10000000 /dev/zero"})
    ),
    ScriptedCall(name="submit", arguments='{"answer": "\\u0000 \\ud800"}'),
)


def malformed_instances(calls: Sequence[ScriptedCall]) -> Iterator[tuple[dict[str, Any], ScriptedProblem]]:
    """Yield instances, each with one of the calls, in a sandbox with a shell or in one with a Python."""
    (math,) = math_problems(["gcd"], 1, seed=1)
    for n, call in enumerate(calls):
        question = f"Say something ugly, number {n}."
        turn = ScriptedTurn(content=UGLY, tool_calls=(call,))
        problem = ScriptedProblem(match=question, branches=(Branch(name="ugly", turns=(turn,)),))
        if call.name == "python":
            yield {"data_source": "math", "fields": math.fields | {"question": question}}, problem
        else:
            yield {"data_source": "working", "fields": {"question": question}}, problem


@pytest.fixture(scope="module")
def client(postgres_url: str, migrated_postgres: str) -> Iterator[farm.Farm]:
    """Yield a client of a farm whose policy produces malformed output."""
    problems = [problem for _, problem in malformed_instances(BAD_CALLS)]
    with (
        postgres_database(postgres_url, migrated_postgres) as url,
        farm_folder() as folder,
        serving(EngineDouble(Script(problems), context_tokens=10**8).app()) as policy,
        embedded(folder, url, False, FARM_POLICY_URL=f"{policy}/v1", **installed_in(folder)) as here,
        farm.connect(here.store_url, broker_url=here.broker_url) as connected,
    ):
        yield connected


def test_malformed_model_output_does_not_break_the_farm(client: farm.Farm) -> None:
    result = [instance for instance, _ in malformed_instances(BAD_CALLS)]
    batch_id = client.submit({"instances": result, "max_attempts": 1})
    rollouts = client.collect(batch_id, timeout_s=600)
    assert [each.failure for each in rollouts if each.state is not State.COMPLETED] == []
    assert client.violations(batch_id) == []
    for each in rollouts:
        calls = client.calls(each.rollout_id)
        assert calls
        shown = Console(file=io.StringIO(), width=100)
        shown.print(display.transcript(each, calls, client.timings(each.rollout_id), client.rewards(each.rollout_id)))
