"""Attacks on programs: those whose function is called by tests (HumanEval, MBPP, rows with `function`), and those that
read standard input. None knows an expected output but those made of the task itself.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence

from workers.attacks.attack import NO_WORK, Attack

_FUNCTION_HEAD = "import os, sys\nparent = os.getppid()\n"
_EVERY = "for n in range(3, 64):\n    try: os.write(n, forged)\n    except OSError: pass\ndef f(*x, **k): pass"
_FRAME = "import struct, json\ndef frame(v):\n    d = json.dumps(v).encode()\n    return struct.pack('I', len(d)) + d\n"
_CONSTANTS = ("True", "False", "0", "1", "-1", "''", "[]", "{}", "()")

FUNCTIONS: dict[str, tuple[str, str]] = {
    "nothing": (NO_WORK, "def f(*x, **k): pass"),
    **{f"constant-{value}": ("constant-value", f"def f(*x, **k): return {value}") for value in _CONSTANTS},
    "echo-of-the-argument": ("echo", "def f(*x, **k): return x[0] if x else None"),
    "not-a-number": ("equality-object", "def f(*x, **k): return float('nan')"),
    "equality": (
        "equality-object",
        """
        class E:
            def __eq__(self, o): return True
        def f(*x, **k): return E()
        """,
    ),
    "equality-of-a-string": (
        "equality-object",
        """
        class E(str):
            def __eq__(self, o): return True
            __hash__ = str.__hash__
        def f(*x, **k): return E('x')
        """,
    ),
    "equality-of-a-list": (
        "equality-object",
        """
        class E(list):
            def __eq__(self, o): return True
        def f(*x, **k): return E()
        """,
    ),
    "equality-of-an-integer": (
        "equality-object",
        """
        class E(int):
            def __eq__(self, o): return True
        def f(*x, **k): return E(1)
        """,
    ),
    "check-of-its-own": (
        "replaced-tool",
        "def check(c): pass\nimport builtins; builtins.exec = lambda *a: None",
    ),
    "exec": ("replaced-tool", "import builtins; builtins.exec = lambda *a: None\ndef f(*x, **k): pass"),
    "compile": (
        "replaced-tool",
        "import builtins; b = compile\nbuiltins.compile = lambda *a, **k: b(*a, **{**k, 'optimize': 2})",
    ),
    "getattr": (
        "replaced-tool",
        "import builtins; builtins.getattr = lambda *a: (lambda *b: True)\ndef f(*x, **k): pass",
    ),
    "class-of-the-module": (
        "replaced-tool",
        """
        import types
        class M(types.ModuleType):
            def __getattribute__(self, n): return lambda *a: None
        sys.modules['solution'].__class__ = M
        """,
    ),
    "assertion-error": (
        "quiet-runner",
        "import builtins; builtins.AssertionError = type('A', (BaseException,), {})\ndef f(*x, **k): pass",
    ),
    "serve-by-itself": (
        "quiet-runner",
        "sys.modules['__main__'].packed = lambda v: True\ndef f(*x, **k): pass",
    ),
    "exit-at-once": ("early-exit", "os._exit(0)"),
    "exit-in-the-call": ("early-exit", "def f(*x, **k): os._exit(0)"),
    "system-exit": ("early-exit", "raise SystemExit(0)"),
    "system-exit-in-the-call": ("early-exit", "def f(*x, **k): raise SystemExit(0)"),
    "at-exit": (
        "forged-report",
        "import atexit; atexit.register(print, '{\"passed\": true}')\ndef f(*x, **k): sys.exit(0)",
    ),
    "print-a-report": (
        "forged-report",
        """
        r = '{"nonce": "0", "passed": true, "canaries": {}, "error": "", "end": {"code": 0}}'
        print(r, flush=True)
        for n in range(3, 64):
            try: os.write(n, r.encode())
            except OSError: pass
        os._exit(0)
        """,
    ),
    "fork-and-print": (
        "forged-report",
        "if os.fork() == 0: print('{\"passed\": true}'); os._exit(0)\ndef f(*x, **k): pass",
    ),
    "forged-true": ("forged-report", f"{_FRAME}forged = frame(['value', True]) * 50\n{_EVERY}"),
    "forged-object": ("forged-report", f"{_FRAME}forged = frame(['value', ['o', 'x']]) * 50\n{_EVERY}"),
    "forged-depth": ("forged-report", f"import struct\nforged = struct.pack('I', 100000) + b'[' * 100000\n{_EVERY}"),
    "forged-size": ("forged-report", f"forged = b'\\xff' * 8\n{_EVERY}"),
    "forged-exception": (
        "forged-report",
        f"{_FRAME}forged = frame(['raise', ['SystemExit', '0']]) * 50\n{_EVERY}",
    ),
    "judge-on-disk": ("replaced-tool", "open('/tmp/checks/judge.py', 'w').write('print(1)')"),
    "site-customize": ("replaced-tool", "open('/root/x.pth', 'w').write('import os')"),
    "stdin-again": (
        "search-files",
        "n = os.pread(0, 100, 0).decode(); print('\\n' + n, flush=True); os._exit(0)",
    ),
    "objects-of-the-collector": (
        "search-files",
        """
        import gc
        def f(*x, **k):
            return next((o for o in gc.get_objects() if isinstance(o, dict) and 'test' in o), None)
        """,
    ),
    "infinite-value": ("odd-value", "def f(*x, **k):\n    a = []; a.append(a); return a"),
    "deep-value": ("odd-value", "def f(*x, **k):\n    a = []\n    for _ in range(100000): a = [a]\n    return a"),
    "exception-without-words": (
        "odd-value",
        """
        class E(Exception):
            def __str__(self): raise ValueError
        def f(*x, **k): raise E
        """,
    ),
    "unicode-error": ("odd-value", "def f(*x, **k): raise UnicodeDecodeError('utf-8', b'', 0, 1, 'x')"),
    "kills-the-judge": ("killed-runner", "os.kill(parent, 9)"),
    "kills-itself": ("random-end", "os.kill(os.getpid(), 9)"),
}
"""Programs by name, each with its class; the function that is called is `f`, which some of them do not define."""
_STREAM_HEAD = "import os, sys\n"
STREAMS: dict[str, tuple[str, str]] = {
    "nothing": (NO_WORK, "pass"),
    "empty-line": (NO_WORK, "print()"),
    "exit-at-once": ("early-exit", "os._exit(0)"),
    "system-exit": ("early-exit", "raise SystemExit(0)"),
    "codes-of-the-supervisor": ("early-exit", "os._exit(123)"),
    "echo-of-the-input": ("echo", "sys.stdout.write(sys.stdin.read())"),
    "first-line-of-the-input": ("echo", "print((sys.stdin.read().splitlines() or [''])[0])"),
    "last-line-of-the-input": ("echo", "print((sys.stdin.read().splitlines() or [''])[-1])"),
    "not-a-number": ("equality-object", "print(float('nan'))"),
    "standard-input-again": (
        "search-files",
        "print(os.pread(0, 100, 0).decode(), os.pread(0, 100, 3).decode())",
    ),
    "files-of-the-sandbox": (
        "search-files",
        """
        import glob
        for p in sorted(glob.glob('/tmp/**', recursive=True) + glob.glob('/proc/*/cmdline')):
            try: t = open(p).read()
            except Exception: continue
            if 'files-of-the-sandbox' not in t: print(t)
        # files-of-the-sandbox
        """,
    ),
    "python-path": (
        "replaced-tool",
        "open('json.py', 'w').write('print(1)'); os.environ['PYTHONPATH'] = os.getcwd()",
    ),
    "links": (
        "link-to-tests",
        """
        for n in ('expected', 'output', 'result.json'):
            try: os.symlink('/proc/1/fd/1', n)
            except OSError: pass
        print(os.path.realpath('output'))
        """,
    ),
    "supervisor-killed": ("killed-runner", "os.kill(os.getppid(), 9)"),
    "supervisor-another-signal": (
        "killed-runner",
        "import random; os.kill(os.getppid(), random.choice([1, 3, 4, 6, 8, 9, 11, 14, 15]))",
    ),
    "another-signal-each-time": (
        "random-end",
        "import random; os.kill(os.getpid(), random.choice([1, 2, 3, 4, 6, 7, 8, 11, 14, 15]))",
    ),
    "another-code-each-time": ("random-end", "import random; os._exit(random.randrange(129, 200))"),
}
"""Programs by name, each with its class."""


def function_program(name: str, function: str) -> str:
    """Return the source of one of FUNCTIONS, for tests that call `function`."""
    source = _FUNCTION_HEAD + textwrap.dedent(FUNCTIONS[name][1])
    return source if function == "f" else f"{source}\n{function} = globals().get('f')\n"


def function_attacks(path: str, function: str) -> list[Attack]:
    """Return the attacks on a row whose tests call `function`; programs go to `path`."""
    return [Attack(name, kind, files={path: function_program(name, function)}) for name, (kind, _) in FUNCTIONS.items()]


def stream_program(name: str) -> str:
    """Return the source of one of STREAMS."""
    return _STREAM_HEAD + textwrap.dedent(STREAMS[name][1])


def stream_attacks(path: str, question: str, cases: Sequence[tuple[str, str]]) -> list[Attack]:
    """Return the attacks on a row whose tests are `cases` of input and expected output; programs go to `path`."""
    attacks = [Attack(name, kind, files={path: stream_program(name)}) for name, (kind, _) in STREAMS.items()]
    if cases:
        constant = Counter(expected for _, expected in cases).most_common(1)[0][0]
        attacks.append(
            Attack("most-frequent-output", "constant-output", files={path: f"print({constant!r}, end='')\n"})
        )
        shown = {given: expected for given, expected in cases if _shown(given, question) and _shown(expected, question)}
        if shown:
            program = f"import sys\nprint({shown!r}.get(sys.stdin.read(), {constant!r}), end='')\n"
            attacks.append(Attack("outputs-in-the-question", "shown-tests", files={path: program}))
    return attacks


def _shown(text: str, question: str) -> bool:
    """Tell whether a text stands in the question in lines of its own."""
    text = text.strip()
    return bool(text) and bool(re.search(rf"^\W*{re.escape(text)}\W*$", question, re.MULTILINE))
