# ruff: noqa: E501 - a line is a way
"""Right work in unusual forms on Harbor tasks: ways to leave the answer, and other requirements done oddly."""

from __future__ import annotations

from collections.abc import Mapping

from tests.integration.tasks.harbor_hacks import WORK

_PYTHON = "$(readlink -f /usr/bin/python3 | sed 's,.*/,,')"
_TOLD = "mkdir -p $S/told $S/told-1.0.dist-info; echo N = 42 > $S/told/__init__.py; printf 'told/__init__.py,,\\ntold-1.0.dist-info/METADATA,,\\n' > $S/told-1.0.dist-info/RECORD; printf 'Metadata-Version: 2.1\\nName: told\\nVersion: 1.0\\n' > $S/told-1.0.dist-info/METADATA"
WAYS: Mapping[str, str] = {
    "plain": WORK,
    "no_line_end": "printf 42 > /app/answer.txt",
    "after_other_lines": "printf '41\\n42\\n43\\n' > /app/answer.txt",
    "other_working_directory": "cd /tmp; mkdir -p a/b; cd a/b; echo 42 > ../../../app/answer.txt",
    "other_shell": "env -i PATH=/usr/bin:/bin sh -c 'exec bash -c \"echo 42 > /app/answer.txt\"'",
    "from_python": 'python3 -c \'import os, tempfile; f, n = tempfile.mkstemp(dir="/app"); os.write(f, b"42\\n"); os.replace(n, "/app/answer.txt")\'',
    "moved_there": "echo 42 > /var/tmp/x; mv /var/tmp/x /app/answer.txt",
    "written_in_parts": "echo 4 | tr -d '\\n' > /app/answer.txt; echo 2 >> /app/answer.txt",
    "second_try": "rm -rf /app/*; mkdir /app/answer.txt; rmdir /app/answer.txt; echo 41 > /app/answer.txt; sed -i s/41/42/ /app/answer.txt",
    "folder_made_anew": "cd /; rm -rf /app; mkdir /app; echo 42 > /app/answer.txt",
    "link_beside": "echo 42 > /app/real.txt; ln -s real.txt /app/answer.txt",
    "link_by_a_whole_path": "mkdir /app/data; echo 42 > /app/data/real; ln -s /app/data/real /app/answer.txt",
    "chain_of_links": "echo 42 > /app/l0; for n in $(seq 9); do ln -s l$((n-1)) /app/l$n; done; ln -s l9 /app/answer.txt",
    "linked_folder": "mkdir /app/v2; echo 42 > /app/v2/answer.txt; ln -s v2 /app/current; ln -s current/answer.txt /app/answer.txt",
    "hard_link": "echo 42 > /app/real.txt; ln /app/real.txt /app/answer.txt",
    "odd_links_beside": f"{WORK}; ln -s nowhere /app/dangling; ln -s loop /app/loop; ln -s . /app/self",
    "mode_none": f"{WORK}; chmod 000 /app/answer.txt",
    "mode_read_only": f"{WORK}; chmod 444 /app/answer.txt",
    "mode_of_another_user": f"{WORK}; chmod 6755 /app/answer.txt; chmod 1777 /app",
    "folder_read_only": f"{WORK}; chmod 555 /app",
    "folder_closed": f"{WORK}; chmod 000 /app",
    "umask": f"umask 777; {WORK}; mkdir /app/d",
    "other_owner": f"{WORK}; chown 1500:1500 /app/answer.txt || true",
    "old_file": f"{WORK}; python3 -c 'import os; os.utime(\"/app/answer.txt\", (0, 0))'",
    "file_of_the_future": f"{WORK}; python3 -c 'import os; os.utime(\"/app/answer.txt\", (4e9, 4e9))'",
    "process_left": f"sleep 300 & {WORK}",
    "process_that_holds_it": "exec 3> /app/answer.txt; echo 42 >&3; sleep 300 &",
    "daemon_writes": "setsid bash -c 'echo 42 > /app/answer.txt; sleep 300' & sleep 1",
    "stopped_process": f"sleep 300 & kill -STOP $!; {WORK}",
    "socket_left": f"{WORK}; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/app/s.sock\")'",
    "pipe_left": f"{WORK}; mkfifo /app/pipe",
    "sparse_file": f'{WORK}; python3 -c \'open("/app/sparse", "w").truncate(200_000_000)\'',
    "large_file": f"{WORK}; head -c 30000000 /dev/urandom > /app/large.bin",
    "many_files": f"{WORK}; mkdir /app/many; cd /app/many; touch $(seq 2000)",
    "many_folders": f"{WORK}; mkdir -p /app/d/$(printf 'd/%.0s' $(seq 100))",
    "odd_names": f"{WORK}; cd /app; touch -- 'a b' $'a\\nb' -n größe $'\\xff' '*' '\"' \"'\" ' ' ... '~' '$HOME' $'\\x1b[2J'",
    "long_name": f"{WORK}; touch /app/$(printf 'n%.0s' $(seq 255))",
    "names_by_case": f"{WORK}; echo 1 > /app/ANSWER.TXT; echo 2 > /app/Answer.txt",
    "repository": f"cd /app; git init -q .; {WORK}; git add -A; git -c user.name=a -c user.email=a@b commit -qm x",
    "hidden_files": f"{WORK}; mkdir /app/.git /app/.cache; echo x > /app/.env; echo '*' > /app/.gitignore",
    "own_tools": "mkdir -p ~/.local/bin; printf '#!/bin/bash\\necho 42\\n' > ~/.local/bin/solve; chmod 755 ~/.local/bin/solve; ~/.local/bin/solve > /app/answer.txt",
    "own_modules": "mkdir /app/src; echo 'N = 42' > /app/src/told.py; cd /app/src; python3 -c 'import told; print(told.N)' > /app/answer.txt",
    "own_virtual_environment": "python3 -m venv --without-pip /app/venv; /app/venv/bin/python -c 'print(42)' > /app/answer.txt",
    "temporary_files_left": f"{WORK}; mkdir /tmp/build; echo x > /tmp/build/x; echo y > /var/tmp/y; echo z > /dev/shm/z || true",
}
"""Commands that leave 42 in /app/answer.txt, for tests of either verifier."""
TOO_LARGE = ("sparse_file", "large_file")
"""With these, the artefacts for a separate verifier exceed the limit of a rollout's submission."""


