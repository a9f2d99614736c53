"""Installers in builds and in sandboxes: apt, dpkg and package scripts change users and owners, and check it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testkit.scratch_folder import sandbox_config
from tests.conftest import absent
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.images.image import set_alias

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

NEEDED = ("apt-get", "dpkg-deb", "useradd", "groupadd", "su", "runuser", "setpriv", "start-stop-daemon")

# the node's own Debian, with the few system files that its image `host` lacks
DOCKERFILE = """\
FROM debian:installers
RUN mkdir -p /var/lib/dpkg/info /var/lib/dpkg/updates /var/lib/dpkg/triggers /var/lib/apt/lists /var/log/apt \\
  && mkdir -p /var/cache/apt/archives /etc/apt/apt.conf.d /etc/apt/preferences.d /etc/dpkg /etc/pam.d \\
  && cd /var/lib/dpkg && touch status available \\
  && echo 'auth sufficient pam_rootok.so' >/etc/pam.d/su && echo 'account required pam_permit.so' >>/etc/pam.d/su \\
  && echo 'session required pam_permit.so' >>/etc/pam.d/su && cp /etc/pam.d/su /etc/pam.d/runuser \\
  && useradd --system --no-create-home --home-dir /nonexistent _apt
COPY served/ /repository/served/
RUN cd /repository && chmod 755 served/DEBIAN/postinst && dpkg-deb --build served served_1_all.deb \\
  && cp served/DEBIAN/control Packages && echo "Filename: ./served_1_all.deb" >>Packages \\
  && echo "Size: $(stat -c %s served_1_all.deb)" >>Packages \\
  && echo "SHA256: $(sha256sum served_1_all.deb | cut -c 1-64)" >>Packages \\
  && echo 'deb [trusted=yes] file:/repository ./' >/etc/apt/sources.list
RUN apt-get update && apt-get install -y served
RUN useradd --create-home --uid 1500 app && chown -R app:app /home/app \\
  && cp /usr/bin/id /opt/id-of-root && chmod 4755 /opt/id-of-root
USER app
RUN id -u >/home/app/who && touch /home/app/mine && mkdir /home/app/folder && ! chown 0:0 /home/app/mine \\
  && /opt/id-of-root >>/home/app/who
USER root
"""
CONTROL = """\
Package: served
Version: 1
Architecture: all
Maintainer: nobody <nobody@example.org>
Description: a daemon's user and files
"""
POSTINST = """\
#!/bin/sh
set -e
getent passwd served >/dev/null || useradd --system --no-create-home --shell /bin/sh served
chown -R served:served /opt/served
su served -c 'touch /opt/served/by-su; id -un >/opt/served/who'
install -o served -g served -d /opt/served/installed
test "$(stat -c %U /opt/served/who)" = served
"""

# as a sandbox's programs would: each line is a program's output
AS_ROOT = {
    "su": "su app -c 'id -u; id -g; id -un'",
    "runuser": "runuser -u app -- id -u",
    "setpriv": "setpriv --reuid app --regid app --init-groups id -Gn",
    "setpriv-clear": "setpriv --reuid 1500 --regid 1600 --clear-groups sh -c 'id -u; id -g'",
    "start-stop-daemon": "start-stop-daemon --start --chuid app --exec /usr/bin/id -- -u",
    "chroot": "chroot --userspec=app:app / id -u",
    "useradd": "useradd -m -u 1777 other && su other -c 'cd && pwd && touch f && stat -c %U f . && test -O f'",
    "groupadd": "groupadd -g 1888 more && usermod -aG more app && su app -c 'id -Gn'",
    "install": "install -o app -g app -m 640 /etc/hostname /tmp/i && stat -c '%U:%G %a' /tmp/i",
    "chown": "mkdir -p /tmp/c/d && chown -R app:app /tmp/c && stat -c %U:%G /tmp/c/d",
    "tar": "mkdir /tmp/t && tar -C /tmp -cf /tmp/t.tar --owner=app --group=app i && tar -C /tmp/t -xpf /tmp/t.tar"
    " && stat -c %U /tmp/t/i",
    "umask": "su app -c 'umask 077; mkdir /tmp/u; echo x >/tmp/u/f; stat -c \"%a %U\" /tmp/u /tmp/u/f'",
    "refused": "su app -c 'chown 0 /tmp/c/d 2>&1; echo $?' | tail -1",
    "background": "su app -c '(sleep 0.3; id -u >/tmp/late) & exit' ; sleep 0.8; cat /tmp/late",
    "apt": "apt-get remove -y served >/dev/null && apt-get update >/dev/null && apt-get install -y served >/dev/null"
    " && stat -c %U /opt/served/by-su /opt/served/installed && cat /opt/served/who",
    "verify": "apt-get -o APT::Sandbox::Verify=true update >/dev/null && echo fine",
}
ANSWERS = {
    "su": "1500 1500 app",
    "runuser": "1500",
    "setpriv": "app",
    "setpriv-clear": "1500 1600",
    "start-stop-daemon": "1500",
    "chroot": "1500",
    "useradd": "/home/other other other",
    "groupadd": "app more",
    "install": "app:app 640",
    "chown": "app:app",
    "tar": "app",
    "umask": "700 app 600 app",
    "refused": "1",
    "background": "1500",
    "apt": "served served served",
    "verify": "fine",
}

PEER = """
import os, socket, struct, sys
if sys.argv[1] == "serve":
    server = socket.socket(socket.AF_UNIX)
    server.bind("/tmp/peer")
    server.listen()
    connection, _ = server.accept()
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    print(pid > 0, uid, gid)
else:
    client = socket.socket(socket.AF_UNIX)
    client.connect("/tmp/peer")
    client.recv(1)
