"""The claim of a head: one process at a time, also where locks do not reach, and free as soon as that is known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from farm.embedded.node_folder import locked
from farm.errors import Conflict
from farm.home import write_own
from farm.launch.head_claim import HeadClaim, is_led
from farm.store.node_names import this_process


def always() -> bool:
    return True


def write_claim(folder: Path, **more: object) -> None:
    """Write the file as another machine's head would; locks do not show it."""
    process = this_process() | {"boot": "another"}
    write_own(folder / "head.json", json.dumps({"head": "x", "host": "far", "process": process, "n": 1, **more}))


def counting(folder: Path) -> Callable[[], bool]:
    """Return a condition that advances the count of a remote head at each call, twenty times."""
    n = iter(range(20))

    def goes_on() -> bool:
        number = next(n, None)
        if number is not None:
            write_claim(folder, n=number)
        return number is not None

    return goes_on


def test_claim_is_exclusive_and_free_after_its_release(tmp_path: Path) -> None:
    first, second = HeadClaim(tmp_path), HeadClaim(tmp_path)
    assert first.acquire(False, always)
    with pytest.raises(Conflict, match=r"a farm runs in .* already, on "):
        second.acquire(False, always)
    first.release()
    assert second.acquire(False, always)
    assert not second.from_elsewhere
    second.release()


def test_claim_of_a_silent_head_of_another_machine_is_taken_over(tmp_path: Path) -> None:
    write_claim(tmp_path)
    claim = HeadClaim(tmp_path, silent_s=0.6)
    assert claim.acquire(False, always)
    assert claim.from_elsewhere
    claim.release()


def test_claim_of_a_counting_head_of_another_machine_is_kept(tmp_path: Path) -> None:
    write_claim(tmp_path)
    with pytest.raises(Conflict, match="already, on far"):
        HeadClaim(tmp_path, silent_s=60).acquire(False, counting(tmp_path))
    assert not HeadClaim(tmp_path, silent_s=60).acquire(True, counting(tmp_path))


def test_head_that_announced_its_end_is_not_waited_for(tmp_path: Path) -> None:
    write_claim(tmp_path, ended=True)
    claim = HeadClaim(tmp_path, silent_s=1e9)
    assert claim.acquire(False, always)
    claim.release()


def test_lock_is_held_until_its_last_process_ends(tmp_path: Path) -> None:
    claim, next_one = HeadClaim(tmp_path), HeadClaim(tmp_path, silent_s=0.1)
    assert claim.acquire(False, always)
    held = [sys.executable, "-c", "input()"]
    with subprocess.Popen(held, stdin=subprocess.PIPE, pass_fds=[claim.lock_fd]) as postgres:
        # the head has ended, its database has not
        claim.release()
        n = iter(range(3))
        assert not next_one.acquire(True, lambda: next(n, None) is not None)
        postgres.communicate(b"\n")
    assert next_one.acquire(True, always)
    next_one.release()


def test_wait_for_the_lock_of_another_farm_is_limited(tmp_path: Path) -> None:
    before = HeadClaim(tmp_path)
    assert before.acquire(False, always)
    before.release()
    with locked(tmp_path / "lock", ""), pytest.raises(Conflict, match=r"a farm runs in .* already; stop it"):
        HeadClaim(tmp_path, ending_s=0).acquire(False, always)


def test_head_of_another_container_counts_as_another_machine(tmp_path: Path) -> None:
    process = this_process() | {"pids": "pid:[1]"}
    write_own(tmp_path / "head.json", json.dumps({"head": "x", "process": process, "ended": True}))
    claim = HeadClaim(tmp_path)
    assert claim.acquire(False, always)
    assert claim.from_elsewhere
    claim.release()


def test_head_notices_the_loss_of_its_claim(tmp_path: Path) -> None:
    claim = HeadClaim(tmp_path, beat_s=0.02)
    assert claim.acquire(False, always)
    write_claim(tmp_path, head="of another")
    assert claim._thread is not None
    claim._thread.join(60)
    assert claim.lost
    claim.release()
    assert json.loads((tmp_path / "head.json").read_text())["head"] == "of another"


def test_garbage_in_the_file_is_not_a_head(tmp_path: Path) -> None:
    for text in (b"", b"[", b"[]", b"null", b"{}", b"[1]", b"3", b'{"process": 3}', b"\xff\0", b"[" * 100_000):
        (tmp_path / "head.json").write_bytes(text)
        claim = HeadClaim(tmp_path, silent_s=1e9)
        assert claim.acquire(False, always), text
        claim.release()


def test_head_is_recognized_only_by_its_counting(tmp_path: Path) -> None:
    assert not is_led(tmp_path)
    write_claim(tmp_path)
    assert not is_led(tmp_path, silent_s=0.6), "it may have been killed, on another machine"
    claim = HeadClaim(tmp_path, silent_s=0.1, beat_s=0.05)
    assert claim.acquire(False, always)
    assert is_led(tmp_path)
    claim.release()
    assert not is_led(tmp_path)
