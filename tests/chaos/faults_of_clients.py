"""Faults by clients while the farm runs: cancel, score again, push new weights."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from functools import partial

from sqlalchemy import select

import farm
from farm.records.engine import PauseMode
from farm.records.rollout import State
from farm.store.rollouts import rollouts
from tests.chaos.strikes import NotNow, Scene, Strike, kind

_MODES: tuple[PauseMode, ...] = ("drain", "keep", "abort")
_PAUSE_S = 30.0
_LIVE = (State.QUEUED.value, State.ACTIVE.value)


def _ids(scene: Scene, states: Collection[str]) -> list[str]:
    statement = select(rollouts.c.rollout_id).where(rollouts.c.state.in_(states)).order_by(rollouts.c.rollout_id)
    return list(scene.parts.store.read(lambda connection: connection.execute(statement).scalars().all()))


def _cancel(scene: Scene, named: str, ids: Sequence[str] | None, meant: Collection[str]) -> Strike:
    """Cancel twice, as cancel is idempotent. `meant` are the rollouts that it may affect."""
    try:
        done = scene.parts.farm.cancel(named, ids)
        done += scene.parts.farm.cancel(named, ids)
    except farm.FarmError:
        scene.interventions.perhaps_cancelled.update(meant)
        raise
    scene.interventions.cancelled.update(done)
    return Strike(f"{len(done)} of {', '.join(meant)}")


@kind(3, needs_store=True)
def cancel_rollouts(scene: Scene) -> Strike:
    live = _ids(scene, _LIVE)
    if not live:
        raise NotNow("a rollout under way")
    batch_id = scene.chance.choice(live).split(".")[0]
    mine = [each for each in live if each.split(".")[0] == batch_id]
    chosen = scene.chance.sample(mine, min(len(mine), scene.chance.randint(1, 3)))
    return _cancel(scene, batch_id, chosen, chosen)


@kind(1, needs_store=True)
def cancel_group(scene: Scene) -> Strike:
    live = _ids(scene, _LIVE)
    if not live:
        raise NotNow("a group under way")
    group = scene.chance.choice(live).rsplit(".", 1)[0]
    return _cancel(scene, group, None, [each for each in live if each.rsplit(".", 1)[0] == group])


@kind(2, needs_store=True)
def rescore(scene: Scene) -> Strike:
    scored = _ids(scene, (State.COMPLETED.value,))
    if not scored:
        raise NotNow("a rollout that was scored")
    batch_id = scene.chance.choice(scored).split(".")[0]
    mine = [each for each in scored if each.split(".")[0] == batch_id]
    chosen = scene.chance.sample(mine, min(len(mine), scene.chance.randint(1, 4)))
    scene.interventions.rescored.update(chosen)
    done = scene.parts.farm.rescore(batch_id, chosen)
    return Strike(f"{len(done)} of {', '.join(chosen)}")


@kind(1, needs_store=True)
def poison_plugin(scene: Scene) -> Strike:
    """Submit a batch whose plug-in calls `sys.exit` in a stage: it fails for good, and does not affect others."""
    stage = scene.chance.choice(("init", "run", "eval"))
    request = {
        "instances": [{"data_source": "noop", "fields": {"fail": f"{stage}:exit"}, "instance_id": "noop-poison"}] * 2,
        "max_attempts": 2,
        "priority": 10,
    }
    batch_id = scene.parts.farm.submit(request)
    scene.interventions.poisoned.add(batch_id)
    return Strike(f"{batch_id} in {stage}")


@kind(2, needs_store=True)
def update_weights(scene: Scene) -> Strike:
    """Pause, name new weights, resume, concurrently with everything else; a failed update is undone."""
    running = [thread for thread in threading.enumerate() if thread.name == "weights"]
    if running:
        raise NotNow("engines without a weight update in progress")
    scene.interventions.n_versions += 1
    version = str(scene.interventions.n_versions)
    mode = scene.chance.choice(_MODES)
    thread = threading.Thread(target=partial(_update, scene.parts.farm, version, mode), name="weights", daemon=True)
    thread.start()
    return Strike(f"version {version} by {mode}")


def _update(client: farm.Farm, version: str, mode: PauseMode) -> None:
    try:
        with client.weight_update(version, mode, timeout_s=_PAUSE_S):
            pass
    except (TimeoutError, farm.FarmError):
        resume(client)


def resume(client: farm.Farm) -> None:
    """Resume engines that a broken update left paused."""
    try:
        client.resume_engines(timeout_s=_PAUSE_S)
    except (TimeoutError, farm.FarmError):
        return
