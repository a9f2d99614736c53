"""The grader: a fork server that has imported one library, and scores each answer in its own fork.

It never evaluates text of a policy in this process, so its report about a scorer can be trusted: it reads the score
from a pipe, checks that it is a number, and reports the scorer's end. A fork takes milliseconds, the imports a second.
Requests and replies are JSON lines. At its start it drops root and the network, then scores known right and wrong
answers, and exits if it cannot distinguish them. It ends when its parent does.
"""

from __future__ import annotations

import gc
import json
import math
import os
import pwd
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from farm.startup import frozen_imports
from workers.evaluators import scorer
from workers.evaluators.answers import equality
from workers.evaluators.answers.authors import prm800k
from workers.evaluators.answers.authors.sympy_rules import SYMPY_RULES
from workers.evaluators.answers.late_imports import LateImports, import_all
from workers.sandboxes.isolation import linux

_CPU_SHARE = 1 / 8
_MAX_CPU_S = 10.0
"""CPU seconds of a scorer: it only computes, so a hanging one reaches this limit even on a busy machine."""
_MAX_EXTENSIONS = 2
_LATE_SHARE = 0.25
"""A scorer that waited for a CPU for this share of its limit gets the limit again: slow is not wrong."""
_MAX_REPLY = 1 << 16
_OF_TUPLES = frozenset({"arc_agi", "rearc"})
"""Families whose verifiers compare with tuples of their entries, which are lists in JSON."""


def main(user: str, library: str) -> None:
    answers = _private_stdout()
    late = LateImports()
    chosen = LIBRARIES[library]
    # Takes seconds, which the first answer should not wait for; the confined user may be unable to read it.
    with frozen_imports():
        known_answers = chosen.load()
        if not _can_import(user, late):
            import_all(chosen.packages)
            chosen.load_verifiers()
    _confine(user)
    late.close()
    # Otherwise the first garbage collection in each fork would copy all shared memory.
    gc.collect()
    gc.freeze()
    failure = next(filter(None, (_failure(known, late) for known in known_answers)), "")
    print(json.dumps({"failure": failure}), file=answers, flush=True)
    if not failure:
        GraderServer(answers, late).serve()


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """An answer with a known verdict: a grader proves itself by some."""

    family: str
    entry: dict[str, Any]
    answer: str
    is_right: bool


_PROVEN_FAMILIES = ("gcd", "string_insertion", "simple_integration", "polynomial_multiplication", "countdown")
"""Families for each kind of verifier: text, evaluated text, and several calls of sympy."""


def _load_reasoning_gym() -> list[KnownAnswer]:
    import reasoning_gym

    known = []
    for family in _PROVEN_FAMILIES:
        entry = reasoning_gym.create_dataset(family, size=1, seed=1)[0]
        known += [
            KnownAnswer(family, entry, entry["answer"], True),
            KnownAnswer(family, entry, "no such answer", False),
        ]
    for each in known:
        with suppress(Exception):
            _verifier(each.family)(each.answer, each.entry)
    return known


def _load_families() -> None:
    from reasoning_gym.factory import DATASETS

    for family in DATASETS:
        # A family that needs options fails by name when it is requested.
        with suppress(Exception):
            _verifier(family)


def _load_math_verify() -> list[KnownAnswer]:
    equality.load()
    known = [
        KnownAnswer(equality.FAMILY, {"gold": gold}, answer, right) for gold, answer, right in equality.KNOWN_PAIRS
    ]
    for each in known:
        equality.equal(each.answer, each.entry)
    return known


@dataclass(frozen=True, slots=True)
class _Library:
    """A library for a grader: `load` uses it once and returns known answers to test it with."""

    load: Callable[[], list[KnownAnswer]]
    load_verifiers: Callable[[], None]
    packages: tuple[str, ...]


LIBRARIES = {
    "reasoning-gym": _Library(_load_reasoning_gym, _load_families, ("reasoning_gym", "sympy", "mpmath")),
    equality.FAMILY: _Library(
        _load_math_verify, lambda: None, ("math_verify", "latex2sympy2_extended", "sympy", "mpmath")
    ),
}


def _can_import(user: str, late: LateImports) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _confine(user)
            code = 0 if late.are_readable() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _failure(known: KnownAnswer, late: LateImports) -> str:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        scorer.run(_verifier(known.family), known.answer, known.entry, _MAX_CPU_S, write_end, late)
    os.close(write_end)
    with open(read_end, "rb") as pipe:  # noqa: PTH123
        reply = _checked(pipe.read(_MAX_REPLY))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    is_right = reply is not None and reply.get("score", 0.0) >= 1.0
    if is_right == known.is_right and reply is not None and "broken" not in reply:
        return ""
    expected = "right" if known.is_right else "wrong"
    return f"{known.family} finds {known.answer[:100]!r} not to be {expected}: {reply or f'exit status {code}'}"


def _private_stdout() -> IO[str]:
    private = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    return private


def _confine(user: str) -> None:
    if os.getuid() == 0:
        account = pwd.getpwnam(user)
        linux.set_ids(account.pw_uid, account.pw_gid)
    # If user namespaces are forbidden, only the system call filter keeps scorers off the network.
    with suppress(OSError):
        linux.unshare(linux.NEWUSER | linux.NEWNET)
    linux.no_new_privileges()
    linux.die_with_parent(signal.SIGKILL)  # after the change of user, which clears it
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@dataclass(slots=True)
class _Scoring:
    number: int
    pid: int
    limit_s: float
    deadline: float
    n_extensions: int = 0
    reply: bytearray = field(default_factory=bytearray)

    def extend(self, waited_s: float) -> bool:
        """Extend the limit of a scorer that waited for a CPU for so many seconds; return whether it was that late."""
        if self.n_extensions == _MAX_EXTENSIONS or waited_s < _LATE_SHARE * self.limit_s * (self.n_extensions + 1):
            return False
        self.n_extensions += 1
        self.deadline += self.limit_s
        return True


