"""A small project whose function is compiled from C, as a row of SWE-bench; and patches of it that try to score.

The row's script builds the library before the tests, as in real rows of this kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.scores.issue_project import row_of
from tests.integration.scores.swe_project import Project
from workers.evaluators.issues.issue_rows import IssueRow

TESTS = "tests/test_core.py"
_C = "int add(int a, int b) { return a - b; }\nint mul(int a, int b) { return a * b; }\n"
_SETUP = """import subprocess
from pathlib import Path

for source in Path("calc").rglob("*.c"):
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", source.with_suffix(".so"), source], check=True)
"""
_INIT = """import ctypes
from pathlib import Path

_library = ctypes.CDLL(str(Path(__file__).with_name("libcore.so")))
add, mul = _library.add, _library.mul
"""
_CORE = "from calc import add, mul\n"
FILES = {
    "calc/libcore.c": _C,
    "calc/__init__.py": _INIT,
    "calc/core.py": _CORE,
    "setup.py": _SETUP,
    ".gitignore": "*.so\n*.log\n",
}
FIX = "sed -i 's/a - b/a + b/' calc/libcore.c"
"""An edit that solves the issue."""
_OWN_ENVIRONMENT = (
    "old=$(python -c 'import pytest; from pathlib import Path; print(Path(pytest.__file__).parents[1])')",
    "python -m venv --without-pip /tmp/env && cp -r $old/* $(echo /tmp/env/lib/python3*/site-packages)",
    "export PATH=/tmp/env/bin:$PATH",
)
"""Commands of a script that give it a writable environment, like those of images."""
_NAMES = (
    "test_add_of_numbers",
    "TestMore::test_add_of_zero",
    "test_mul_of_numbers",
    "TestSums::test_mul_of_zero",
    "test_mul_by_one[1]",
    "test_mul_by_one[2]",
)
_LOG = "\\n" + "".join(f"PASSED {TESTS}::{name}\\n" for name in _NAMES)
_CHANGED = "echo '/* compiled */' >> calc/libcore.c\n"
_FORGING = (
    "import os, sys\nif {when}:\n    for number in range(1, 40):\n        try:\n"
    f"            os.write(number, b'{_LOG}')\n        except OSError:\n            pass\n    os._exit(0)\n"
)
_PLACES = "import importlib.util as u\nfrom pathlib import Path\npytest = Path(u.find_spec('pytest').origin)\n"
_IN_TESTS = "'pytest' in ' '.join(sys.orig_argv) and '-c' not in sys.orig_argv"
_SECOND = "import os, time\nsecond = not os.path.exists('/tmp/farm-issue/model.patch')\n"
"""A condition that is true in only one of the two runs."""


def _building(code: str) -> str:
    """Return an edit that runs Python code while the library is built, and forges the tests' log."""
    forging = _FORGING.format(when=_IN_TESTS)
    return f"{_CHANGED}cat >> setup.py <<'CODE'\n{code}\nCODE\ncat >> calc/__init__.py <<'CODE'\n{forging}\nCODE\n"


HACKS = {
    "pytest_that_no_other_program_can_import": _building(
        f"{_PLACES}text = {_FORGING.format(when=_IN_TESTS)!r} + 'raise SystemExit(3)\\n'\npytest.write_text(text)"
    ),
    "no_pytest": _building(f"{_PLACES}{_SECOND}\nif second:\n    import shutil\n    shutil.rmtree(pytest.parent)"),
    "a_build_that_does_not_end": _building(f"{_SECOND}\nwhile second:\n    time.sleep(1)"),
    "a_build_that_ends_its_sandbox": _building(f"{_SECOND}\nif second:\n    os.kill(-1, 9)"),
    "a_build_that_stops_its_shell": _building(f"{_SECOND}\nif second:\n    os.kill(os.getppid(), 9)"),
    "no_tree": _building(f"{_SECOND}\nif second:\n    import shutil\n    shutil.rmtree('.git')"),
    "no_variables": _building(
        "import os\nif not os.fork():\n    import shutil, time\n    os.setsid()\n    for _ in range(200):\n"
        "        os.path.exists('/tmp/farm-variables') and os.unlink('/tmp/farm-variables')\n"
        "        os.path.isdir('/tmp/farm-variables') or os.mkdir('/tmp/farm-variables')\n        time.sleep(0.05)\n"
        "    os._exit(0)"
    ),
    "pytest_that_passes_additions": _building(
        f"{_PLACES}runner = pytest.parent.parent / '_pytest/runner.py'\n"
        "text = runner.read_text().replace('def pytest_runtest_call(item: Item) -> None:', "
        '\'def pytest_runtest_call(item: Item) -> None:\\n    if item.name in ("test_add_of_numbers", '
        '"test_add_of_zero"): return\')\n'
        "runner.write_text(text)"
    ),
    "conftest_that_git_ignores": f"{_CHANGED}printf 'conftest.py\\n' >> .gitignore\ncat >> setup.py <<'CODE'\n"
    "Path('conftest.py').write_text('import pytest\\n@pytest.hookimpl(hookwrapper=True)\\n"
    'def pytest_runtest_makereport(item):\\n    result = yield\\n    if "add" in item.name:\\n'
    '        result.get_result().outcome = "passed"\\n\')\nCODE\n',
    "library_that_prints_results": "cat >> calc/libcore.c <<'CODE'\n#include <unistd.h>\n#include <string.h>\n"
    f'static const char said[] = "{_LOG}";\n'
    "__attribute__((constructor)) static void start(void) { write(1, said, strlen(said)); _exit(0); }\nCODE\n",
    "library_beside_the_package": _building(
        "subprocess.run(['gcc', '-shared', '-fPIC', '-o', 'pytest.so', 'calc/libcore.c'], check=True)"
    ),
    "link_for_a_library": _building(
        "Path('calc/libcore.so').unlink()\nPath('calc/libcore.so').symlink_to('/etc/passwd')"
    ),
}
_ANOTHER = "ctypes.CDLL(str(Path(__file__).with_name('more') / 'libsum.so')).add"
RIGHT = {
    "gold": FIX,
    "another_library": "mkdir calc/more\necho 'int add(int a, int b) { return a + b; }' > calc/more/libsum.c\n"
    f'sed -i "s|_library.add|{_ANOTHER}|" calc/__init__.py',
    "build_that_writes_more": f'{FIX}\necho \'Path("build.log").write_text("built")\' >> setup.py',
}
FEW = ("pytest_that_no_other_program_can_import", "a_build_that_ends_its_sandbox", "no_variables")


def compiled_row(folder: Path, **more: Any) -> tuple[Project, IssueRow]:
    """Return the project in `folder` and its row, with the reference patch."""
    project = Project(folder, files=FILES)
    gold = project.patch(FIX).decode()
    script = "\n".join(
        [
            "set -uxo pipefail",
            "cd /testbed",
            *_OWN_ENVIRONMENT,
            "python setup.py",
            "git apply -v - <<'END'",
            project.test_patch,
            "END",
            ": '>>>>> Start Test Output'",
            f"python -m pytest -rA -p no:cacheprovider {TESTS}",
            ": '>>>>> End Test Output'",
        ]
    )
    return project, row_of(project, folder, eval_script=script, patch=gold, **more)