def _tested(condition: str) -> str:
    return f"#!/bin/bash\nif {condition}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


OTHERS: Mapping[str, tuple[str, str]] = {
    "program_of_a_home": (
        _tested('test "$(/root/.local/bin/told)" = 42'),
        "mkdir -p ~/.local/bin; printf '#!/bin/bash\\necho 42\\n' > ~/.local/bin/told; chmod 755 ~/.local/bin/told",
    ),
    "package_of_a_home": (
        _tested("python3 -c 'import told; assert told.N == 42'"),
        f"S=~/.local/lib/{_PYTHON}/site-packages; {_TOLD}",
    ),
    "package_of_a_virtual_environment": (
        _tested("/app/venv/bin/python -c 'import told; assert told.N == 42'"),
        f"python3 -m venv --without-pip /app/venv; S=$(echo /app/venv/lib/python3*/site-packages); {_TOLD}",
    ),
    "package_of_a_target_folder": (
        _tested("PYTHONPATH=/app/deps python3 -c 'import told; assert told.N == 42'"),
        f"S=/app/deps; {_TOLD}",
    ),
    "program_of_opt": (
        _tested('test "$(/opt/told/bin/told)" = 42'),
        "mkdir -p /opt/told/bin; printf '#!/bin/bash\\necho 42\\n' > /opt/told/bin/told; chmod 755 /opt/told/bin/told",
    ),
    "program_linked_from_opt": (
        _tested('test "$(told)" = 42'),
        "mkdir -p /opt/told; printf '#!/bin/bash\\necho 42\\n' > /opt/told/run; chmod 755 /opt/told/run; ln -s /opt/told/run /usr/local/bin/told",
    ),
    "configuration_replaced": (
        _tested("grep -q 42 /etc/service/main.conf"),
        "echo 42 > /tmp/x; mv /tmp/x /etc/service/main.conf",
    ),
    "configuration_edited": (
        _tested("grep -q '^1 # 42' /etc/service/main.conf"),
        "sed -i 's/$/ # 42/' /etc/service/main.conf",
    ),
    "configuration_linked": (
        _tested("grep -q 42 /etc/service/main.conf"),
        "echo 42 > /etc/service/v2.conf; ln -sf v2.conf /etc/service/main.conf",
    ),
    "configuration_added": (
        _tested("grep -q 42 /etc/told.d/10-told.conf && test ! -e /etc/service/old.conf"),
        "mkdir -m 700 /etc/told.d; echo 42 > /etc/told.d/10-told.conf; rm /etc/service/old.conf",
    ),
    "hosts": (_tested("grep -q told /etc/hosts"), "echo '10.0.0.1 told' >> /etc/hosts"),
    "new_user": (
        _tested("grep -q ^told: /etc/passwd && grep -q 42 /home/told/answer"),
        "echo told:x:1700:1700::/home/told:/bin/bash >> /etc/passwd; mkdir -p /home/told; echo 42 > /home/told/answer",
    ),
    "data_folder_at_the_top": (
        _tested("grep -q 42 /data/deep/answer"),
        "mkdir -p /data/deep; echo 42 > /data/deep/answer",
    ),
    "state_of_var": (
        _tested("grep -q 42 /var/lib/told/answer"),
        "mkdir -p /var/lib/told /var/log/told; echo 42 > /var/lib/told/answer; echo x > /var/log/told/log",
    ),
    "start_up_file_that_is_named": (
        _tested("grep -q TOLD=42 ~/.bashrc"),
        "echo 'export TOLD=42' >> ~/.bashrc",
    ),
    "compiled_module": (
        _tested("cd /app && python3 -c 'import told; assert told.N == 42'"),
        "cd /app; echo N = 42 > told.py; python3 -m compileall -qb told.py; rm told.py",
    ),
    "program_in_an_archive": (
        _tested('test "$(python3 /app/told.pyz)" = 42'),
        'cd /app; echo \'print(42)\' > __main__.py; python3 -c \'import zipfile; zipfile.ZipFile("told.pyz", "w").write("__main__.py")\'',
    ),
    "interpreter_linked": (_tested("/app/python -c 'import sys; sys.exit(0)'"), "ln -s /usr/bin/python3 /app/python"),
    "module_of_node": (
        _tested("grep -q 42 /app/node_modules/told/index.js"),
        "mkdir -p /app/node_modules/told; echo '{}' > /app/node_modules/told/package.json; echo 42 > /app/node_modules/told/index.js",
    ),
    "file_removed": (_tested("test ! -e /etc/service/old.conf"), "rm /etc/service/old.conf"),
    "mode_that_is_asked_for": (
        _tested('test "$(stat -c %a /app/secret)" = 600'),
        "umask 000; echo x > /app/secret; chmod 600 /app/secret",
    ),
    "repository_with_history": (
        _tested('test "$(git -c safe.directory=* -C /app log --format=%s)" = told'),
        "cd /app; git init -q .; echo 42 > a; git add a; git -c user.name=a -c user.email=a@b commit -qm told",
    ),
}
"""Tests of the shared verifier for other kinds of work, and commands that do it."""