class GraderServer:
    """Reads requests from standard input until it ends; scorers run concurrently."""

    def __init__(self, answers: IO[str], late: LateImports) -> None:
        self._answers = answers
        self._late = late
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._running: dict[int, _Scoring] = {}
        self._missed: dict[str, list[str]] = {}
        self._line = bytearray()

    def serve(self) -> None:
        while True:
            deadlines = [scoring.deadline for scoring in self._running.values()]
            next_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for key, _ in self._selector.select(next_s):
                if key.fd != 0:
                    self._hear(key.fd)
                elif not self._take():
                    return
            for pipe in [pipe for pipe, scoring in self._running.items() if scoring.deadline <= time.monotonic()]:
                scoring = self._running[pipe]
                if scoring.extend(_waited_s(scoring.pid)):
                    self._write({"id": scoring.number, "extended_s": scoring.limit_s})
                else:
                    self._end(pipe, timed_out=True)

    def _take(self) -> bool:
        data = os.read(0, 1 << 16)
        *lines, rest = (bytes(self._line) + data).split(b"\n")
        self._line = bytearray(rest)
        for line in lines:
            self._start(json.loads(line))
        return bool(data)

    def _start(self, request: dict[str, Any]) -> None:
        family, error = request["family"], ""
        # A scorer inherits the missed modules of its own family only.
        self._late.missed[:] = self._missed.get(family, [])
        try:
            verifier = _verifier(family)
            if settings := request.get("settings"):
                # The dataset is created in the scorer, as its settings may make that slow.
                verifier = partial(_score_with_settings, family, settings)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:500]
        self._missed[family] = list(self._late.missed)
        if self._late.missed:
            self._say(request["id"], {"broken": f"cannot import {self._late.missed[0]}"}, {"code": 0})
            return
        if error:
            self._say(request["id"], {"error": error}, {"code": 0})
            return
        read_end, write_end = os.pipe()
        limit_s = request["limit_s"]
        deadline = time.monotonic() + limit_s
        pid = os.fork()
        if pid == 0:
            cpu_s = min(_MAX_CPU_S, limit_s * _CPU_SHARE)
            entry = _in_tuples(request["entry"]) if family in _OF_TUPLES else request["entry"]
            scorer.run(verifier, request["answer"], entry, cpu_s, write_end, self._late)
        os.close(write_end)
        self._running[read_end] = _Scoring(request["id"], pid, limit_s, deadline)
        self._selector.register(read_end, selectors.EVENT_READ)

    def _hear(self, pipe: int) -> None:
        chunk = os.read(pipe, _MAX_REPLY)
        reply = self._running[pipe].reply
        reply += chunk
        if not chunk or len(reply) > _MAX_REPLY:
            self._end(pipe)

    def _end(self, pipe: int, *, timed_out: bool = False) -> None:
        self._selector.unregister(pipe)
        os.close(pipe)
        scoring = self._running.pop(pipe)
        waited_s = _waited_s(scoring.pid)
        # An exiting scorer keeps its own exit code.
        os.kill(scoring.pid, signal.SIGKILL)
        _, status, used = os.wait4(scoring.pid, 0)
        end = {
            "code": None if timed_out else os.waitstatus_to_exitcode(status),
            "timed_out": timed_out,
            "limit_s": scoring.limit_s * (1 + scoring.n_extensions),
            "cpu_s": used.ru_utime + used.ru_stime,
            "waited_s": waited_s,
        }
        self._say(scoring.number, None if timed_out else _checked(bytes(scoring.reply)), end)

    def _say(self, number: int, reply: dict[str, Any] | None, end: dict[str, Any]) -> None:
        self._write({"id": number, "reply": reply, "end": end})

    def _write(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._answers, flush=True)


def _checked(data: bytes) -> dict[str, Any] | None:
    """Return a scorer's reply: a finite score, or an error, a refusal or a fault in words; None if malformed."""
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict) or len(reply) != 1:
        return None
    name, value = next(iter(reply.items()))
    if name == "score" and type(value) is float:
        return reply if math.isfinite(value) else {"error": f"the score is {value}"}
    return reply if name in ("error", "refused", "broken") and isinstance(value, str) else None


def _waited_s(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        # The kernel does not count it.
        return 0.0


@cache
def _verifier(family: str) -> scorer.Verifier:
    if family == equality.FAMILY:
        return equality.equal
    if family == equality.WHOLE_RESPONSE:
        return equality.of_whole_response
    if family in SYMPY_RULES:
        prm800k.load()
        return SYMPY_RULES[family].equal
    from reasoning_gym.factory import get_score_answer_fn

    verifier: scorer.Verifier = get_score_answer_fn(family)
    return verifier


def _in_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_tuples(each) for name, each in value.items()}
    return tuple(map(_in_tuples, value)) if isinstance(value, list) else value


def _score_with_settings(family: str, settings: dict[str, Any], answer: str, entry: dict[str, Any]) -> float:
    from reasoning_gym import create_dataset

    return float(create_dataset(family, **settings).score_answer(answer, entry))


def command(user: str, library: str) -> list[str]:
    """Return the command that starts a library's grader; as root, it switches to the account `user`."""
    # Until the grader has set this itself, after a second.
    bound = ["setpriv", "--pdeathsig", "KILL", "--"]
    return [*bound, sys.executable, "-I", "-m", __name__, user, library]


def environment() -> dict[str, str]:
    """Return the grader's environment, without the farm's settings and keys."""
    folder = str(Path(sys.executable).parent)
    return {"PATH": f"{folder}:/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main(*sys.argv[1:])
