"""The relay as it runs in a sandbox: its source, passed to a separate Python."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from tests.unit.workers.policy.gateway.serving import Playing, Records, context_of, saying
from workers.policy.gateway import relay
from workers.policy.gateway.app import SOCKET, gateway
from workers.policy.gateway.calls import GatewayCalls
from workers.testing import answering

SOURCE = Path(relay.__file__).read_text()
MARK = "http://the-gateway"
PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
ASK = """
import concurrent.futures, http.client, json, os, sys, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
def ask(number):
    connection = http.client.HTTPConnection(url.netloc, timeout=600)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": str(number) * 50_000}]})
    connection.request("POST", url.path + "/chat/completions", body)
    return json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]
with concurrent.futures.ThreadPoolExecutor(100) as pool:
    print(json.dumps(list(pool.map(ask, range(100)))))
"""


@contextlib.asynccontextmanager
async def beside(
    path: Path, key: str, command: Sequence[str], files: Sequence[str] = ()
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command that runs with a relay."""
    words = [sys.executable, "-I", "-c", SOURCE, str(path / SOCKET), key, MARK, json.dumps(files), *command]
    environment = {**os.environ, "NO_PROXY": "example.org"}
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def said(process: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    return out.decode()


def test_clients_find_their_address_in_the_environment(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway(GatewayCalls(context_of(Playing(), Records())), tmp_path) as address:
            key = address.key
            async with beside(tmp_path, key, [sys.executable, "-c", PRINT_ENVIRONMENT]) as process:
                result = json.loads(await said(process))
        assert result["OPENAI_BASE_URL"] == result["OPENAI_API_BASE"] == result["ANTHROPIC_BASE_URL"] + "/v1"
        assert result["OPENAI_API_KEY"] == result["ANTHROPIC_API_KEY"] == key
        # whatever proxy the image sets
        assert result["NO_PROXY"] == result["no_proxy"] == "example.org,127.0.0.1"
        assert result["ANTHROPIC_BASE_URL"].startswith("http://127.0.0.1:")
        assert result["ANTHROPIC_BASE_URL"].endswith(f"/t/{key}")

    asyncio.run(main())


def test_hundred_concurrent_connections(tmp_path: Path) -> None:
    async def main() -> None:
        policy = Playing(answer=lambda messages: answering(messages[0]["content"] * 2))
        calls = GatewayCalls(context_of(policy, Records(), max_turns=1000, max_tokens=100_000))
        async with gateway(calls, tmp_path) as address:
            key = address.key
            async with beside(tmp_path, key, [sys.executable, "-c", ASK]) as process:
                assert json.loads(await said(process)) == [str(number) * 100_000 for number in range(100)]

    asyncio.run(main())


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -9 $$", 128 + 9)])
def test_relay_ends_with_the_exit_code_of_its_command(tmp_path: Path, command: str, code: int) -> None:
    async def main() -> None:
        async with gateway(GatewayCalls(context_of(Playing(), Records())), tmp_path) as address:
            key = address.key
            async with beside(tmp_path, key, ["bash", "-c", command]) as process:
                await said(process)
                assert process.returncode == code

    asyncio.run(main())


def test_command_ends_with_the_gateway(tmp_path: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with gateway(GatewayCalls(context_of(Playing(), Records())), tmp_path) as address:
                command = ["bash", "-c", "echo up; while true; do sleep 60; done"]
                process = await stack.enter_async_context(beside(tmp_path, address.key, command))
                assert process.stdout is not None
                assert await process.stdout.readline() == b"up\n"
            await said(process)
            assert process.returncode == 128 + signal.SIGKILL

    asyncio.run(main())


def test_child_processes_end_with_the_command(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway(GatewayCalls(context_of(Playing(), Records())), tmp_path) as address:
            # one has left its session; the command continues until it exists
            started = f"setsid bash -c 'echo up > up; exec sleep 3600 {mark}' &"
            command = f"cd {tmp_path}; mkfifo up; {started} read -r word < up; echo $word"
            key = address.key
            async with beside(tmp_path, key, ["bash", "-c", command]) as process:
                assert await said(process) == "up\n"
                assert not await asyncio.to_thread(running)

    def running() -> bool:
        return any(mark.encode() in result for result in map(command_line, Path("/proc").glob("[0-9]*")))

    mark = f"0.{uuid4().int}"
    asyncio.run(main())


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_command_ends_with_the_relay(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway(GatewayCalls(context_of(Playing(), Records())), tmp_path) as address:
            command = ["bash", "-c", "echo up; exec sleep 3600"]
            async with beside(tmp_path, address.key, command) as process:
                assert process.stdout is not None
                assert await process.stdout.readline() == b"up\n"
                process.kill()
                # it holds the pipe as its output until it has ended
                async with asyncio.timeout(120):
                    assert await process.stdout.read() == b""

    asyncio.run(main())


def test_missing_socket_breaks_connections_and_not_the_relay(tmp_path: Path) -> None:
    async def main() -> None:
        server = await relay.relay(str(tmp_path / SOCKET))
        port = server.sockets[0].getsockname()[1]
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b""
            writer.close()
        policy = Playing(saying())
        async with gateway(GatewayCalls(context_of(policy, Records())), tmp_path) as address:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET /t/{address.key}/v1/models HTTP/1.1\r\nhost: farm\r\n\r\n".encode())
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        server.close()

    asyncio.run(main())


def test_disconnect_of_a_client_is_seen_through_the_relay(tmp_path: Path) -> None:
    async def main() -> None:
        policy = Playing(saying())
        policy.gate = asyncio.Event()
        async with gateway(GatewayCalls(context_of(policy, Records())), tmp_path) as address:
            server = await relay.relay(str(tmp_path / SOCKET))
            port = server.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]})
            head = f"POST /t/{address.key}/v1/chat/completions HTTP/1.1\r\nhost: farm\r\ncontent-length: {len(body)}"
            writer.write(f"{head}\r\n\r\n{body}".encode())
            await policy.begun.wait()
            writer.close()
            async with asyncio.timeout(120):
                await policy.cancelled.wait()
            server.close()

    asyncio.run(main())
