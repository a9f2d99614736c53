"""Attacks on programs whose function is called by tests: HumanEval, MBPP, rows with `function`."""

from __future__ import annotations

import textwrap

from workers.attacks.attack import NO_WORK, Attack

HEAD = "import os, sys\nparent = os.getppid()\n"
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


def function_program(name: str, function: str) -> str:
    """Return the source of one of FUNCTIONS, for tests that call `function`."""
    source = HEAD + textwrap.dedent(FUNCTIONS[name][1])
    return source if function == "f" else f"{source}\n{function} = globals().get('f')\n"


def function_attacks(path: str, function: str) -> list[Attack]:
    """Return the attacks on a row whose tests call `function`; programs go to `path`."""
    return [Attack(name, kind, files={path: function_program(name, function)}) for name, (kind, _) in FUNCTIONS.items()]
