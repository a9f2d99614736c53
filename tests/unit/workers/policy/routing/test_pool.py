"""The choice of engine, and the handling of one that is busy, fails, crashes, is drained or paused; in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.errors import EngineError, LimitReached, WeightsMissing
from farm.records.rollout import Outcome
from tests.services.engines import CONTROLLED, RecordingReporter, Server, Servers, engine_call, routed
from tests.services.virtual_time import run
from workers.policy.engines.connection import current_progress
from workers.policy.generation import Engine, EngineRefused, EngineUnfit
from workers.policy.routing.load import IDLE
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter

N = 100
"""Tokens of a typical call: a second on a typical engine."""


@asynccontextmanager
async def pool_of(
    servers: Servers, reporter: RecordingReporter | None = None, **options: Any
) -> AsyncIterator[EnginePool]:
    pool = EnginePool(servers, open_engine=servers.open, detect=servers.detect, reporter=reporter, **options)
    try:
        yield pool
    finally:
        await pool.aclose()
    assert [server.n_clients for server in servers.by_url.values()] == [0] * len(servers.by_url)


def router_of(pool: EnginePool, name: str, group: str = "", model: str = "") -> StickyRouter:
    return StickyRouter(pool, RoutingKey(name, group or name, model))


async def run_turns(pool: EnginePool, name: str, n_turns: int = 1, n_tokens: int = N, group: str = "") -> list[str]:
    """Run a rollout of some turns; return the engines that answered them."""
    mine = router_of(pool, name, group)
    return [await routed(mine, n_tokens, engine_call(n_tokens, name)) for _ in range(n_turns)]


async def many(pool: EnginePool, n: int, n_turns: int = 1, n_tokens: int = N) -> list[list[str]]:
    return await asyncio.gather(*[run_turns(pool, f"r{i}", n_turns, n_tokens) for i in range(n)])


async def when(condition: Callable[[], Any]) -> None:
    """Wait until the condition is true; in virtual time, an hour passes quickly."""
    async with asyncio.timeout(3600):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for; in virtual time polling costs nothing
            await asyncio.sleep(0.01)


class TestChoice:
    def test_rollout_stays_with_its_engine(self) -> None:
        async def main() -> None:
            async with pool_of(Servers(Server("a"), Server("b"), Server("c"))) as pool:
                for turns in await many(pool, 9, n_turns=4):
                    assert len(set(turns)) == 1

        run(main())

    def test_calls_are_balanced_by_their_tokens(self) -> None:
        async def main() -> None:
            servers = Servers(Server("a"), Server("b"))
            async with pool_of(servers) as pool:
                long = asyncio.create_task(run_turns(pool, "long", n_tokens=100 * N))
                await when(lambda: any(server.n_running for server in servers.by_url.values()))
                short = await many(pool, 20)
                assert set(await long).isdisjoint(url for turns in short for url in turns)

        run(main())

    def test_siblings_share_an_engine_and_groups_are_spread(self) -> None:
        async def main() -> None:
            servers = Servers(*[Server(f"e{i}") for i in range(4)])
            async with pool_of(servers) as pool:
                groups = await asyncio.gather(
                    *[
                        asyncio.gather(*[run_turns(pool, f"{g}.{i}", group=f"g{g}") for i in range(4)])
                        for g in range(16)
                    ]
                )
                together = [Counter(url for (url,) in group).most_common(1)[0][1] for group in groups]
                assert sum(together) >= 0.75 * 64
                assert len({url for group in groups for (url,) in group}) == 4

        run(main())

    def test_two_nodes_send_a_group_to_the_same_engine(self) -> None:
        async def main() -> None:
            names = [f"e{i}" for i in range(4)]
            here, there = Servers(*map(Server, names)), Servers(*map(Server, reversed(names)))
            async with pool_of(here) as one, pool_of(there) as other:
                for g in range(12):
                    assert await run_turns(one, "x", group=f"g{g}") == await run_turns(other, "y", group=f"g{g}")

        run(main())

    @pytest.mark.parametrize("room", [4, 1000], ids=["full", "with room"])
    def test_engine_four_times_as_slow_gets_about_a_quarter_and_delays_nothing(self, room: int) -> None:
        async def main() -> None:
            slow, *fast = Server("slow", tokens_s=25, room=room), *[Server(f"e{i}", room=room) for i in range(3)]
            async with pool_of(Servers(slow, *fast)) as pool:
                await many(pool, 48, n_turns=20)
            share = len(slow.answered) / (sum(len(server.answered) for server in fast) / 3)
            assert 0 < share <= 0.4

        run(main())

    def test_calls_are_routed_by_model(self) -> None:
        async def main() -> None:
            mine, other = Server("mine"), Server("other")
            servers = Servers()
            for server, model in ((mine, "m"), (other, "o")):
                servers.add(server, model=model)
            async with pool_of(servers, none_s=5) as pool:
                for _ in range(5):
                    assert await routed(router_of(pool, "r", model="o"), N, engine_call(N, "r")) == other.url
                with pytest.raises(EngineError, match="no engine serves missing"):
                    await routed(router_of(pool, "r", model="missing"), N, engine_call(N, "r"))

        run(main())

    def test_engines_of_a_training_run_serve_only_it_and_are_waited_for(self) -> None:
        async def main() -> None:
            shared, own = Server("shared"), Server("own")
            servers = Servers(shared)
            servers.change(shared, version="4", engine_version="4")
            async with pool_of(servers, none_s=5) as pool:
                mine = router_of(pool, "r", model="run:exp-1")
                pending = asyncio.ensure_future(routed(mine, N, engine_call(N, "r")))
                await asyncio.sleep(600)
                assert not pending.done(), "its trainer may be restarted"
                assert mine.blocked.startswith("the training run exp-1 has no engine")
                servers.add(own, model="run:exp-1")
                assert await pending == own.url
                assert {(await run_turns(pool, f"s{n}"))[0] for n in range(8)} == {shared.url}
                assert (mine.newest_version, pool.newest_version) == ("", "4")

        run(main())

    def test_newest_weight_version_is_known(self) -> None:
        servers = Servers(Server("a"), Server("b"))
        pool = EnginePool(servers)
        assert pool.newest_version == ""
        for server, version in zip(servers.by_url.values(), ("9", "10"), strict=True):
            servers.change(server, version=version)
        assert pool.newest_version == "10"

    def test_pool_serves_one_event_loop_after_another(self) -> None:
        servers = Servers(Server("a"))
        pool = EnginePool(servers, open_engine=servers.open, detect=servers.detect)

        async def main() -> list[str]:
            try:
                return await run_turns(pool, "r")
            finally:
                await pool.aclose()

        assert [run(main()), run(main())] == [["http://a/v1"]] * 2
        assert servers.by_url["http://a/v1"].n_clients == 0


class TestNewEngines:
    def test_new_engine_is_probed_and_its_capabilities_are_shared(self) -> None:
        async def main() -> None:
            server, notes = Server("a"), RecordingReporter()
            servers = Servers()
            servers.add(server, info=None)
            async with pool_of(servers, notes) as pool:
                assert await run_turns(pool, "r") == [server.url]
                assert notes.infos == {server.url: server.info}

        run(main())

    def test_slow_probe_gets_a_longer_timeout_each_time(self) -> None:
        async def main() -> None:
            server = Server("a")
            server.first_s = 35.0
            servers = Servers()
            servers.add(server, info=None)
            async with pool_of(servers, none_s=200) as pool:
                assert await run_turns(pool, "r") == [server.url]

        run(main())

    def test_failed_probe_blocks_the_call_with_a_reason(self) -> None:
        async def main() -> None:
            server, notes = Server("a"), RecordingReporter()
            server.dead = True
            servers = Servers()
            servers.add(server, info=None)
            async with pool_of(servers, notes) as pool:
                mine = router_of(pool, "r")
                call = asyncio.create_task(routed(mine, N, engine_call(N, "r")))
                await when(lambda: "cannot be reached" in mine.blocked)
                assert server.url in mine.blocked
                assert any(why for _, why in notes.failures)
                server.dead = False
                assert await call == server.url
                assert mine.blocked == ""

        run(main())

    def test_new_engine_gets_a_small_share_at_first(self) -> None:
        async def main() -> None:
            old, new = [Server(f"e{i}", room=8) for i in range(3)], Server("new", room=8)
            servers = Servers(*old)
            async with pool_of(servers) as pool:
                rollouts = [asyncio.create_task(run_turns(pool, f"r{i}", n_turns=60)) for i in range(60)]
                await asyncio.sleep(5)
                servers.add(new)
                await asyncio.sleep(1)
                at_first = new.n_running
                await asyncio.sleep(24)
                assert at_first < new.n_running / 2
                assert new.n_running >= 5
                await asyncio.gather(*rollouts)

        run(main())

    def test_engine_with_a_changed_model_replaces_the_old_one(self) -> None:
        async def main() -> None:
            server = Server("a")
            servers = Servers(server)
            async with pool_of(servers) as pool:
                await run_turns(pool, "r")
                servers.change(server, model="m2")
                await run_turns(pool, "r")
                await when(lambda: server.n_clients == 1)

        run(main())


class TestFailover:
    def test_failed_call_is_retried_on_another_engine(self) -> None:
        async def main() -> None:
            servers = Servers(Server("a"), Server("b"))
            async with pool_of(servers) as pool:
                mine = router_of(pool, "r")
                first = servers.by_url[await routed(mine, N, engine_call(N, "r"))]
                first.failures = 1
                second = await routed(mine, N, engine_call(N, "r"))
                assert second != first.url
                assert await routed(mine, N, engine_call(N, "r")) == second, "its prefix is there now"

        run(main())

    def test_calls_on_a_crashed_engine_continue_elsewhere(self) -> None:
        async def main() -> None:
            servers, notes = Servers(Server("a"), Server("b")), RecordingReporter()
            a, b = servers.by_url.values()
            async with pool_of(servers, notes) as pool:
                a.hangs = b.hangs = True
                calls = [asyncio.create_task(run_turns(pool, f"r{i}")) for i in range(12)]
                await when(lambda: a.n_running + b.n_running == 12)
                assert a.n_running
                a.dead, b.hangs = True, False
                assert {url for turns in await asyncio.gather(*calls) for url in turns} == {b.url}
                assert a.n_running == 0
                assert (a.url, "does not answer") in notes.failures

        run(main())

    def test_recovered_engine_is_used_again(self) -> None:
        async def main() -> None:
            servers, notes = Servers(Server("a"), Server("b")), RecordingReporter()
            a = servers.by_url["http://a/v1"]
            async with pool_of(servers, notes) as pool:
                await pool.start()
                a.dead = True
                await when(lambda: notes.failures)
                assert all(a.url not in turns for turns in await many(pool, 20))
                a.dead = False
                await when(lambda: (a.url, "") in notes.failures)
                await many(pool, 40, n_turns=20)
                assert a.answered

        run(main())

    def test_engine_is_checked_less_often_the_longer_it_is_out(self) -> None:
        async def main() -> None:
            server = Server("a")
            checks: list[float] = []

            class Watched(Servers):
                def open(self, address: Any, info: Any) -> Engine:
                    client = super().open(address, info)
                    healthy = client.healthy

                    async def counted() -> bool:
                        checks.append(asyncio.get_running_loop().time())
                        return await healthy()

                    client.healthy = counted  # type: ignore[method-assign]
                    return client

            async with pool_of(Watched(server)) as pool:
                await pool.start()
                server.dead = True
                await asyncio.sleep(200)
            late = [after - before for before, after in pairwise(checks)][-3:]
            assert all(29 <= gap <= 32 for gap in late)

        run(main())

    def test_calls_wait_with_a_reason_while_all_engines_are_out(self) -> None:
        async def main() -> None:
            servers = Servers(Server("a"), Server("b"))
            async with pool_of(servers) as pool:
                for server in servers.by_url.values():
                    server.dead = True
                mine = router_of(pool, "r")
                call = asyncio.create_task(routed(mine, N, engine_call(N, "r")))
                await asyncio.sleep(600)
                assert not call.done()
                assert "is out: it does not answer" in mine.blocked
                assert mine.paused_s == 0
                servers.by_url["http://b/v1"].dead = False
                assert await call == "http://b/v1"
                assert mine.blocked == ""

        run(main())

    def test_request_that_fails_on_healthy_engines_is_given_up(self) -> None:
        async def main() -> None:
            servers = Servers(Server("a"), Server("b"))
            for server in servers.by_url.values():
                server.failures = 1000
            async with pool_of(servers) as pool:
                with pytest.raises(EngineError, match=r"6 tries failed, the last with: engine .* answered 500"):
                    await run_turns(pool, "r")
                assert [server.n_started() for server in servers.by_url.values()] == [3, 3]
                for server in servers.by_url.values():
                    server.failures = 0
                await run_turns(pool, "another")

        run(main())

    def test_request_that_crashes_engines_is_given_up(self) -> None:
        async def main() -> None:
            servers = Servers(*[Server(f"e{i}") for i in range(5)])
            for server in servers.by_url.values():
                server.deadly = {"poison"}
            async with pool_of(servers) as pool:
                others = [asyncio.create_task(run_turns(pool, f"r{i}", n_turns=5)) for i in range(10)]
                await asyncio.sleep(0.1)
                with pytest.raises(EngineError, match=r"closed the connection|is out"):
                    await run_turns(pool, "poison")
                assert sum(server.dead for server in servers.by_url.values()) <= 4
                await asyncio.gather(*others)

        run(main())

    def test_engine_that_fails_several_rollouts_is_ejected(self) -> None:
        async def main() -> None:
            servers, notes = Servers(Server("a"), Server("b")), RecordingReporter()
            a = servers.by_url["http://a/v1"]
            a.failures = 1000
            async with pool_of(servers, notes) as pool:
                await many(pool, 20)
                assert any(url == a.url and "call after call" in why for url, why in notes.failures)
                assert a.n_started() < 20

        run(main())

    @pytest.mark.parametrize(
        "error", [EngineRefused("no such field"), LimitReached(Outcome.CONTEXT_FULL, "full"), KeyError("bug")]
    )
    def test_error_that_no_engine_can_avoid_is_raised_at_once(self, error: Exception) -> None:
        async def main() -> None:
            n_queries = 0

            async def ask(engine: Engine) -> None:
                nonlocal n_queries
                n_queries += 1
                raise error

            async with pool_of(Servers(Server("a"), Server("b"))) as pool:
                with pytest.raises(type(error)):
                    await routed(router_of(pool, "r"), N, ask)
            assert n_queries == 1

        run(main())

    def test_engine_with_a_wrong_key_is_ejected_without_failing_rollouts(self) -> None:
        async def main() -> None:
            servers, notes = Servers(Server("a"), Server("b")), RecordingReporter()
            a, b = servers.by_url.values()
            a.key = "another"
            async with pool_of(servers, notes) as pool:
                assert all(turns == [b.url] * 2 for turns in await many(pool, 20, n_turns=2))
                assert any(url == a.url and "answered 401" in why for url, why in notes.failures)
                servers.change(a, key="another", info=None)
                pool.changed()
                await many(pool, 20, n_turns=20)
                assert a.answered

        run(main())

    def test_engine_that_returns_with_a_corrected_key_is_probed_at_once(self) -> None:
        async def main() -> None:
            server, notes = Server("a"), RecordingReporter()
            server.key = "right"
            servers = Servers()
            servers.add(server, info=None)
            async with pool_of(servers, notes) as pool:
                call = asyncio.create_task(run_turns(pool, "r"))
                await when(lambda: len(notes.failures) > 5)
                servers.change(server, key="right")
                pool.changed()
                changed_at = pool.now()
                assert await call == [server.url]
                assert pool.now() - changed_at < 5, "before the next regular probe"

        run(main())

    def test_request_that_no_engine_is_fit_for_is_refused_at_once(self) -> None:
        async def main() -> None:
            servers = Servers(Server("a"), Server("b"))
            for server in servers.by_url.values():
                server.key = "another"
            result: list[str] = []

            async def ask(engine: Engine) -> str:
                result.append(engine.address.url)
                return await engine_call(N, "r")(engine)

            async with pool_of(servers) as pool:
                with pytest.raises(EngineUnfit, match="401"):
                    await routed(router_of(pool, "r"), N, ask)
            assert sorted(result) == sorted(servers.by_url)

        run(main())

    def test_hung_call_on_a_healthy_engine_is_moved(self) -> None:
        async def main() -> None:
            servers, notes = Servers(Server("a"), Server("b")), RecordingReporter()
            a, b = servers.by_url.values()
            async with pool_of(servers, notes) as pool:
                a.hangs = True
                calls = [asyncio.create_task(run_turns(pool, f"r{i}")) for i in range(12)]
                await when(lambda: a.n_running and b.answered)
                assert {url for turns in await asyncio.gather(*calls) for url in turns} == {b.url}
                assert pool.now() < 400
                assert any(url == a.url and "did not answer in time" in why for url, why in notes.failures)
                a.hangs = False
                await when(lambda: (a.url, "") in notes.failures or notes.infos.get(a.url))

        run(main())

    def test_hung_call_without_another_engine_is_blocked_with_a_reason(self) -> None:
        async def main() -> None:
            server = Server("a")
            server.hangs = True
            async with pool_of(Servers(server)) as pool:
                mine = router_of(pool, "r")
                call = asyncio.create_task(routed(mine, N, engine_call(N, "r")))
                await when(lambda: "did not answer in time" in mine.blocked)
                assert pool.now() < 40
                await asyncio.sleep(1000)
                assert server.n_started() == 1, "it may be full, and there is no other"
                server.hangs = False
                assert await call == server.url
                assert mine.blocked == ""

        run(main())

    def test_long_call_on_a_healthy_engine_continues(self) -> None:
        async def main() -> None:
            server = Server("a")
            async with pool_of(Servers(server)) as pool:
                mine = router_of(pool, "r")
                call = asyncio.create_task(routed(mine, N, engine_call(1000 * N, "r")))
                await asyncio.sleep(900)
                assert mine.blocked == ""
                await call
                assert server.n_started() == 1
                assert server.n_detected >= 10, "it was probed from time to time"

        run(main())

    def test_removed_engine_is_left_after_the_running_call(self) -> None:
        async def main() -> None:
            servers = Servers(Server("a"), Server("b"))
            async with pool_of(servers) as pool:
                mine = router_of(pool, "r")
                call = asyncio.create_task(routed(mine, N, engine_call(N, "r")))
                await when(lambda: any(server.n_running for server in servers.by_url.values()))
                first = next(server for server in servers.by_url.values() if server.n_running)
                servers.remove(first)
                pool.changed()
                assert await call == first.url
                assert await routed(mine, N, engine_call(N, "r")) != first.url
                assert first.n_clients == 0

        run(main())


def test_call_whose_answer_trickles_blocks_its_rollout() -> None:
    async def main() -> None:
        async with pool_of(Servers(Server("a"))) as pool:
            mine = router_of(pool, "r")

            async def drip(engine: Engine) -> None:
                # as if bytes had arrived for a minute, without an end
                current_progress().body_since = time.monotonic() - 60.0
                await asyncio.sleep(1000)

            call = asyncio.create_task(routed(mine, N, drip))
            await when(lambda: "has been sending one answer" in mine.blocked)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert mine.blocked == ""

    run(main())


class TestSilence:
    """A call that is never answered, on a healthy engine, at its deadline."""

    @staticmethod
    async def lost(engine: Engine) -> None:
        await asyncio.sleep(20_000)

    @pytest.mark.parametrize(
        ("warm", "idle_s", "most_tokens", "after_s", "is_engines"),
        [
            # the longest answer takes the engine 11 s at its usual speed
            (True, 0, 10 * N, 50, False),
            (True, 0, 10 * N, 90, True),
            # 327 s and some more, which are doubled
            (True, 0, 32_768, 600, False),
            (True, 0, 32_768, 800, True),
            # an unknown length is not the engine's fault
            (True, 0, None, 900, False),
            # most of the rollout's time was spent elsewhere
            (True, 500, 10 * N, 400, False),
            (True, 500, 10 * N, 600, True),
            # an engine that has not answered yet may be slow
            (False, 0, 20 * N, 90, False),
            (False, 0, 20 * N, 120, True),
        ],
    )
    def test_silence_longer_than_any_answer_takes_is_attributed_to_the_engine(
        self, warm: bool, idle_s: float, most_tokens: int | None, after_s: float, is_engines: bool
    ) -> None:
        async def main() -> None:
            async with pool_of(Servers(Server("a"))) as pool:
                mine = router_of(pool, "r")
                if warm:
                    await routed(mine, N, engine_call(N, "r"))
                await asyncio.sleep(idle_s)
                call = asyncio.create_task(routed(mine, N, self.lost, most_tokens))
                await asyncio.sleep(after_s)
                assert ("has sent nothing for" in mine.blocked) == is_engines, mine.blocked
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                assert mine.blocked == ""

        run(main())

    def test_call_whose_answer_has_begun_is_not_silent(self) -> None:
        async def main() -> None:
            async with pool_of(Servers(Server("a"))) as pool:
                mine = router_of(pool, "r")

                async def streams(engine: Engine) -> None:
                    current_progress().token()
                    await asyncio.sleep(1000)

                call = asyncio.create_task(routed(mine, N, streams, N))
                await asyncio.sleep(900)
                assert mine.blocked == ""
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

        run(main())

    def test_concurrent_calls_may_take_longer(self) -> None:
        async def main() -> None:
            async with pool_of(Servers(Server("a", room=1000))) as pool:
                await run_turns(pool, "r", n_turns=4)
                routers = [router_of(pool, f"r{i}") for i in range(100)]
                calls = [asyncio.create_task(routed(each, N, self.lost, 10 * N)) for each in routers]
                await asyncio.sleep(150)
                assert not any(each.blocked for each in routers)
                for call in calls[9:]:
                    call.cancel()
                await asyncio.sleep(1)
                assert all(each.blocked for each in routers[:9])
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)

        run(main())


class TestBusy:
    def test_retry_after_is_waited_for_if_there_is_no_other_engine(self) -> None:
        async def main() -> None:
            server = Server("a")
            server.busy = [7.0]
            async with pool_of(Servers(server)) as pool:
                mine = router_of(pool, "r")
                call = asyncio.create_task(routed(mine, N, engine_call(N, "r")))
                await when(lambda: "is busy" in mine.blocked)
                assert "429" in mine.blocked
                await call
                first, second = (at for at, _ in server.started)
                assert 7 <= second - first < 10

        run(main())

    def test_another_engine_is_used_during_retry_after(self) -> None:
        async def main() -> None:
            servers = Servers(Server("a"), Server("b"))
            for server in servers.by_url.values():
                server.busy = [60.0]
            async with pool_of(servers) as pool:
                servers.by_url["http://b/v1"].busy = []
                await many(pool, 10)
            assert servers.by_url["http://a/v1"].n_started() <= 10
            assert len(servers.by_url["http://b/v1"].answered) == 10

        run(main())

    def test_long_retry_after_of_one_engine_delays_no_call(self) -> None:
        async def main() -> None:
            servers = Servers(Server("a"), Server("b"))
            servers.by_url["http://a/v1"].busy = [3600.0] * 100
            async with asyncio.timeout(60), pool_of(servers) as pool:
                assert all(set(turns) == {"http://b/v1"} for turns in await many(pool, 10, n_turns=3))

        run(main())

    def test_busy_engine_is_retried_with_growing_pauses(self) -> None:
        async def main() -> None:
            server = Server("a")
            server.busy = [None] * 100
            async with pool_of(Servers(server)) as pool:
                assert await run_turns(pool, "r") == [server.url]
            gaps = [after - before for (before, _), (after, _) in pairwise(server.started)]
            assert gaps[0] < 1
            assert all(5 < gap < 20 for gap in gaps[-20:])

        run(main())


class TestDrain:
    def test_draining_engine_keeps_its_rollouts_and_gets_no_new_ones(self) -> None:
        async def main() -> None:
            servers = Servers(Server("a"), Server("b"))
            a = servers.by_url["http://a/v1"]
            async with pool_of(servers) as pool:
                routers = [router_of(pool, f"r{i}") for i in range(12)]
                homes = [await routed(mine, N, engine_call(N, "old")) for mine in routers]
                servers.change(a, state="draining")
                assert [await routed(mine, N, engine_call(N, "old")) for mine in routers] == homes
                assert a.url in homes
                assert all(turns == ["http://b/v1"] for turns in await many(pool, 12))

        run(main())


class TestPause:
    def test_calls_wait_for_a_pause_without_being_charged(self) -> None:
        async def main() -> None:
            server = Server("a")
            servers = Servers(server)
            async with pool_of(servers) as pool:
                mine = router_of(pool, "r")
                running = asyncio.create_task(routed(mine, N, engine_call(N, "r")))
                await when(lambda: server.n_running)
                servers.change(server, paused="drain", n_orders=1)
                pool.changed()
                await running
                held = asyncio.create_task(routed(mine, N, engine_call(N, "r")))
                await asyncio.sleep(100)
                assert not held.done()
                assert server.n_running == 0
                assert (mine.blocked, round(mine.paused_s)) == ("", 100)
                servers.change(server, paused="", n_orders=2)
                pool.changed()
                await held
                assert round(mine.paused_s) == 100

        run(main())

    def test_frozen_calls_are_not_charged(self) -> None:
        async def main() -> None:
            server = Server("a", info=CONTROLLED)
            servers = Servers(server)
            async with pool_of(servers, RecordingReporter(leading=True)) as pool:
                mine = router_of(pool, "r")
                calls = [asyncio.create_task(routed(mine, N, engine_call(N, "r"))) for _ in range(2)]
                await when(lambda: server.n_running == 2)
                server.hangs = True
                servers.change(server, paused="keep", n_orders=1)
                pool.changed()
                await asyncio.sleep(100)
                assert (mine.blocked, round(mine.paused_s)) == ("", 100)
                server.hangs = False
                servers.change(server, paused="", n_orders=2, n_done=1, engine_paused="keep")
                pool.changed()
                await asyncio.gather(*calls)
                assert round(mine.paused_s) == 100
                assert server.n_started() == 2

        run(main())

    def test_calls_frozen_on_an_engine_that_is_removed_are_made_elsewhere(self) -> None:
        async def main() -> None:
            a, b = Server("a", info=CONTROLLED), Server("b")
            servers = Servers(a)
            async with pool_of(servers, RecordingReporter(leading=True)) as pool:
                mine = router_of(pool, "r")
                call = asyncio.create_task(routed(mine, N, engine_call(N, "r")))
                await when(lambda: a.n_running)
                a.hangs = True
                servers.change(a, paused="keep", n_orders=1)
                pool.changed()
                await asyncio.sleep(10)
                servers.remove(a)
                servers.add(b)
                pool.changed()
                assert await call == b.url
                paused_s = mine.paused_s
                await asyncio.sleep(10)
                assert mine.paused_s == paused_s

        run(main())

    def test_retry_delay_of_aborted_calls_ends_with_the_pause(self) -> None:
        async def main() -> None:
            server = Server("a", info=CONTROLLED)
            servers = Servers(server)
            async with pool_of(servers, RecordingReporter(leading=True)) as pool:
                server.busy = [60.0]
                call = asyncio.create_task(run_turns(pool, "r"))
                await when(lambda: not server.busy)
                servers.change(server, paused="abort", n_orders=1)
                pool.changed()
                await asyncio.sleep(1)
                servers.change(server, paused="", n_orders=2, n_done=1, engine_paused="abort")
                pool.changed()
                await call
                assert pool.now() < 10

        run(main())

    def test_pause_of_one_engine_does_not_affect_the_others(self) -> None:
        async def main() -> None:
            servers = Servers(Server("a"), Server("b"))
            servers.change(servers.by_url["http://a/v1"], paused="drain", n_orders=1)
            async with pool_of(servers) as pool:
                assert all(turns == ["http://b/v1"] * 2 for turns in await many(pool, 8, n_turns=2))

        run(main())

    def test_abort_cancels_and_repeats_calls_on_an_engine_without_control(self) -> None:
        async def main() -> None:
            server, notes = Server("a"), RecordingReporter()
            servers = Servers(server)
            async with pool_of(servers, notes) as pool:
                call = asyncio.create_task(run_turns(pool, "r", n_tokens=50 * N))
                await when(lambda: server.n_running)
                servers.change(server, paused="abort", n_orders=1)
                pool.changed()
                await when(lambda: not server.n_running)
                await when(lambda: notes.reports[-1][server.url].n_calls == 0)
                assert notes.reports[-1][server.url].n_orders == 1
                servers.change(server, paused="", n_orders=2)
                pool.changed()
                assert await call == [server.url]
                assert server.n_started() == 2

        run(main())

    def test_report_shows_when_the_last_call_has_ended(self) -> None:
        async def main() -> None:
            server, notes = Server("a"), RecordingReporter()
            servers = Servers(server)
            async with pool_of(servers, notes) as pool:
                call = asyncio.create_task(run_turns(pool, "r"))
                await when(lambda: server.n_running)
                servers.change(server, paused="drain", n_orders=3)
                pool.sync()
                (in_flight,) = notes.reports[-1].values()
                assert (in_flight.n_orders, in_flight.n_calls, in_flight.n_tokens) == (3, 1, N)
                await call
                (in_flight,) = notes.reports[-1].values()
                assert (in_flight.n_orders, in_flight.n_calls, in_flight.n_tokens) == (3, 0, 0)

        run(main())


class TestOrders:
    """Orders that the leading process sends to an engine with control endpoints."""

    def test_update_is_sent_in_order_and_recorded(self) -> None:
        async def main() -> None:
            server, notes = Server("a", info=CONTROLLED), RecordingReporter(leading=True)
            servers = Servers(server)
            async with pool_of(servers, notes) as pool:
                await pool.start()
                servers.change(server, paused="keep", n_orders=1)
                pool.changed()
                await when(lambda: (server.url, 1, "keep", "") in notes.orders)
                assert notes.orders[0] == (server.url, 0, "keep", ""), "it may be paused from here on"
                servers.change(server, version="7", version_order=2, n_orders=2, n_done=1, engine_paused="keep")
                pool.changed()
                await when(lambda: (server.url, 2, "keep", "7") in notes.orders)
                servers.change(server, paused="", n_orders=3, n_done=2, engine_version="7")
                pool.changed()
                await when(lambda: (server.url, 3, "", "7") in notes.orders)
                assert server.received == ["pause keep", "version 7", "resume"]

        run(main())

    def test_unfinished_order_of_a_dead_leader_is_sent_again(self) -> None:
        async def main() -> None:
            server, notes = Server("a", info=CONTROLLED), RecordingReporter(leading=True)
            servers = Servers(server)
            # it recorded its intention, and died
            servers.change(server, paused="keep", n_orders=1, engine_paused="keep")
            async with pool_of(servers, notes) as pool:
                await pool.start()
                await when(lambda: (server.url, 1, "keep", "") in notes.orders)
                assert server.received == ["pause keep"]

        run(main())

    def test_failed_engine_that_was_removed_gets_its_orders_when_it_is_back(self) -> None:
        async def main() -> None:
            server, notes = Server("a", info=CONTROLLED), RecordingReporter(leading=True)
            server.disobeys = True
            servers = Servers(server)
            servers.change(server, paused="drain", n_orders=1)
            async with pool_of(servers, notes) as pool:
                await pool.start()
                await when(lambda: any("has no /pause" in why for _, why in notes.failures))
                servers.remove(server)
                pool.sync()
                servers.add(server)
                pool.sync()
                n_failures = len(notes.failures)
                await asyncio.sleep(60)
                assert len(notes.failures) == n_failures, "no orders are sent to a removed engine"
                server.disobeys = False
                servers.change(server, paused="drain", n_orders=1)
                pool.sync()
                await when(lambda: server.received == ["pause drain"])

        run(main())

    def test_only_the_leader_sends_orders(self) -> None:
        async def main() -> None:
            server, notes = Server("a", info=CONTROLLED), RecordingReporter()
            servers = Servers(server)
            servers.change(server, paused="drain", n_orders=1)
            async with pool_of(servers, notes) as pool:
                await pool.start()
                await asyncio.sleep(60)
                assert server.received == []
                notes.leading = True
                await when(lambda: server.received == ["pause drain"])

        run(main())

    def test_order_without_control_endpoints_is_done_at_once(self) -> None:
        async def main() -> None:
            server, notes = Server("a"), RecordingReporter(leading=True)
            servers = Servers(server)
            servers.change(server, paused="abort", version="7", version_order=2, n_orders=2)
            async with pool_of(servers, notes) as pool:
                await pool.start()
                await when(lambda: notes.orders == [(server.url, 2, "abort", "7")])
                assert server.received == []

        run(main())

    def test_dead_engine_counts_as_paused_and_as_lacking_the_weights(self) -> None:
        async def main() -> None:
            server, notes = Server("a", info=CONTROLLED), RecordingReporter(leading=True)
            server.dead = True
            servers = Servers(server)
            servers.change(server, paused="drain", version="7", version_order=2, n_orders=2, engine_version="6")
            async with pool_of(servers, notes) as pool:
                await pool.start()
                await when(lambda: (server.url, 2, "", "6") in notes.orders)
                server.dead = False
                servers.change(server, paused="", n_orders=3, n_done=2)
                pool.changed()
                await when(lambda: (server.url, 3, "", "6") in notes.orders)
                assert server.received == [], "it must not be sent the version of weights that it never got"

        run(main())

    def test_engine_that_missed_the_weights_gets_no_calls_until_it_has_them(self) -> None:
        async def main() -> None:
            missed, has = Server("missed", info=CONTROLLED), Server("has", info=CONTROLLED)
            missed.weights, has.weights = "6", "7"
            servers = Servers(missed, has)
            servers.change(missed, version="7", n_orders=1, n_done=1, engine_version="6")
            servers.change(has, version="7", n_orders=1, n_done=1, engine_version="7")
            async with pool_of(servers) as pool:
                assert all(turns == [has.url] for turns in await many(pool, 10))
                has.dead = True
                mine = router_of(pool, "r")
                call = asyncio.create_task(routed(mine, N, engine_call(N, "r")))
                await when(lambda: mine.paused_s > 5.0)
                assert mine.blocked == "", "a wait for weights is not charged"
                missed.weights = "7"
                servers.change(missed, n_orders=2, n_done=2, engine_version="7")
                pool.changed()
                assert await call == missed.url

        run(main())

    def test_engine_that_has_not_been_sent_its_version_gets_no_calls(self) -> None:
        async def main() -> None:
            server = Server("a", info=CONTROLLED)
            server.weights = "default"
            servers = Servers(server)
            servers.change(server, version="7", version_order=1, n_orders=1, engine_version="default")
            async with pool_of(servers) as pool:
                mine = router_of(pool, "r")
                call = asyncio.create_task(routed(mine, N, engine_call(N, "r")))
                await when(lambda: mine.paused_s > 5.0)
                server.weights = "7"
                servers.change(server, n_done=1, engine_version="7")
                pool.changed()
                assert await call == server.url

        run(main())

    def test_wait_for_an_engine_without_its_version_is_limited(self) -> None:
        async def main() -> None:
            server = Server("a", info=CONTROLLED)
            servers = Servers(server)
            servers.change(server, version="7", version_order=1, n_orders=1, engine_version="6")
            async with pool_of(servers, weights_s=60.0) as pool:
                with pytest.raises(WeightsMissing, match="has not yet been sent its weights' version 7"):
                    await routed(router_of(pool, "r"), N, engine_call(N, "r"))

        run(main())

    def test_engine_that_restarted_unnoticed_is_asked_for_its_weights(self) -> None:
        async def main() -> None:
            server, notes = Server("a", info=CONTROLLED), RecordingReporter()
            servers = Servers(server)
            servers.change(server, version="7", n_orders=1, n_done=1, engine_version="7")
            async with pool_of(servers, notes) as pool:
                server.failures = 1
                call = asyncio.create_task(run_turns(pool, "r"))
                await when(lambda: (server.url, 1, "", "default") in notes.orders)
                call.cancel()

        run(main())

    def test_rollout_releases_its_slot_while_no_engine_has_the_weights(self) -> None:
        async def main() -> None:
            servers = Servers(Server("a", info=CONTROLLED), Server("b", info=CONTROLLED))
            for server in servers.by_url.values():
                servers.change(server, version="7", n_orders=1, n_done=1, engine_version="default")
            async with pool_of(servers, weights_s=60.0) as pool:
                mine = router_of(pool, "r")
                with pytest.raises(WeightsMissing, match="does not have the weights 7"):
                    await routed(mine, N, engine_call(N, "r"))
                assert 59.0 < mine.paused_s < 70.0

        run(main())

    @pytest.mark.parametrize("dead", [True, False], ids=["out", "busy"])
    def test_unreachable_engine_is_waited_for(self, dead: bool) -> None:
        async def main() -> None:
            lacks, has = Server("lacks", info=CONTROLLED), Server("has", info=CONTROLLED)
            has.weights = "7"
            servers = Servers(lacks, has)
            servers.change(lacks, version="7", n_orders=1, n_done=1, engine_version="default")
            servers.change(has, version="7", n_orders=1, n_done=1, engine_version="7")
            async with pool_of(servers, weights_s=600.0) as pool:
                has.dead, has.busy = dead, [] if dead else [5.0] * 20
                call = asyncio.create_task(run_turns(pool, "r"))
                await asyncio.sleep(80)
                has.dead = False
                assert await call == [has.url]

        run(main())

    def test_engine_without_the_weights_loads_them_from_their_path(self) -> None:
        async def main() -> None:
            server, notes = Server("a", info=CONTROLLED), RecordingReporter(leading=True)
            servers = Servers(server)
            servers.change(
                server, version="7", n_orders=1, n_done=1, engine_version="default", weights_path="/shared/7"
            )
            async with pool_of(servers, notes) as pool:
                assert await run_turns(pool, "r") == [server.url]
            assert server.received == ["load /shared/7", "version 7"]
            assert notes.orders[-1] == (server.url, 1, "", "7")

        run(main())

    def test_only_the_leader_makes_engines_load_and_no_paused_one(self) -> None:
        async def main() -> None:
            server, paused = Server("updated", info=CONTROLLED), Server("paused", info=CONTROLLED)
            servers = Servers(server, paused)
            lacks: dict[str, Any] = {"version": "7", "n_orders": 1, "n_done": 1, "weights_path": "/shared/7"}
            servers.change(server, engine_version="default", **lacks)
            servers.change(paused, engine_version="default", paused="drain", engine_paused="drain", **lacks)
            notes = RecordingReporter(leading=False)
            async with pool_of(servers, notes) as pool:
                await pool.start()
                await asyncio.sleep(60)
                assert server.received == paused.received == []
                notes.leading = True
                await when(lambda: server.received)
                await asyncio.sleep(60)
            assert (server.received, paused.received) == (["load /shared/7", "version 7"], [])

        run(main())

    def test_restart_between_two_checks_is_detected_without_a_failure(self) -> None:
        async def main() -> None:
            server, notes = Server("a", info=CONTROLLED), RecordingReporter()
            server.weights = "7"
            servers = Servers(server)
            servers.change(server, version="7", n_orders=1, n_done=1, engine_version="7")
            async with pool_of(servers, notes) as pool:
                assert await run_turns(pool, "r") == [server.url]
                server.weights = "default"
                await when(lambda: (server.url, 1, "", "default") in notes.orders)

        run(main())

    def test_new_engine_that_already_has_the_weights_is_used_at_once(self) -> None:
        async def main() -> None:
            server, notes = Server("a", info=CONTROLLED), RecordingReporter()
            server.weights = "7"
            servers = Servers(server)
            servers.change(server, info=None, version="7")
            async with pool_of(servers, notes) as pool:
                assert await run_turns(pool, "r") == [server.url]
                assert (server.url, 0, "", "7") in notes.orders

        run(main())

    def test_drain_is_sent_once_no_worker_has_a_call_in_flight(self) -> None:
        async def main() -> None:
            server, notes = Server("a", info=CONTROLLED), RecordingReporter(leading=True)
            notes.is_settled = False
            servers = Servers(server)
            async with pool_of(servers, notes) as pool:
                await pool.start()
                servers.change(server, paused="drain", n_orders=1)
                pool.changed()
                await asyncio.sleep(60)
                assert server.received == []
                notes.is_settled = True
                await when(lambda: server.received == ["pause drain"])

        run(main())

    def test_call_that_arrives_after_an_abort_is_repeated(self) -> None:
        async def main() -> None:
            server, notes = Server("a", info=CONTROLLED), RecordingReporter()
            servers = Servers(server)
            async with pool_of(servers, notes) as pool:
                # it reached the server after the pause, which holds it until the resume
                server.hangs = True
                call = asyncio.create_task(run_turns(pool, "r"))
                await when(lambda: server.n_running)
                servers.change(server, paused="abort", engine_paused="abort", n_orders=1, n_done=1)
                pool.changed()
                await when(lambda: not server.n_running)
                server.hangs = False
                servers.change(server, paused="", engine_paused="", n_orders=2, n_done=2)
                pool.changed()
                assert await call == [server.url]

        run(main())

    def test_restarted_engine_has_other_weights_and_gets_no_calls(self) -> None:
        async def main() -> None:
            server, notes = Server("a", info=CONTROLLED), RecordingReporter()
            server.weights = "7"
            servers = Servers(server)
            servers.change(server, version="7", n_orders=1, n_done=1, engine_version="7")
            async with pool_of(servers, notes) as pool:
                assert await run_turns(pool, "r") == [server.url]
                server.dead = True
                await when(lambda: any(why for _, why in notes.failures))
                server.weights, server.dead = "default", False
                await when(lambda: (server.url, 1, "", "default") in notes.orders)
                mine = router_of(pool, "r")
                call = asyncio.create_task(routed(mine, N, engine_call(N, "r")))
                await when(lambda: mine.paused_s > 5.0)
                call.cancel()

        run(main())


class TestCounts:
    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_no_call_is_in_flight_after_random_failures(self, data: st.DataObject) -> None:
        """Rollouts are cancelled, engines crash, come back, are busy, fail, are paused and removed at any moment."""

        async def main() -> None:
            every = [Server(f"e{i}") for i in range(3)]
            servers = Servers(*every)
            pool = EnginePool(servers, open_engine=servers.open, detect=servers.detect)
            tasks = [asyncio.create_task(run_turns(pool, f"r{i}", n_turns=3)) for i in range(8)]
            for _ in range(data.draw(st.integers(1, 12))):
                await asyncio.sleep(data.draw(st.floats(0.01, 3)))
                data.draw(st.sampled_from(_accidents(data, pool, servers, every, tasks)))()
                for server in every:
                    load = pool.load_tracker.own(server.url)
                    assert load.n_calls >= server.n_running
                    assert load.n_tokens == N * load.n_calls
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert [pool.load_tracker.own(server.url) for server in every] == [IDLE] * 3
            assert [server.n_running for server in every] == [0] * 3
            await pool.aclose()
            await asyncio.sleep(0)
            assert [server.n_clients for server in every] == [0] * 3

        run(main())


def _accidents(
    data: st.DataObject, pool: EnginePool, servers: Servers, every: list[Server], tasks: list[asyncio.Task[Any]]
) -> list[Callable[[], Any]]:
    server = data.draw(st.sampled_from(every))

    def turn(name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(server, name, value)

    def pause(mode: str) -> None:
        servers.change(server, paused=mode, n_orders=1)
        pool.changed()

    return [
        data.draw(st.sampled_from(tasks)).cancel,
        turn("dead", True),
        turn("dead", False),
        turn("failures", 3),
        turn("busy", [1.0, None]),
        lambda: servers.remove(server),
        lambda: pause("abort"),
        lambda: pause("drain"),
        lambda: pause(""),
    ]


def test_cancelled_call_is_cancelled_on_its_engine() -> None:
    async def main() -> None:
        server = Server("a")
        async with pool_of(Servers(server)) as pool:
            call: asyncio.Task[Any] = asyncio.create_task(_forever(pool))
            await when(lambda: server.n_running)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert server.n_running == 0
            assert pool.load_tracker.own(server.url) == IDLE

    run(main())


def _forever(pool: EnginePool) -> Coroutine[Any, Any, list[str]]:
    return run_turns(pool, "r", n_tokens=10**9)
