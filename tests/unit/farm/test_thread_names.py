from __future__ import annotations

import threading
from pathlib import Path

from farm.thread_names import name_thread


def test_kernel_name_of_a_thread_is_a_prefix_of_its_name() -> None:
    names: list[str] = []

    def run() -> None:
        name_thread("store-writer-of-a-worker")
        names.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())

    before = Path("/proc/self/comm").read_text()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert names == ["store-writer-of"]
    assert Path("/proc/self/comm").read_text() == before
