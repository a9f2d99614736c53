"""The main program of a container, ENTRYPOINT or from a compose file, runs during the policy's work and the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.acceptance.tasks.test_running_services import COMPARED, LISTENING
from tests.acceptance.tasks.test_task_checks import check
from tests.integration.tasks.harbor_hacks import write_task
from tests.services.images import PROGRAMS, root_folder
from tests.services.servers.registry import registry

START = """#!/bin/bash
echo "$0 $*" > begun
id -un >> begun
if [ "$1" = fail ]; then exit 3; fi
python3 -m http.server 8080 &
exec "${@:1}"
"""
BASE = "FROM debian:bookworm-slim\nCOPY --chmod=755 start.sh /start.sh\nWORKDIR /app\nRUN chmod 777 .\n"
SOLUTION = f"{LISTENING}\nkill -0 1 && echo 42 > /app/answer"
CHECKED = "HEALTHCHECK --interval=2s CMD cat /proc/net/tcp | grep -q ':1F90 .* 0A '\n"
COMPOSE = "services:\n  main:\n    {}\n"
FORMS = {
    "exec": ('ENTRYPOINT ["/start.sh"]\nCMD ["none"]\n', "", "sh -c sleep infinity\nroot\n"),
    "of another user": (f'{CHECKED}USER agent\nENTRYPOINT ["/start.sh"]\n', "", "sh -c sleep infinity\nagent\n"),
    "of a compose file": ("", "command: [/start.sh, sleep, '600']", "sleep 600\nroot\n"),
}


def task_of(folder: Path, lines: str, service: str, test: str = COMPARED, solution: str = SOLUTION) -> Path:
    write_task(folder, test, solution)
    (folder / "environment/Dockerfile").write_text(BASE + lines)
    (folder / "environment/start.sh").write_text(START)
    if service:
        (folder / "environment/docker-compose.yaml").write_text(COMPOSE.format(service))
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_container_runs_its_entry_program(place: Path, tmp_path: Path, form: str) -> None:
    lines, service, begun = FORMS[form]
    test = COMPARED.replace(
        "if [", f'[ "$(cat /app/begun)" = "$(printf %s \'/start.sh {begun}\')" ] || exit 1\nif [', 1
    )
    result = json.loads(check(task_of(tmp_path / "task", lines, service, test), "--json").stdout)
    assert result["sound"], result


def test_failed_entry_program_does_not_affect_the_task(place: Path, tmp_path: Path) -> None:
    test = (
        "#!/bin/bash\n[ -e /app/answer ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    )
    folder = task_of(tmp_path / "task", 'ENTRYPOINT ["/start.sh", "fail"]\n', "", test, "echo 42 > /app/answer")
    assert json.loads(check(folder, "--json").stdout)["sound"]


def test_unhealthy_image_is_reported(place: Path, tmp_path: Path) -> None:
    lines = 'ENTRYPOINT ["/start.sh"]\nHEALTHCHECK --interval=1s --retries=2 CMD ["test", "-e", "/no such file"]\n'
    result = json.loads(check(task_of(tmp_path / "task", lines, ""), "--json").stdout)
    assert "its health check \"test -e '/no such file'\" ended with 1 2 times" in result["problem"]


def test_pulled_image_runs_its_entry_program(place: Path, tmp_path: Path, apptainer: Path) -> None:
    begun = "/usr/bin/begin a b sh -c sleep infinity"
    test = f"""#!/bin/bash
echo 0 >/logs/verifier/reward.txt
[ "$(cat /tmp/begun)" = "{begun}" ] || exit 1
[ "$(pwd)" = /opt/own ] || exit 2
if [ -e answer ]; then echo 1 >/logs/verifier/reward.txt; fi
"""
    folder = write_task(tmp_path / "task", test, "echo 42 >answer")
    with registry(root_folder(tmp_path / "root", (*PROGRAMS, "chmod", "cp", "find", "mv", "tar"))) as (names, _):
        (folder / "environment/Dockerfile").unlink()
        with (folder / "task.toml").open("a") as file:
            file.write(f'docker_image = "{names.removeprefix("docker://")}/team/tool:1"\n')
        result = json.loads(check(folder, "--json").stdout)
    assert result["sound"], result


def test_policy_begins_when_the_service_of_a_compose_file_is_healthy(place: Path, tmp_path: Path) -> None:
    service = """command: [bash, -c, "sleep 3; touch /app/ready; sleep 600"]
    healthcheck:
      test: [CMD, test, -e, /app/ready]
      interval: 1s
      start_period: 60s"""
    test = "#!/bin/bash\n[ -e /app/answer ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt\n"
    solution = "if [ -e /app/ready ]; then echo 42 >/app/answer; fi"
    folder = task_of(tmp_path / "task", "", service, test, solution)
    result = json.loads(check(folder, "--json").stdout)
    assert result["sound"], result


def test_unhealthy_service_of_a_compose_file_is_reported(place: Path, tmp_path: Path) -> None:
    service = "healthcheck: {test: 'test -e /none', interval: 1s, retries: 2}"
    result = json.loads(check(task_of(tmp_path / "task", "", service), "--json").stdout)
    assert 'its health check "test -e /none" ended with 1 2 times' in result["problem"].replace("'", '"')
