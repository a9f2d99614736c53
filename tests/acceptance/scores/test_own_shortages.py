"""Resource shortages of the node that a submission causes during scoring: each gives a score, never an error.

The node has a small disk, with less space than the limits of a sandbox allow. Shortages caused by other processes give
no score: a submission that fails because of them is scored again.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from farm.errors import EvaluatorError
from farm.records.request import SandboxLimits, SandboxSpec
from farm.settings import settings
from farm.tasks.harbor_folder import task_folder
from tests.conftest import absent
from tests.integration.sandboxes.test_cgroups import group as group
from tests.integration.scores.swe_project import FILES, GOLD, SPEC, TREE, Project
from tests.integration.tasks.conftest import place as place
from tests.integration.tasks.harbor_hacks import SHELL_TEST, WORK, write_task
from tests.services.farms import farm_folder, until
from workers.cli.task_checks import CheckOptions, solve
from workers.config import own_config
from workers.evaluators.program_tests.evaluator import ProgramTestsEvaluator
from workers.evaluators.program_tests.form_rules import HiddenTests, StreamTest
from workers.evaluators.programs import ProgramEvaluator
from workers.evaluators.tests import PytestEvaluator
from workers.plugins.interfaces import Evaluator, Sandbox, Submission
from workers.plugins.registry import sandbox as provider
from workers.sandboxes.remove_tree import remove
from workers.stages.node_shortage import healthy_node

pytestmark = pytest.mark.timeout(900)
BYTES, INODES = "size=150m", "size=1g,nr_inodes=6000"
"""Options of a disk that a sandbox, with the limits below, can fill."""
LIMITS = SandboxLimits(n_processes=64, memory_mb=512)
SUM = HiddenTests((StreamTest("3\n", "seven\n"), StreamTest("4\n", "eight\n")), time_s=5.0)
RIGHT = "print({'3': 'seven', '4': 'eight'}[input()])\n"
CHECK = "def check(candidate):\n    assert candidate(3) == 'seven'\n"
_FILL = """
import os
def fill():
    for n in range(10**6):
        with open(f'/tmp/{n}', 'wb') as file:
            for _ in range(32): file.write(bytes(1 << 20))
def crowd():
    for n in range(10**6): os.mkdir(f'/tmp/d{n}')
