"""Reading the output of interpreters."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from testkit.scratch_folder import sandbox_config
from workers.sandboxes.kernel.interpreter import InterpreterOutput
from workers.sandboxes.processes.command_output import KEPT, SHOWN


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[InterpreterOutput, int]]:
    output = InterpreterOutput(sandbox_config().scratch)
    writer = os.dup(output.write_end)
    output.close_write_end()
    try:
        yield output, writer
    finally:
        os.close(writer)
        output.close()
        output.close()


def test_all_written_output_is_read() -> None:
    async def check() -> None:
        async with opened() as (output, writer):
            for number in range(50):
                os.write(writer, b"%d" % number * 100)
                # often the loop's reader has already been notified
                await asyncio.sleep(0)
                assert output.take() == (f"{number}" * 100, 0, None)

    asyncio.run(check())


def test_early_take_does_not_end_the_reading() -> None:
    async def check() -> None:
        async with opened() as (output, writer):
            loop = asyncio.get_running_loop()
            taken: list[str] = []

            def write_and_take_in_the_turn_of_the_reader() -> None:
                os.write(writer, b"a")
                loop.call_soon(lambda: taken.append(output.take()[0]))

            for _ in range(20):
                loop.call_soon(write_and_take_in_the_turn_of_the_reader)
                await asyncio.sleep(0.002)
            assert "".join(taken) == "a" * 20
            # more than a pipe holds
            await asyncio.to_thread(os.write, writer, b"b" * 150_000)
            assert output.take() == ("b" * 150_000, 0, None)

    asyncio.run(check())


def test_long_output_is_limited_and_counted() -> None:
    async def check() -> None:
        async with opened() as (output, writer):
            size, chunk = 100_000_000, b"x" * 1_000_000

            def write() -> None:
                for _ in range(size // len(chunk)):
                    view = memoryview(chunk)
                    while view:
                        view = view[os.write(writer, view) :]

            await asyncio.to_thread(write)
            text, n_dropped, full = output.take()
            assert n_dropped == size - SHOWN
            assert len(text) < SHOWN + 100
            assert full is not None
            assert KEPT <= len(full) < KEPT + 100
            os.write(writer, b"next")
            assert output.take() == ("next", 0, None)

    asyncio.run(check())


def test_endless_writer_does_not_block_the_loop() -> None:
    async def check() -> None:
        async with opened() as (output, writer):
            stop = threading.Event()
            endless = asyncio.ensure_future(asyncio.to_thread(_write_until, stop, writer))
            for _ in range(200):
                await asyncio.sleep(0.005)
            stop.set()
            await endless
            assert output.take()[1] > 1_000_000

    asyncio.run(check())


def _write_until(stop: threading.Event, writer: int) -> None:
    while not stop.is_set():
        os.write(writer, b"y\n" * 10_000)


def test_output_is_decoded_without_changes() -> None:
    async def check() -> None:
        async with opened() as (output, writer):
            os.write(writer, b"\x1b[31mred\x1b[0m 1%\r2% \xff")
            assert output.take() == ("\x1b[31mred\x1b[0m 1%\r2% \ufffd", 0, None)

    asyncio.run(check())


def test_end_of_all_writers_is_reached() -> None:
    async def check() -> None:
        output = InterpreterOutput(sandbox_config().scratch)
        os.write(output.write_end, b"last")
        output.close_write_end()
        await asyncio.sleep(0.01)
        assert output.take() == ("last", 0, None)
        assert output.take() == ("", 0, None)
        output.close()

    asyncio.run(check())
