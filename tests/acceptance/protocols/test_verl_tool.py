"""VeRL-Tool trajectories on a whole farm: two APIs, one of them killed in the middle, and a worker that dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx2
import pytest

import farm
from farm.embedded.embedded_farm import Embedded
from farm.errors import SandboxEnded
from farm.records.lending.borrowed_sandbox import BorrowedSandbox
from tests.doubles.protocols.verl_tool_trajectory import VerlToolTrajectory
from tests.services.api import KEY, RestartableApi, killable_api
from tests.services.farms import embedded_of, farm_folder, processes_of, until

N = 20
Here = tuple[Embedded, RestartableApi, RestartableApi]


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    # these tests are not about speed, so nothing times out on a slow machine
    patient = {"FARM_VERL_TOOL_WAIT_S": "120", "FARM_VERL_TOOL_ACTION_S": "60"}
    speak = ("--speak", "verl-tool")
    os.environ.update(patient)
    try:
        with (
            farm_folder() as folder,
            embedded_of(N, folder, FARM_SANDBOX="namespace") as started,
            killable_api(started.home, folder / "api.log", KEY, *speak) as first,
            killable_api(started.home, folder / "second.log", KEY, *speak) as second,
        ):
            until(lambda: first.listens() and second.listens(), "both listen")
            yield started, first, second
    finally:
        for name in patient:
            del os.environ[name]


@asynccontextmanager
async def trainer(api: RestartableApi) -> AsyncIterator[httpx2.AsyncClient]:
    url = api.url.replace("http://", f"http://farm:{KEY}@")
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=f"{url}/verl-tool", timeout=300.0, limits=limits) as client:
        yield client


def open_sandboxes(here: Here) -> list[BorrowedSandbox]:
    with farm.connect(here[0].home) as client:
        return list(client.sandboxes.list(1000))


def test_trajectories_complete_when_an_api_is_killed(here: Here) -> None:
    _, first, second = here

    async def run_actions(number: int, client: httpx2.AsyncClient, other: httpx2.AsyncClient) -> list[str]:
        one = VerlToolTrajectory(client, max_retries=60)
        waits = "while [ ! -e go ]; do sleep 0.1; done; " if number == 0 else ""
        cut = await one.act(f"<bash>echo one >>n; {waits}cd /tmp; x={number}; wc -l <~-/n</bash>")
        # the id is enough to find it
        two = VerlToolTrajectory(other)
        two.request_id = one.request_id
        kept = await two.act("<bash>echo $x $PWD</bash>")
        python = await one.act(f"```python\ny = {number}\nprint(y + 1)\n```\n```output")
        await two.act(f"```python\ny += {number}\n```")
        again = await one.act("<python>print(y)</python>")
        wrong = await one.act("I am done.")
        assert [each.success for each in (cut, kept, python, again, wrong)] == [True] * 5
        assert [(each.done, each.valid) for each in (cut, kept, python, again)] == [(False, True)] * 4
        assert (wrong.text, wrong.done, wrong.valid) == ("", False, False)
        await one.close()
        return [cut.text, kept.text, python.text, again.text]

    async def train() -> list[list[str]]:
        async with trainer(first) as client, trainer(second) as other:
            running = [asyncio.create_task(run_actions(number, client, other)) for number in range(N)]
            slow = await asyncio.to_thread(until, lambda: _begun(here), "the first one's command has begun")
            first.kill()
            first.start()
            await asyncio.to_thread(until, first.listens, "the API listens again")
            with farm.connect(here[0].home) as local:
                await asyncio.to_thread(local.sandboxes.attach(slow).write, "/workspace/go", b"")
            return await asyncio.gather(*running)

    for number, [cut, kept, python, again] in enumerate(asyncio.run(train())):
        assert cut == "\n<o>\n1\n</o>\n", "it was done once"
        assert kept == f"\n<o>\n{number} /tmp\n</o>\n"
        assert python == f"\n{number + 1}\n```\n"
        assert again == f"\n<output>\n{2 * number}\n</output>\n"
    assert open_sandboxes(here) == [], "finish ended them"


def _begun(here: Here) -> str:
    """Return the id of the sandbox whose command waits, once it does."""
    with farm.connect(here[0].home) as client:
        for each in client.sandboxes.list(1000):
            if each.state == "running":
                # others may finish in between
                with suppress(SandboxEnded):
                    handle = client.sandboxes.attach(each.sandbox_id)
                    if handle.exec("sh", "-c", "test -e /workspace/n && pgrep -x sleep || true").stdout:
                        return each.sandbox_id
    return ""


def test_repeated_action_runs_once_per_occurrence(here: Here) -> None:
    count = "<bash>echo x >>n; wc -l <n</bash>"

    async def run_actions() -> None:
        async with trainer(here[1]) as client, trainer(here[2]) as other:
            one, two = VerlToolTrajectory(client), VerlToolTrajectory(other)
            two.request_id = one.request_id
            for number, trajectory in enumerate([one, two, one, one, two], 1):
                assert (await trajectory.act(count)).text == f"\n<o>\n{number}\n</o>\n"
            ids = [one.request_id, "another", one.request_id, "another"]
            body = {"trajectory_ids": ids, "actions": [count] * 4, "is_last_step": [False, False, True, True]}
            answer = (await client.post("/get_observation", json=body)).json()
            assert answer["observations"] == [f"\n<o>\n{number}\n</o>\n" for number in (6, 1, 7, 2)]
            assert (answer["dones"], answer["valids"]) == ([False] * 4, [True] * 4)

    asyncio.run(run_actions())
    assert open_sandboxes(here) == [], "their last steps ended them"


def test_reconnected_client_gets_the_result_of_its_action(here: Here) -> None:
    slow = "<bash>echo x >>n; while [ ! -e go ]; do sleep 0.1; done; wc -l <n</bash>"

    async def run_actions() -> None:
        async with trainer(here[1]) as client, trainer(here[2]) as other:
            one = VerlToolTrajectory(client)
            action = asyncio.create_task(one.act(slow))
            sandbox = await asyncio.to_thread(until, lambda: _begun(here), "it has begun")
            action.cancel()
            await asyncio.gather(action, return_exceptions=True)
            with farm.connect(here[0].home) as local:
                await asyncio.to_thread(local.sandboxes.attach(sandbox).write, "/workspace/go", b"")
                handle = local.sandboxes.attach(sandbox)
                ended = lambda: not handle.exec("sh", "-c", "pgrep -x sleep || true").stdout  # noqa: E731
                await asyncio.to_thread(until, ended, "it has ended")
            two = VerlToolTrajectory(other)
            two.request_id = one.request_id
            assert (await two.act(slow)).text == "\n<o>\n1\n</o>\n"
            assert (await two.act(slow)).text == "\n<o>\n2\n</o>\n"
            await two.close()

    asyncio.run(run_actions())


def test_disabled_search_and_dead_worker_give_no_observation(here: Here) -> None:
    async def run_actions() -> None:
        async with trainer(here[1]) as client, trainer(here[2]) as other:
            searching = VerlToolTrajectory(client)
            off = await searching.act("<search>x</search>")
            assert (off.text, off.done, off.valid, off.success) == ("", True, False, True)
            await searching.close()
            one = VerlToolTrajectory(client)
            await one.act("<bash>x=1</bash>")
            folder = Path(here[0].home).parent
            [worker] = [each for each in processes_of(folder) if "workers.queue -n run@" in each]
            os.kill(int(worker.partition(":")[0]), signal.SIGKILL)
            for each in (client, other):
                lost = VerlToolTrajectory(each)
                lost.request_id = one.request_id
                shown = await lost.act("<bash>echo ${x:-anew}</bash>")
                assert (shown.text, shown.done, shown.valid, shown.success) == ("", True, False, True)
            await one.close()
            next_one = VerlToolTrajectory(client)
            assert (await next_one.act("<bash>echo again</bash>")).text == "\n<o>\nagain\n</o>\n"
            await next_one.close()

    asyncio.run(run_actions())
    assert open_sandboxes(here) == []


def test_api_logs_have_no_traceback(here: Here) -> None:
    for name in ("api.log", "second.log"):
        assert "Traceback" not in (Path(here[0].home).parent / name).read_text()
