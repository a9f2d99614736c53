"""Packages of Debian and Ubuntu with their own users, daemons and owners, installed and used on a real base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.plugins.interfaces import Sandbox

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

PACKAGES = (
    "openssh-server openssh-client postgresql postgresql-common man-db dbus sudo gosu cron nginx-light redis-server "
    "python3-venv npm"
)
DOCKERFILE = f"""\
ARG BASE
FROM $BASE
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update
RUN apt-get install -y --no-install-recommends {PACKAGES}
RUN useradd -m -s /bin/bash app && echo 'app ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/app && su app -c 'id -un >~/who'
RUN sudo -u app python3 -m venv /home/app/venv && sudo -u app /home/app/venv/bin/pip install six
USER app
RUN sudo apt-get install -y --no-install-recommends tree && cd && npm install left-pad
USER root
"""
USES = {
    "owners": (
        "cd /home/app; stat -c %U . who venv/bin node_modules /var/lib/postgresql",
        "app app app app postgres",
    ),
    "apt": ("apt-get update >/dev/null && apt-get install -y --reinstall man-db >/dev/null && echo fine", "fine"),
    "sudo": ("sudo -u app id -un; su app -c 'sudo id -u'", "app 0"),
    "su": (
        "echo root:word | chpasswd; su app -c 'echo word | su root -c \"id -u\" 2>/dev/null; stat -c %a /usr/bin/su'",
        "0 4755",
    ),
    "gosu": ("gosu app id -un; gosu 1234:1235 id -u", "app 1234"),
    "setpriv": ("setpriv --reuid app --regid app --init-groups --inh-caps=-all id -un", "app"),
    "postgres": (
        "service postgresql start >/dev/null; su postgres -c 'createdb x && psql -Atc \"select current_user\" x'; "
        "sudo -u postgres psql -Atc 'select 2' x; stat -c %U /var/lib/postgresql/*/main/base",
        "postgres 2 postgres",
    ),
    "sshd": (
        "mkdir -p /run/sshd ~/.ssh; ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/k; "
        "su app -c 'umask 077; mkdir -p ~/.ssh'; install -o app -m 600 ~/.ssh/k.pub /home/app/.ssh/authorized_keys; "
        "/usr/sbin/sshd -p 2222; ssh -q -p 2222 -i ~/.ssh/k -o StrictHostKeyChecking=no app@127.0.0.1 "
        "'id -un; touch by-ssh; stat -c %U by-ssh'",
        "app app",
    ),
    "dbus": (
        "mkdir -p /run/dbus; dbus-daemon --system --fork; for each in 'sh -c' 'su app -c'; do $each 'dbus-send "
        "--system --print-reply=literal --dest=org.freedesktop.DBus / org.freedesktop.DBus.GetId' | wc -w; done",
        "1 1",
    ),
    "redis": (
        "su -s /bin/sh redis -c 'redis-server --port 6400 --daemonize yes' >/dev/null; sleep 1; redis-cli -p 6400 ping",
        "PONG",
    ),
    "nginx": (
        "sed -i '/listen/s/80/8099/' /etc/nginx/sites-enabled/default; nginx && (echo >/dev/tcp/127.0.0.1/8099) && "
        "stat -c %U /var/lib/nginx/body",
        "www-data",
    ),
    "cron": ("echo '@reboot true' | su app -c 'crontab -' ; su app -c 'crontab -l'", "@reboot true"),
    "tar": (
        "tar -C / -cf /tmp/t.tar home/app/who && mkdir /tmp/t && tar -C /tmp/t -xpf /tmp/t.tar && "
        "stat -c %U /tmp/t/home/app/who",
        "app",
    ),
}


@pytest.fixture(scope="module")
def image(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("real-packages")
    (folder / "Dockerfile").write_text(DOCKERFILE.replace("ARG BASE", f"ARG BASE={base}"))
    return f"dockerfile:{folder}"


def test_packages_are_installed_and_used(start: Start, run: Run, image: str) -> None:
    sandbox = start(image=image, workdir="/root", network=True)
    failed = {}
    for what, (script, answer) in USES.items():
        result = run(sandbox.exec(["bash", "-c", script], timeout_s=120))
        if " ".join(result.stdout.decode().split()) != answer:
            failed[what] = (result.code, result.stdout, result.stderr[-500:])
    assert not failed


def test_packages_are_used_by_another_user(start: Start, run: Run, image: str) -> None:
    sandbox = start(image=image, workdir="/home/app", user="app", network=True)
    script = "id -un; sudo id -un; venv/bin/pip install -q idna && echo fine; "
    script += "sudo apt-get install -y --reinstall tree >/dev/null && echo fine"
    result = run(sandbox.exec(["bash", "-c", script], timeout_s=120))
    assert result.stdout.decode().split() == ["app", "root", "fine", "fine"], result.stderr
