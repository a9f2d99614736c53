"""Tests of a shared verification find the policy's running processes, only by their sockets.

`make test LONG=1` runs a few of each kind, `make soak` all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.tasks.task_scores import Scores, task_scores
from tests.services.soak import at_length
from workers.cli.task_checks import CheckOptions
from workers.plugins.interfaces import Score

pytestmark = [pytest.mark.timeout(1800), pytest.mark.soak]
OPTIONS = CheckOptions(sandbox="namespace", n_parallel=2)
TABLES = "[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 60.0\n"


LISTENING = "until cat /proc/net/tcp /proc/net/tcp6 | grep -q ':1F90 .* 0A '; do sleep 0.1; done"
"""Waits until something listens at port 8080."""
_GET = "import sys, urllib.request as u; sys.stdout.buffer.write(u.urlopen(sys.argv[1], timeout=10).read())"


def comparison(command: str) -> str:
    """Return a test script that compares the output of a command, which may `get` the contents at an address."""
    return (
        f'#!/bin/bash\nget() {{ python3 -c "{_GET}" "$1"; }}\n'
        f'if [ "$({command})" = 42 ]; then echo 1 > /logs/verifier/reward.txt\n'
        "else echo 0 > /logs/verifier/reward.txt; fi\n"
    )


def unix(path: str) -> str:
    return (
        f"python3 -c \"import socket; s = socket.socket(1); s.settimeout(10); s.connect('{path}'); "
        "s.sendall(b'?'); print(s.recv(99).decode())\""
    )


def server_command(path: str, text: str = "42") -> str:
    """Return a command that answers at a Unix socket."""
    return (
        f"mkdir -p $(dirname {path}); nohup python3 -c \"import socket\ns = socket.socket(1)\ns.bind('{path}')\n"
        f"s.listen()\nwhile True:\n    c, _ = s.accept()\n    c.recv(9)\n    c.sendall(b'{text}')\n    c.close()\" "
        f"> /dev/null 2>&1 &\nuntil [ -S {path} ]; do sleep 0.1; done"
    )


COMPARED = comparison("get http://127.0.0.1:8080/answer | grep -x 42")
STARTED = f"cd /app; echo 42 > answer; nohup python3 -m http.server 8080 {{}} > /app/log 2>&1 &\n{LISTENING}"
LOW_PORT = STARTED.replace("8080", "80").replace("1F90", "0050").format("")
COUNTER = f"""cat > /app/count.py <<'END'
from http.server import BaseHTTPRequestHandler, HTTPServer
class Counter(BaseHTTPRequestHandler):
    n = 39
    def do_GET(self):
        Counter.n += 1
        self.send_response(200); self.end_headers(); self.wfile.write(str(Counter.n).encode())
HTTPServer(('127.0.0.1', 8080), Counter).serve_forever()
END
setsid python3 /app/count.py > /dev/null 2>&1 < /dev/null &
{LISTENING}"""
RIGHT = {
    "all addresses": (COMPARED, STARTED.format("")),
    "one address": (COMPARED, STARTED.format("--bind 127.0.0.1")),
    "ipv6": (comparison("get 'http://[::1]:8080/answer'"), STARTED.format("--bind ::")),
    "a low port": (comparison("get http://localhost/answer"), LOW_PORT),
    "state in memory": (
        comparison("A=http://localhost:8080; for i in 1 2; do get $A > /dev/null; done; get $A"),
        COUNTER,
    ),
    "unix socket": (comparison(unix("/run/app/app.sock")), server_command("/run/app/app.sock")),
    "unix socket in tmp": (comparison(unix("/tmp/app.sock")), server_command("/tmp/app.sock")),
    "two services": (
        comparison(f"get http://127.0.0.1:8080/answer > /tmp/a; {unix('/run/x.sock')} | cmp -s - /tmp/a; cat /tmp/a"),
        f"{STARTED.format('')}\n{server_command('/run/x.sock')}",
    ),
    "many connections": (
        comparison("for i in {1..60}; do get http://127.0.0.1:8080/answer & done | sort -u"),
        STARTED.format(""),
    ),
    "a large answer": (
        comparison("[ $(get http://127.0.0.1:8080/big | wc -c) = 50000000 ] && echo 42"),
        f"head -c 50000000 /dev/zero > /app/big; {STARTED.format('')}",
    ),
}  # fmt: skip
WRITE = (
    "mkdir -p /logs/verifier; while true; do echo 1 > /logs/verifier/reward.txt; sleep 0.05; done > /dev/null 2>&1 &"
)
LISTEN = "python3 -c \"import socket, time\ns = socket.create_server(('', 8080))\n{}\" > /dev/null 2>&1 &\n" + LISTENING
WRONG = {
    "nothing runs": (COMPARED, "echo 42 > /app/answer"),
    "it was stopped": (COMPARED, f"{STARTED.format('')}\nkill %1; sleep 0.5"),
    "a wrong answer": (COMPARED, STARTED.format("").replace("echo 42", "echo 41")),
    "it never answers": (COMPARED, LISTEN.format("time.sleep(1000)")),
    "it hangs up": (COMPARED, LISTEN.format("while True: s.accept()[0].close()")),
    "it never ends": (COMPARED, LISTEN.format("c = s.accept()[0]\nwhile True: c.sendall(b'x' * 65536)")),
    "it writes the reward": (COMPARED, f"{WRITE}\n{LISTEN.format('time.sleep(1000)')}"),
    "it replaces the tests": (
        COMPARED,
        "while true; do mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; done "
        "> /dev/null 2>&1 &\n"
        + LISTEN.format("time.sleep(1000)"),
    ),
    "a socket in place of the reward": (COMPARED, server_command("/logs/verifier/reward.txt")),
    "a socket in place of a program": (COMPARED, f"rm -f /usr/bin/grep; {server_command('/usr/bin/grep')}"),
    "a socket in place of the logs": (COMPARED, f"rm -rf /logs; {server_command('/logs')}"),
    "many sockets": (
        COMPARED,
        "nohup python3 -c \"import socket, time\ns = [socket.create_server(('', 9000 + n)) for n in range(500)]\n"
        f'time.sleep(1000)" > /dev/null 2>&1 &\n{LISTENING.replace("1F90", "2519")}',
    ),
    "it kills all": (COMPARED, f"{STARTED.format('')}\n(sleep 1; kill -9 -1) > /dev/null 2>&1 &"),
}  # fmt: skip
FEW_RIGHT = ("all addresses", "state in memory", "unix socket")
FEW_WRONG = ("nothing runs", "it hangs up", "it writes the reward", "a socket in place of the logs")
SELECTED = {
    **at_length({name: RIGHT[name] for name in FEW_RIGHT}, RIGHT),
    **at_length({name: WRONG[name] for name in FEW_WRONG}, WRONG),
}


@pytest.fixture(scope="module")
def scores(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Scores:
    tasks = {name: (*task, TABLES) for name, task in SELECTED.items()}
    return task_scores(tmp_path_factory.mktemp("services"), tasks, OPTIONS)


@pytest.mark.parametrize("name", SELECTED)
def test_service_of_the_policy_is_reachable_during_the_tests(scores: Scores, name: str) -> None:
    score = scores[name]
    assert isinstance(score, Score), score
    assert score.value == float(name in RIGHT), score
    assert name not in RIGHT or score.details["services"], score
    # the names of its addresses, which the image lacks, are not its leftovers
    assert "/etc/hosts" not in score.details.get("restored", ()), score
