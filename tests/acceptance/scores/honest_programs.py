"""Right programs in unusual forms: their `f` sorts a list of integers, or they sort those of their standard input."""

from __future__ import annotations

SORTS = {
    "sorted": "f = sorted",
    "in-place": "def f(x):\n    x.sort()\n    return x",
    "quick": "def f(x): return x and f([y for y in x[1:] if y < x[0]]) + x[:1] + f([y for y in x[1:] if y >= x[0]])",
    "generator": "def g(x):\n    yield from sorted(x)\ndef f(x): return list(g(x))",
    "heap": "import heapq\ndef f(x):\n    heapq.heapify(x)\n    return [heapq.heappop(x) for _ in range(len(x))]",
    "bisect": "import bisect\ndef f(x):\n    r = []\n    for y in x: bisect.insort(r, y)\n    return r",
    "callable-object": "class S:\n    def __call__(self, x): return sorted(x)\nf = S()",
    "bound-method": "class S:\n    def sort(self, x): return sorted(x)\nf = S().sort",
    "static-method": "class S:\n    @staticmethod\n    def sort(x): return sorted(x)\nf = S.sort",
    "lambda": "f = lambda x: sorted(x)",
    "partial": "import functools\nf = functools.partial(sorted, reverse=False)",
    "cache": "import functools\n@functools.lru_cache\ndef g(t): return sorted(t)\ndef f(x): return g(tuple(x))",
    "thread": """
        import threading
        def f(x):
            t = threading.Thread(target=x.sort)
            t.start(); t.join()
            return x
        """,
    "thread-pool": """
        from concurrent.futures import ThreadPoolExecutor
        def f(x):
            with ThreadPoolExecutor(2) as pool: return list(pool.map(int, sorted(x)))
        """,
    "asyncio": """
        import asyncio
        async def g(x):
            await asyncio.sleep(0)
            return sorted(x)
        def f(x): return asyncio.run(g(x))
        """,
    "child-process": """
        import subprocess
        def f(x):
            text = '\\n'.join(map(str, x))
            run = subprocess.run(['sort', '-n'], input=text, capture_output=True, text=True, check=True)
            return [int(line) for line in run.stdout.split()]
        """,
    "fork-and-pipe": """
        import json, os
        def f(x):
            r, w = os.pipe()
            if os.fork() == 0:
                os.write(w, json.dumps(sorted(x)).encode())
                os._exit(0)
            os.close(w); os.wait()
            return json.loads(os.read(r, 65536))
        """,
    "exec": "exec('def f(x): return sorted(x)')",
    "eval": "f = eval('lambda x: sorted(x)')",
    "metaclass": "class M(type):\n    def __call__(cls, x): return sorted(x)\nclass f(metaclass=M): pass",
    "dataclass": """
        import dataclasses
        @dataclasses.dataclass(order=True)
        class N:
            n: int
        def f(x): return [each.n for each in sorted(map(N, x))]
        """,
    "named-tuple": """
        from typing import NamedTuple
        class N(NamedTuple):
            n: int
        def f(x): return [e.n for e in sorted(map(N, x))]
        """,
    "list-of-a-class": "class L(list): pass\ndef f(x): return L(sorted(x))",
    "integers-of-a-class": "class I(int): pass\ndef f(x): return sorted(map(I, x))",
    "enumeration": """
        import enum
        def f(x):
            E = enum.IntEnum('E', {f'n{y}': y for y in x})
            return sorted(E(y) for y in x)
        """,
    "walrus": """
        def f(x):
            r = []
            while (n := len(x)) and (m := min(x)) is not None: x.remove(m); r.append(m)
            return r
        """,
    "future-annotations": """
        from __future__ import annotations
        def f(x: list[Undefined]) -> list[int]: return sorted(x)
        """,
    "coding-line": "# -*- coding: utf-8 -*-\n# größer\ndef f(x): return sorted(x)",
    "carriage-returns": "def f(x):\r\n    y = sorted(x)\r\n    return y\r\n",
    "byte-order-mark": "\ufeffdef f(x): return sorted(x)",
    "tabs-and-form-feeds": "\fdef f(x):\n\tif x:\n\t\treturn sorted(x)\n\treturn x",
    "other-letters": "def sortiere_größe(список): return sorted(список)\nf = sortiere_größe",
    "semicolons": "a = 1; b = 2; f = sorted; del a, b",
    "prints": "print('loading', flush=True)\ndef f(x):\n    print('got', x)\n    return sorted(x)",
    "standard-error": "import sys\ndef f(x):\n    sys.stderr.write('sorting\\n' * 1000)\n    return sorted(x)",
    "logging": """
        import logging
        logging.basicConfig(level=0)
        def f(x):
            logging.warning('%s', x)
            return sorted(x)
        """,
    "warning": "import warnings\ndef f(x):\n    warnings.warn('slow')\n    return sorted(x)",
    "standard-output-replaced": """
        import contextlib, io
        def f(x):
            with contextlib.redirect_stdout(io.StringIO()) as out: print(*sorted(x))
            return list(map(int, out.getvalue().split()))
        """,
    "deep-recursion": """
        import sys
        sys.setrecursionlimit(50000)
        def depth(n): return n and 1 + depth(n - 1)
        def f(x): return sorted(x) if depth(5000) == 5000 else None
        """,
    "counter": "from collections import Counter\ndef f(x): return sorted(Counter(x).elements())",
    "compare": "import functools\ndef f(x): return sorted(x, key=functools.cmp_to_key(lambda a, b: a - b))",
    "names-of-builtins": """
        list_, sorted_ = list, sorted
        def sorted(x): return list_(sorted_(x))
        def f(list): return sorted(list)
        """,
    "array": "import array\ndef f(x): return sorted(array.array('q', x).tolist())",
    "deep-copy": "import copy\ndef f(x):\n    y = copy.deepcopy(x)\n    y.sort()\n    return y",
    "random": "import random\ndef f(x):\n    random.shuffle(x)\n    return sorted(x)",
    "exception": """
        def f(x):
            try: return x.sort_all()
            except AttributeError as e: return sorted(x)
            finally: pass
        """,
    "alarm": """
        import signal
        def f(x):
            signal.signal(signal.SIGALRM, print)
            signal.alarm(5)
            try: return sorted(x)
            finally: signal.alarm(0)
        """,
    "garbage": "import gc\ngc.disable()\ndef f(x): return sorted(x)",
    "coroutine": """
        def g():
            x = yield
            while True: x = yield sorted(x)
        def f(x):
            c = g(); next(c)
            return c.send(x)
        """,
    "main-guard": "def f(x): return sorted(x)\nif __name__ == '__never__':\n    raise SystemExit(1)",
    "at-exit": "import atexit\natexit.register(lambda: None)\nf = sorted",
}
"""Sources by name; each also sorts with `code`, where programs cannot write files."""
WRITING = {
    "temporary-file": """
        import tempfile
        def f(x):
            with tempfile.TemporaryFile('w+') as t:
                print(*sorted(x), file=t); t.seek(0)
                return list(map(int, t.read().split()))
        """,
    "temporary-folder": """
        import pathlib, tempfile
        def f(x):
            with tempfile.TemporaryDirectory() as d:
                p = pathlib.Path(d, 'numbers'); p.write_text(' '.join(map(str, sorted(x))))
                return [int(n) for n in p.read_text().split()]
        """,
    "processes": """
        import multiprocessing as m
        def g(x, q): q.put(sorted(x))
        def f(x):
            c = m.get_context('fork'); q = c.Queue()
            p = c.Process(target=g, args=(x, q)); p.start()
            r = q.get(); p.join()
            return r
        """,
    "database": """
        import sqlite3
        def f(x):
            d = sqlite3.connect(':memory:')
            d.execute('create table t (n)'); d.executemany('insert into t values (?)', [(y,) for y in x])
            return [n for n, in d.execute('select n from t order by n')]
        """,
}
"""Sources that write files, or make semaphores, which are files."""
READS = {
    "input": "print(*sorted(map(int, input().split())))",
    "read": "import sys\nprint(*sorted(map(int, sys.stdin.read().split())))",
    "lines": "import sys\nfor line in sys.stdin: print(*sorted(map(int, line.split())))",
    "readline": """
        from sys import stdin, stdout
        stdout.write(' '.join(map(str, sorted(map(int, stdin.readline().split())))))
        """,
    "buffer": "import sys\nsys.stdout.buffer.write(b' '.join(sorted(sys.stdin.buffer.read().split(), key=int)))",
    "descriptor": "import os\nos.write(1, b' '.join(sorted(os.read(0, 65536).split(), key=int)) + b'\\n')",
    "open-zero": "print(*sorted(map(int, open(0).read().split())))",
    "file-input": "import fileinput\nfor line in fileinput.input(): print(*sorted(map(int, line.split())))",
    "trailing-space": "for n in sorted(map(int, input().split())): print(n, end=' ')\nprint()",
    "trailing-lines": "print(*sorted(map(int, input().split())), end='\\n\\n\\n')",
    "carriage-returns": "print(*sorted(map(int, input().split())), end='\\r\\n')",
    "main": "def main():\n    print(*sorted(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
    "exit": "import sys\nprint(*sorted(map(int, input().split())))\nsys.exit()",
    "exit-zero": "print(*sorted(map(int, input().split())))\nraise SystemExit(0)",
    "big-stack": """
        import sys, threading
        threading.stack_size(1 << 26)
        def main(): print(*sorted(map(int, input().split())))
        t = threading.Thread(target=main)
        t.start()
        """,
    "end-of-file": "a = []\ntry:\n    while True: a += map(int, input().split())\nexcept EOFError: print(*sorted(a))",
    "byte-order-mark": "\ufeffprint(*sorted(map(int, input().split())))",
    "late-output": "import atexit\na = sorted(map(int, input().split()))\natexit.register(lambda: print(*a))",
    "file-of-its-own": """
        open('numbers', 'w').write(input())
        print(*sorted(map(int, open('numbers').read().split())))
        """,
    "imports-itself": """
        import sys
        sys.modules['solution'] = sys.modules[__name__]
        import solution
        print(*sorted(map(int, input().split())))
        """,
    "own-module": """
        import pathlib
        pathlib.Path('helper_of_mine.py').write_text('order = sorted')
        import sys; sys.path.insert(0, '')
        import helper_of_mine
        print(*helper_of_mine.order(map(int, input().split())))
        """,
    "child": """
        import subprocess, sys
        subprocess.run(['sh', '-c', 'tr " " "\\\\n" | sort -n | tr "\\\\n" " "'], check=True)
        """,
}
"""Complete programs that sort the integers of one line."""
WRONG_VALUES = {
    "deque": "from collections import deque\ndef f(x): return deque(sorted(x))",
    "generator": "def f(x): yield from sorted(x)",
    "iterator": "def f(x): return iter(sorted(x))",
    "map": "def f(x): return map(int, sorted(x))",
    "keys": "def f(x): return dict.fromkeys(sorted(x)).keys()",
    "set": "def f(x): return set(x)",
    "frozen-set": "def f(x): return frozenset(x)",
    "fractions": "from fractions import Fraction\ndef f(x): return [Fraction(y) for y in sorted(x)]",
    "decimals": "from decimal import Decimal\ndef f(x): return [Decimal(y) for y in sorted(x)]",
    "text": "def f(x): return str(sorted(x))",
    "bytes": "def f(x): return bytes(sorted(x))",
    "array": "import array\ndef f(x): return array.array('q', sorted(x))",
    "texts": "def f(x): return list(map(str, sorted(x)))",
    "one-deeper": "def f(x): return [sorted(x)]",
    "reversed": "def f(x): return sorted(x)[::-1]",
    "as-given": "def f(x): return x",
    "one-less": "def f(x): return sorted(x)[:-1]",
    "one-more": "def f(x): return sorted(x) + [0]",
    "distinct": "def f(x): return sorted(set(x))",
    "dictionary": "def f(x): return dict(enumerate(sorted(x)))",
    "function": "def f(x): return lambda: sorted(x)",
    "itself": "def f(x):\n    x.append(x)\n    return x",
    "very-deep": "def f(x):\n    for _ in range(400): x = [x]\n    return x",
    "near": "def f(x): return [y + 1e-3 for y in sorted(x)]",
    "after-the-value": """
            import os, threading
            def f(x):
                threading.Timer(0.0, os._exit, (0,)).start()
                return x
            """,
    "coroutine": "async def f(x): return sorted(x)",
    "raised": "def f(x): raise StopIteration(sorted(x))",
    "class-attribute": "class f(list):\n    def __iter__(self): return iter(sorted(list(self)))",
}
"""Values that are not the sorted list: all score 0."""