"""


@pytest.fixture
def name(sandbox_settings: None, tmp_path: Path) -> str:
    """Return a build context whose image has apt, a package that it installed, and a user `app`."""
    if missing := [program for program in NEEDED if not shutil.which(program)]:
        absent(f"no Debian to build on here: {', '.join(missing)}")
    set_alias(sandbox_config(), "debian:installers", "host")
    (tmp_path / "served/DEBIAN").mkdir(parents=True)
    (tmp_path / "served/opt/served").mkdir(parents=True)
    (tmp_path / "served/DEBIAN/control").write_text(CONTROL)
    (tmp_path / "served/DEBIAN/postinst").write_text(POSTINST)
    (tmp_path / "served/opt/served/data").write_text("data\n")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    return f"dockerfile:{tmp_path}"


def output_of(run: Run, sandbox: Sandbox, script: str) -> str:
    result = run(sandbox.exec(["bash", "-c", script], timeout_s=60))
    assert (result.stderr, result.code) == (b"", 0), script
    return " ".join(result.stdout.decode().split())


def test_apt_installs_in_a_build_and_in_a_sandbox(start: Start, run: Run, name: str) -> None:
    sandbox = start(image=name, workdir="/")
    owned = "/opt/served /opt/served/data /opt/served/by-su /opt/served/who /opt/served/installed"
    assert output_of(run, sandbox, f"cat /opt/served/who; stat -c %U {owned}") == "served" + 5 * " served"
    assert output_of(run, sandbox, "cat /home/app/who").split()[:2] == ["1500", "uid=1500(app)"]
    assert "euid=0(root)" in output_of(run, sandbox, "cat /home/app/who")
    assert output_of(run, sandbox, "stat -c %U /home/app/mine /home/app/folder /home/app/who") == "app app app"
    for what, script in AS_ROOT.items():
        assert output_of(run, sandbox, script) == ANSWERS[what], what
    shell = run(sandbox.open_shell())
    assert run(shell.run("su app -c 'id -u'; id -u", timeout_s=20)).output.split() == ["1500", "0"]
    kernel = run(sandbox.open_kernel())
    assert (
        "33 33" in run(kernel.run("import os; os.setresuid(33, 33, 33); print(os.getuid(), os.geteuid())", 20)).output
    )
    run(kernel.close())


def test_policy_runs_as_the_chosen_user(start: Start, run: Run, name: str) -> None:
    sandbox = start(image=name, workdir="/home/app", user="app")
    assert output_of(run, sandbox, "id -u; id -un; touch new; stat -c %U new mine /etc") == "1500 app app app root"
    assert "euid=0(root)" in output_of(run, sandbox, "/opt/id-of-root")
    assert output_of(
        run, sandbox, "chown 0 new 2>/dev/null; echo $?; python3 -c 'import os; os.setuid(0)' 2>&1 | tail -1"
    ) == ("1 PermissionError: [Errno 1] Operation not permitted")
    run(sandbox.write_file("/tmp/peer.py", PEER.encode()))
    script = "(sleep 0.5; exec python3 /tmp/peer.py) >/dev/null 2>&1 & python3 /tmp/peer.py serve"
    assert output_of(run, sandbox, script.replace("peer.py)", "peer.py connect)")) == "True 1500 1500"


def test_image_without_users_allows_only_root(start: Start, run: Run) -> None:
    sandbox = start(image="host")
    result = run(sandbox.exec(["python3", "-c", "import os; os.setuid(33)"], timeout_s=20))
    assert result.code == 1
    assert b"Error" in result.stderr
