"""Right patches in unusual forms for the project of `swe_project.py`, as scripts that edit its tree."""

from __future__ import annotations

from tests.integration.scores.swe_project import GOLD

_CORE = "cat > calc/core.py <<'PYTHON_CODE'\n{}\nPYTHON_CODE"
_MUL = "def mul(a, b):\n    return a * b\n"
_BODIES = {
    "operator": "from operator import add, mul",
    "lambdas": "add = lambda a, b: a + b\nmul = lambda a, b: a * b",
    "sum": f"def add(*terms):\n    return sum(terms)\n{_MUL}",
    "partial": f"import functools, operator\nadd = functools.partial(operator.add)\n{_MUL}",
    "callable_object": f"class Add:\n    def __call__(self, a, b): return a + b\nadd = Add()\n{_MUL}",
    "static_methods": "class Sums:\n    @staticmethod\n    def add(a, b): return a + b\n"
    "    @staticmethod\n    def mul(a, b): return a * b\nadd, mul = Sums.add, Sums.mul",
    "decorator": "import functools\ndef known(f):\n    @functools.wraps(f)\n    def g(*a): return f(*a)\n    return g\n"
    f"@known\ndef add(a, b): return a + b\n{_MUL}",
    "cache": f"import functools\n@functools.lru_cache(None)\ndef add(a, b): return a + b\n{_MUL}",
    "loop": f"def add(a, b):\n    while b > 0: a, b = a + 1, b - 1\n    return a\n{_MUL}",
    "recursion": f"def add(a, b): return add(a + 1, b - 1) if b else a\n{_MUL}",
    "exec": f"exec('def add(a, b): return a + b')\n{_MUL}",
    "module_getattr": "def __getattr__(name):\n    if name == 'add': return int.__add__\n"
    f"    raise AttributeError(name)\n{_MUL}",
    "generated": "for _n, _s in (('add', '+'), ('mul', '*')): globals()[_n] = eval(f'lambda a, b: a {_s} b')",
    "dispatch": f"import functools\n@functools.singledispatch\ndef add(a, b): return a + b\n{_MUL}",
    "match": "def add(a, b):\n    match (a, b):\n        case (0, x): return x\n"
    f"        case (x, y): return x + y\n{_MUL}",
    "annotations": "from __future__ import annotations\ndef add(a: Unknown, b: Unknown) -> Unknown: return a + b\n"
    f"{_MUL}",
    "prints_passed": "print('PASSED tests/test_core.py::nothing')\ndef add(a, b):\n    print('ok')\n    return a + b\n"
    f"{_MUL}",
    "warns": "import warnings\ndef add(a, b):\n    warnings.warn('slow', DeprecationWarning)\n    return a + b\n"
    f"{_MUL}",
    "logs": f"import logging\ndef add(a, b):\n    logging.getLogger(__name__).error('%s', a)\n    return a + b\n{_MUL}",
    "thread": f"import threading\nlock = threading.Lock()\ndef add(a, b):\n    with lock: return a + b\n{_MUL}",
    "at_exit": f"import atexit\natexit.register(print, 'bye')\ndef add(a, b): return a + b\n{_MUL}",
    "child": "import subprocess\n"
    f"def add(a, b): return int(subprocess.check_output(['expr', str(a), '+', str(b)]))\n{_MUL}",
    "optional_import": "try: import no_such_module\nexcept ImportError: no_such_module = None\n"
    f"def add(a, b): return a + b\n{_MUL}",
    "asserts": f"def add(a, b):\n    assert a is not None and b is not None\n    return a + b\n{_MUL}",
    "other_letters": f"def größe(ä, ö): return ä + ö\nadd = größe\n{_MUL}",
}
PATCHES = {
    "gold": GOLD,
    **{name: _CORE.format(body) for name, body in _BODIES.items()},
    "carriage_returns": f"{GOLD}; sed -i 's/$/\\r/' calc/core.py",
    "byte_order_mark": f"{GOLD}; sed -i '1s/^/\\xef\\xbb\\xbf/' calc/core.py",
    "latin_1": f"{GOLD}; printf '# -*- coding: latin-1 -*-\\nX = \"\\344\"\\n' | cat - calc/core.py > x; "
    "mv x calc/core.py",
    "no_last_newline": f"{GOLD}; printf '# end' >> calc/core.py",
    "package_for_module": f"{GOLD}; mkdir calc/core; mv calc/core.py calc/core/__init__.py",
    "moved": f"{GOLD}; mv calc/core.py calc/sums.py; echo 'from calc.sums import add, mul' > calc/core.py",
    "star_import": f"{GOLD}; mv calc/core.py calc/sums.py; echo 'from .sums import *' > calc/core.py",
    "new_folder": f"{GOLD}; mkdir -p calc/a/b; touch calc/a/__init__.py calc/a/b/__init__.py; "
    "echo 'from calc.core import add' > calc/a/b/c.py",
    "executable": f"{GOLD}; chmod 755 calc/core.py",
    "binary_file": f"{GOLD}; head -c 5000 /dev/urandom > calc/data.bin",
    "large_file": f"{GOLD}; seq 80000 > calc/numbers.txt",
    "many_files": f"{GOLD}; mkdir docs; for n in $(seq 200); do echo $n > docs/$n.md; done",
    "odd_names": f"{GOLD}; mkdir 'my docs'; echo x > 'my docs/größe \"1\".txt'; echo y > '-n'",
    "link": f"{GOLD}; ln -s calc/core.py core_link.py",
    "read_me": f"{GOLD}; echo '# calc' > README.md; mkdir .github; echo 'on: push' > .github/ci.yml",
    "own_tests": f"{GOLD}; echo 'def test_mine(): assert True' > tests/test_mine.py",
    "tests_changed": f"{GOLD}; echo 'def test_mine(): pass' >> tests/test_core.py",
    "tests_base_removed": f"{GOLD}; rm tests/base.py",
    "ignored_files": f"{GOLD}; echo '*.tmp' >> .gitignore; echo x > debug.log",
    "script_at_the_root": f"{GOLD}; printf 'from calc.core import add\\nprint(add(2, 3))\\n' > reproduce.py",
    "settings_of_tools": f"{GOLD}; printf '[tool.black]\\nline-length = 100\\n' >> pyproject.toml; "
    "echo '[flake8]' > .flake8",
    "make_file": f"{GOLD}; printf 'test:\\n\\tpytest\\n' > Makefile",
}
"""Scripts by name: all score 1."""