"""
TAKING = {
    "disk": (BYTES, "fill()"),
    "disk-for-a-moment": (
        BYTES,
        "try: fill()\nexcept OSError: [os.unlink(f'/tmp/{n}') for n in range(1000) if "
        "os.path.exists(f'/tmp/{n}')]\nraise SystemExit(1)",
    ),
    "disk-and-a-signal": (BYTES, "try: fill()\nexcept OSError: os.kill(os.getpid(), 9)"),
    "disk-and-time": (BYTES, "import time\ntry: fill()\nexcept OSError: time.sleep(1000)"),
    "disk-and-its-supervisor": (BYTES, "try: fill()\nexcept OSError: os.kill(os.getppid(), 9)"),
    "inodes": (INODES, "crowd()"),
    "shared-memory": (BYTES, "open('/dev/shm/x', 'wb').write(bytes(1 << 30))"),
    "memory": (BYTES, "x = [bytearray(os.urandom(1 << 20) * 16) for _ in range(10**4)]"),
    "descriptors": (BYTES, "x = [os.pipe() for _ in range(10**6)]"),
    "descriptors-of-many": (BYTES, "[os.fork() for _ in range(5)]\nx = [os.pipe() for _ in range(10**6)]"),
    "threads": (BYTES, "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()"),
    "processes": (BYTES, "import time\nwhile True:\n    if os.fork() == 0: time.sleep(100)"),
}
OF_A_FUNCTION = {name: TAKING[name] for name in ("inodes", "shared-memory", "memory", "descriptors", "threads")}


@contextmanager
def small_scratch(options: str) -> Iterator[Path]:
    """Yield a scratch folder on a separate disk."""
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    with farm_folder() as folder, pytest.MonkeyPatch.context() as patch:
        disk = folder / "small"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=711", "tmpfs", disk], check=True)
        patch.setenv("FARM_SCRATCH", str(disk))
        settings.cache_clear()
        try:
            yield disk
        finally:
            subprocess.run(["umount", "-l", disk], check=True)
            remove(folder)
    settings.cache_clear()


async def scored(evaluator: Evaluator, files: dict[str, str], kind: str, spec: SandboxSpec, timeout_s: float) -> float:
    """Score it as the stage does."""
    async with healthy_node(own_config().sandboxes, "r1", "scoring", EvaluatorError) as ground:

        @asynccontextmanager
        async def fresh(*_: object, **__: object) -> AsyncIterator[Sandbox]:
            sandbox = await provider(kind).start(f"test-{uuid.uuid4().hex[:12]}", spec)
            try:
                async with ground.using(sandbox):
                    if TREE in spec.workdir and "pytest==8.3.5" in spec.packages:
                        for path, text in FILES.items():
                            await sandbox.write_file(f"{TREE}/{path}", text.encode())
                    yield sandbox
            finally:
                await sandbox.stop()

        return (await evaluator.evaluate(Submission(files=files), fresh, timeout_s)).value


def program(kind: str, text: str, timeout_s: float = 100.0) -> float:
    files = {"solution.py": text}
    return asyncio.run(scored(ProgramTestsEvaluator(SUM), files, kind, SandboxSpec(limits=LIMITS), timeout_s))


def usable(kind: str) -> str:
    if missing := provider(kind).missing():
        absent(missing)
    return kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "namespace") for name in TAKING), *((name, "singularity") for name in ("disk", "inodes", "processes"))],
)
def test_program_that_exhausts_the_node_scores_zero(name: str, kind: str) -> None:
    options, text = TAKING[name]
    with small_scratch(options):
        assert program(usable(kind), _FILL + text) == 0.0


@pytest.mark.parametrize("name", OF_A_FUNCTION)
def test_function_that_exhausts_the_node_scores_zero(name: str) -> None:
    options, text = OF_A_FUNCTION[name]
    evaluator = ProgramEvaluator("", CHECK, "f")
    function = f"{_FILL}\ndef f(x):\n    {text.replace(chr(10), chr(10) + '    ')}"
    with small_scratch(options):
        spec = SandboxSpec(limits=LIMITS)
        assert asyncio.run(scored(evaluator, {"solution.py": function}, usable("namespace"), spec, 60.0)) == 0.0


@pytest.mark.parametrize("name", ["disk", "disk-for-a-moment", "inodes", "memory", "descriptors", "processes"])
def test_patch_that_exhausts_the_node_scores_zero(name: str, tmp_path: Path) -> None:
    options, text = TAKING[name]
    project = Project(tmp_path)
    code = f"{_FILL}\ndef add(a, b):\n    {text.replace(chr(10), chr(10) + '    ')}\n\ndef mul(a, b): return a * b\n"
    patches = {"model.patch": project.patch(f"cat > calc/core.py <<'END'\n{code}\nEND").decode()}
    with small_scratch(options):
        evaluator = PytestEvaluator(project.plan())
        spec = SPEC.model_copy(update={"limits": LIMITS})
        assert asyncio.run(scored(evaluator, patches, usable("namespace"), spec, 120.0)) == 0.0
        right = {"model.patch": project.patch(GOLD).decode()}
        assert asyncio.run(scored(evaluator, right, "namespace", spec, 120.0)) == 1.0


@pytest.mark.parametrize("then", ["exit 0", "kill -9 $$", "sleep 100", ""])
def test_leftover_script_that_fills_the_disk_is_scored(place: Path, tmp_path: Path, then: str) -> None:
    test = SHELL_TEST.replace(". /tests/helper.sh", ". /tests/helper.sh; . /app/leave")
    leave = f"head -c 1G /dev/zero > /app/full; {then}"
    folder = write_task(
        tmp_path / "task", test, f"{WORK}; echo '{leave}' > /app/leave", "[verifier]\ntimeout_sec = 20\n"
    )
    with small_scratch(BYTES), task_folder(folder) as task:
        options = CheckOptions(sandbox="namespace", n_parallel=1)
        score = asyncio.run(solve(task, options)).score.value
    # without an end of its own the tests find the answer, and the few bytes of a reward may still fit
    assert score in ({0.0} if then else {0.0, 1.0})


class Neighbour:
    """Another process of the node, which fills the disk after a program has begun, a number of times."""

    def __init__(self, disk: Path, n_times: int) -> None:
        self._disk, self._n_times = disk, n_times
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        for _ in range(self._n_times):
            self._until(lambda: bool(list(self._disk.glob("sandboxes/*/upper/tmp/begun"))))
            filler = self._disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            self._until(lambda: not list(self._disk.glob("sandboxes/*/upper/tmp/begun")), 3.0)
            filler.unlink()

    def _until(self, reached: Any, limit_s: float = 600.0) -> None:
        for _ in range(int(limit_s / 0.01)):
            if reached() or self._over.wait(0.01):
                return


NEEDY = f"""
import time
open('/tmp/begun', 'w')
time.sleep(1.5)
open('/tmp/needed', 'wb').write(bytes(1 << 20))
{RIGHT}"""


def test_right_program_is_rerun_after_a_shortage_by_a_neighbour() -> None:
    usable("namespace")
    with small_scratch(BYTES) as disk:
        with Neighbour(disk, 1):
            assert program("namespace", NEEDY) == 1.0
        with Neighbour(disk, 0):
            assert program("namespace", NEEDY) == 1.0


def test_shortage_held_by_others_is_an_evaluator_error() -> None:
    usable("namespace")
    with small_scratch(BYTES) as disk:
        wrong = "import sys\nsys.exit(1)\n"
        assert program("namespace", wrong) == 0.0
        (disk / "filler").write_bytes(bytes(145 << 20))
        with pytest.raises(EvaluatorError, match="disk"):
            program("namespace", wrong)


IN_SMALL_MEMORY = """
import asyncio, sys
from dataclasses import replace
from tests.acceptance.scores.test_own_shortages import RIGHT, SUM, SandboxLimits, SandboxSpec, scored
from workers.evaluators.program_tests.evaluator import ProgramTestsEvaluator
from farm.settings import settings
from workers.config import own_config
from workers.sandboxes.shortage import n_kills
spec = SandboxSpec(limits=SandboxLimits(memory_mb=8192))
for program in (RIGHT, sys.argv[1]):
    before = n_kills(settings().cgroup)
    evaluator = ProgramTestsEvaluator(replace(SUM, memory_mb=8000))
    score = asyncio.run(scored(evaluator, {"solution.py": program}, "namespace", spec, 100.0))
    print(score, n_kills(settings().cgroup) > before)
"""


def test_program_that_exceeds_node_memory_is_scored(group: Path) -> None:
    """The node is a control group, in which the kernel kills before the sandbox reaches its own limit."""
    usable("namespace")
    node = group / "node"
    with suppress(OSError):
        (group / "cgroup.subtree_control").write_text("+memory")
    node.mkdir()
    try:
        limit = next(file for file in ("memory.limit_in_bytes", "memory.max") if (node / file).exists())
        (node / limit).write_text(str(900 << 20))
        join = f'echo $$ > {node}/cgroup.procs && exec "$@"'
        hog = "x = [bytearray(b'x' * (1 << 20)) for _ in range(10**4)]"
        argv = ["bash", "-c", join, "bash", sys.executable, "-c", IN_SMALL_MEMORY, hog]
        ran = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
        assert ran.stdout.splitlines() == ["1.0 False", "0.0 True"], ran.stderr
    finally:
        until(lambda: not (node / "cgroup.procs").read_text(), "its processes have ended")
        node.rmdir()
