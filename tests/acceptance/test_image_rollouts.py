"""A rollout of an agent program that shows its model images: from the sandbox to the training row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import farm
from farm.cli.main import main
from farm.client.farm import Farm
from farm.embedded.embedded_farm import Embedded
from farm.errors import InvalidRequest
from farm.records.rollout import Outcome, Rollout
from tests.acceptance.image_program import IMAGE, QUESTION, installed_in
from tests.doubles import EngineDouble
from tests.doubles.vllm.image_parts import PLACEHOLDER
from tests.integration.tasks.task_plugin import known_here
from tests.services.commands import output_of
from tests.services.farms import embedded, farm_folder
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

DIGEST = hashlib.sha256(IMAGE).hexdigest()
N_PLACES = 15
TURNS = (ScriptedTurn(content="It is red."), ScriptedTurn(content="It is red again."))
SCRIPT = Script([ScriptedProblem(match=QUESTION, branches=(Branch(name="red", turns=TURNS),))])
INSTANCE = {"data_source": "plain", "fields": {"commands": ["true"]}}


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[Embedded, Farm]]:
    with ExitStack() as stack:
        folder = stack.enter_context(farm_folder())
        python_path = installed_in(folder)["PYTHONPATH"]
        stack.enter_context(known_here(folder))
        url = stack.enter_context(serving(EngineDouble(SCRIPT, images=True).app()))
        started = stack.enter_context(embedded(folder, FARM_POLICY_URL=f"{url}/v1", PYTHONPATH=python_path))
        yield started, stack.enter_context(farm.connect(started.store_url, broker_url=started.broker_url))


def run_rollout(client: Farm, images: str, **more: Any) -> Rollout:
    request = {"instances": [INSTANCE], "agent": "image", "agent_requests": {"images": images}, **more}
    (rollout,) = client.collect(client.submit(request), timeout_s=300)
    return rollout


def test_repeated_image_is_stored_once_and_referenced_twice(here: tuple[Embedded, Farm]) -> None:
    _, client = here
    rollout = run_rollout(client, "engine")
    assert rollout.outcome is Outcome.ANSWERED, rollout.failure
    name = f"0-{DIGEST}.png"
    images = [each for each in client.artefacts(rollout.rollout_id) if each.media_type == "image/png"]
    assert [each.name for each in images] == [name]
    assert client.artefact(rollout.rollout_id, name) == IMAGE
    calls = client.calls(rollout.rollout_id)
    assert [call.images for call in calls] == [(DIGEST,), (DIGEST, DIGEST)]
    assert not any("base64" in json.dumps(call.messages) for call in calls)
    reference = {"type": "image", "sha256": DIGEST, "media_type": "image/png", "n_bytes": len(IMAGE)}
    assert [call.messages[-1]["content"][place] for call, place in zip(calls, (1, 0), strict=True)] == [reference] * 2
    # the answers are read back as they were sampled, so everything is one row
    (row,) = rollout.segments
    assert row.images == (DIGEST, DIGEST)
    placeholder = EngineDouble().machine.vocabulary.id_of(PLACEHOLDER)
    assert int((row.prompt_ids == placeholder).sum()) == N_PLACES
    between = row.response_ids == placeholder
    assert int(between.sum()) == N_PLACES
    assert not row.response_mask[between].any()
    assert int(row.response_mask.sum()) == rollout.n_response_tokens
    assert row.trainable


def test_rows_exports_and_commands_name_the_images(here: tuple[Embedded, Farm], tmp_path: Path) -> None:
    started, client = here
    rollout = run_rollout(client, "engine")
    arrays = client.rows(rollout.batch_id, "arrays")
    assert arrays.images.tolist() == [[DIGEST, DIGEST]]
    with pytest.raises(InvalidRequest, match="2 images, but this trainer's rows have no field"):
        client.rows(rollout.batch_id, "trl")
    file = tmp_path / "rollouts.jsonl"
    output_of(main, "export", rollout.batch_id, str(file), "--url", started.store_url)
    exported = json.loads(file.read_text(encoding="utf-8"))
    assert [row["images"] for row in exported["segments"]] == [[DIGEST, DIGEST]]
    assert "[image]" in output_of(main, "show", rollout.rollout_id, "--url", started.store_url)


def test_text_only_model_fails_the_rollout_once_with_a_remedy(here: tuple[Embedded, Farm]) -> None:
    _, client = here
    with serving(EngineDouble(SCRIPT).app()) as url:
        rollout = run_rollout(client, "engine", engine_url=f"{url}/v1", max_attempts=3)
        assert rollout.outcome is Outcome.ENGINE_ERROR
        assert rollout.attempt == 1
        assert rollout.failure is not None
        for words in (url, "is not a multimodal model", "set agent_requests.images to `text`"):
            assert words in rollout.failure.message
        rollout = run_rollout(client, "text", engine_url=f"{url}/v1")
        assert rollout.outcome is Outcome.ANSWERED, rollout.failure
        assert [row.images for row in rollout.segments] == [()]
