"""Names that a program can use without importing them, as its form's scorer imports them for every program.

Part of programs that are sent into sandboxes as text; standard library only, for Python 3.8 or newer. The names of a
module that is missing in the sandbox, such as numpy, are omitted.
"""

from __future__ import annotations

import sys
from typing import Any

_SITES = (
    "import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys",
    *(f"from {name} import *" for name in ("collections", "functools", "heapq", "itertools", "math", "typing")),
)
_LIVECODEBENCH_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
_LIVECODEBENCH = (
    *(f"from {name} import *" for name in (*_LIVECODEBENCH_MODULES, "builtins", "typing")),
    f"import {', '.join(_LIVECODEBENCH_MODULES)}",
)
_APPS = (
    "import sys, time, itertools, collections, math, fractions, random, heapq",
    "from itertools import accumulate, product, permutations, combinations",
    "from collections import Counter, OrderedDict, deque, defaultdict, ChainMap",
    "from functools import lru_cache",
    "from math import sqrt, sin, cos, tan, ceil, fabs, floor, gcd, exp, log, log2",
    "from typing import List, Tuple",
    "from heapq import *",
    "import numpy as np",
)
_SKYRL = (
    "from string import ascii_lowercase, ascii_uppercase",
    "from math import floor, log2, log10, sqrt, comb, gcd, ceil, inf, isqrt, factorial, atan2, pi, log, prod",
    "from heapq import heappush, heappop, heapify, merge, nlargest, nsmallest, heapreplace",
    "from functools import reduce, cache, lru_cache, cmp_to_key, partial",
    "from random import randrange, shuffle",
    "from operator import itemgetter, sub, xor, or_, iand",
    "from re import search as re_search",
    "from os.path import commonprefix",
    "from typing import List, Tuple, Dict, Set, Optional, Union, Any, Callable, Iterable, Iterator, Generator, Deque",
    "from copy import deepcopy",
    "from bisect import bisect_left, bisect_right, insort",
    "from time import time",
    "from collections import deque, defaultdict, Counter, OrderedDict",
    "from itertools import accumulate, chain, combinations, count, permutations, product, groupby, islice, repeat",
    "from itertools import zip_longest, cycle",
    "from itertools import pairwise",
    "import copy, string, math, collections, bisect, heapq, functools, random, itertools, operator, re, datetime",
    "import sys, io, os",
    "import numpy as np",
    "import pandas as pd",
)
_IMPORTS = {
    "": _SITES,
    "livecodebench": _LIVECODEBENCH,
    "nemo_gym": _LIVECODEBENCH,
    "prime_code": _LIVECODEBENCH,
    "skyrl_lcb": _SKYRL,
    "apps": _APPS,
    "taco": _APPS,
}
"""By the name of a form's rule."""
_DIGITS, _MORE_DIGITS = 50_000, {"nemo_gym": 1 << 20}
"""Maximum digits of an integer converted from or to text, by the name of a rule."""
_DEPTH, _MORE_DEPTH = 100_000, {"prime_code": 600_000}
"""Maximum recursion depth, by the name of a rule."""


def usual_names(rule: str) -> dict[str, Any]:
    """Return the names for programs of a form."""
    scope: dict[str, Any] = {}
    for line in _IMPORTS.get(rule, ()):
        try:
            exec(line, scope)  # noqa: S102
        except ImportError:
            continue
    if rule:
        scope.update(stdin=sys.stdin, stdout=sys.stdout)
    else:
        # As it hides the usual one.
        scope.pop("pow", None)
    scope.pop("__builtins__", None)
    return scope


def lift_limits(rule: str) -> None:
    """Raise the limits of integers' digits and of recursion to those of the scorers."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(_MORE_DIGITS.get(rule, _DIGITS))
    sys.setrecursionlimit(_MORE_DEPTH.get(rule, _DEPTH))
