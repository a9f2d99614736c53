from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from farm.errors import InvalidRequest
from farm.records.task_needs import unsupported
from farm.tasks.harbor_folder import read_task, task_folder, task_paths
from farm.tasks.harbor_instance import HarborInstance, needs_of
from workers.sandboxes.images.dockerfile.context import BuildContext

ROOT = Path(__file__).parents[4]
SAMPLES = ROOT / "examples" / "tasks" / "harbor"
COOKBOOK = ROOT / "tests" / "data" / "harbor_cookbook"
_DOCKERFILE = "FROM debian:bookworm-slim\n"


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., Path]:
    """Make a complete task; texts by path replace or add files, None omits one."""

    def make(**files: str | None) -> Path:
        content = {
            "task.toml": 'schema_version = "1.4"\n',
            "instruction.md": "Do it.\n",
            "environment/Dockerfile": _DOCKERFILE,
            "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
            **{name.replace("__", "/").replace("_DOT_", "."): text for name, text in files.items()},
        }
        for name, text in content.items():
            if text is not None:
                path = tmp_path / "task" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        return tmp_path / "task"

    return make


def test_every_sample_is_read_and_has_no_unsupported_needs() -> None:
    paths = task_paths(SAMPLES)
    assert [path.name for path in paths] == [
        "count-words",
        "fix-duration-parser",
        "separate-verifier",
        "stages-and-users",
        "two-steps",
    ]
    for path in paths:
        instance = read_task(path).instance
        assert HarborInstance.model_validate(instance.model_dump(mode="json", exclude_unset=True)) == instance
        assert list(unsupported(needs_of(instance))) == []


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("simple-task", ""),
        ("multi-reward", ""),
        ("multi-step", ""),
        ("skills", ""),
        ("multi-container", "sidecar services (api-server)"),
        ("simulated-user", "sidecar services (user-server, MCP server user-server)"),
    ],
)
def test_recipes_of_the_cookbook_are_read_and_unsupported_needs_are_named(recipe: str, reason: str) -> None:
    reasons = unsupported(needs_of(read_task(COOKBOOK / recipe).instance))
    assert reason in "; ".join(reasons)
    assert bool(reasons) is bool(reason)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("[environment]\ngpus = 2", "2 GPUs"),
        ('[environment]\nos = "windows"', "the operating system windows"),
        ('[environment.tpu]\ntype = "v6e"\ntopology = "2x4"', "TPU v6e"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["example.org"]', "example.org"),
        ('[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["example.org"]', "example.org"),
        ('[[environment.mcp_servers]]\nname = "m"\nurl = "http://m"', "MCP server m"),
        ('[[verifier.collect]]\ncommand = "x"\nservice = "db"', "db"),
        ("[environment]\ngpus = -1", ""),
        ("[verifier.environment]\ngpus = 1", "1 GPUs"),
    ],
)
def test_needs_that_no_sandbox_supports_are_named(task: Callable[..., Path], table: str, reason: str) -> None:
    reasons = unsupported(needs_of(read_task(task(task_DOT_toml=table)).instance))
    assert reason in "; ".join(reasons)


@pytest.mark.parametrize(
    ("service", "reason"),
    [
        ("volumes: ['../..:/host']", "folders of the host (../..)"),
        ("volumes: [{type: bind, source: /etc, target: /x}]", "folders of the host (/etc)"),
        ("privileged: true", "privileges over its node"),
        ("cap_add: [SYS_ADMIN]", "privileges over its node"),
        ("network_mode: host", "`network_mode` of service main"),
        ("tmpfs: [/run]", "`tmpfs` of service main"),
        ("volumes: [{type: tmpfs, target: /fast, tmpfs: {size: 1000}}]", "a volume of type tmpfs at /fast"),
        ("shm_size: 1gb", "`shm_size: 1gb` of service main, where a sandbox's /dev/shm has 64 MB"),
        ("shm_size: 67108865", "`shm_size: 67108865` of service main"),
        ("shm_size: large", "`shm_size: large` of service main"),
        ("shm_size: 64M", ""),
        ("shm_size: '0.0625 gb'", ""),
        ("shm_size: 67108864", ""),
        ("build: {dockerfile: Other}", "another Dockerfile, Other"),
        ("build: {args: {V: 1}}", "build arguments of its compose file (V)"),
        ("build: {target: dev}", "`build.target` of service main"),
        ("build: {context: ., dockerfile: Dockerfile}", ""),
        ("environment: {A: b}", ""),
        ("volumes: ['${T_BENCH_TASK_LOGS_PATH}:/logs']", ""),
    ],
)
def test_compose_file_of_one_service_is_checked(task: Callable[..., Path], service: str, reason: str) -> None:
    path = task(**{"environment__docker-compose_DOT_yaml": f"services:\n  main:\n    {service}\n"})
    instance = read_task(path).instance
    reasons = unsupported(needs_of(instance))
    assert reason in "; ".join(reasons)
    assert bool(reasons) is bool(reason)
    assert instance.env == ({"A": "b"} if "A: b" in service else {})


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"task_DOT_toml": 'schema_version = "2.0"'}, "schema_version '2.0' is not one of"),
        ({"task_DOT_toml": "x ="}, "task.toml: it cannot be read"),
        ({"task_DOT_toml": "[verifier]\ntimeout_sec = -1"}, "task.toml: verifier.timeout_sec"),
        ({"instruction_DOT_md": None}, "instruction.md: there is no instruction"),
        ({"instruction_DOT_md": " \n"}, "instruction.md: it is empty"),
        ({"tests__test_DOT_sh": None}, "there is no tests/test.sh"),
        ({"tests__.harborignore": "*.sh\n"}, "tests/test.sh: a .harborignore leaves it out"),
        ({"tests__.harborignore": "!\n"}, "tests/.harborignore: it cannot be read"),
        ({"environment__Dockerfile": None}, "needs an image: environment/Dockerfile or"),
        ({"task_DOT_toml": '[[steps]]\nname = "a"'}, "steps/a/instruction.md"),
        ({"environment__docker-compose_DOT_yaml": "services: []"}, "docker-compose.yaml: a compose file without"),
        ({"instruction_DOT_md": "<!-- canary 1 -->\n"}, "instruction.md: it is empty"),
    ],
)
def test_broken_task_is_refused_with_its_file(
    task: Callable[..., Path], files: dict[str, str | None], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"(?s).*") as refused:
        read_task(task(**files))
    assert named in str(refused.value)


def test_training_data_markers_are_hidden_from_the_policy(task: Callable[..., Path]) -> None:
    text = "<!-- harbor-canary GUID x -->\n# Canary: y\n\nDo it.\n# canary of the task\n"
    assert read_task(task(instruction_DOT_md=text)).instance.instructions == ("Do it.\n# canary of the task\n",)


@pytest.mark.parametrize(
    ("steps", "modes"),
    [
        ("", [("public", "public")]),
        ('[[steps]]\nname = "a"\n[steps.verifier]\nnetwork_mode = "no-network"', [("public", "no-network")]),
        (
            '[[steps]]\nname = "a"\n[steps.verifier.environment]\nnetwork_mode = "no-network"\n'
            '[[steps]]\nname = "b"\n[steps.agent]\nnetwork_mode = "public"',
            [("public", "no-network"), ("public", "public")],
        ),
    ],
)
def test_step_may_be_verified_with_its_own_network(
    task: Callable[..., Path], steps: str, modes: list[tuple[str, str]]
) -> None:
    places = {f"steps__{name}__instruction_DOT_md": "Do." for name in "ab"}
    instance = read_task(task(task_DOT_toml=steps, **places)).instance
    found = [instance.network_modes(step) for step in instance.steps or (None,)]
    assert [(each["run"], each["eval"]) for each in found] == modes
    assert list(unsupported(needs_of(instance))) == []


def test_earlier_conversation_is_refused_by_name(task: Callable[..., Path]) -> None:
    reasons = unsupported(needs_of(read_task(task(trajectory_DOT_json="{}")).instance))
    assert "trajectory.json" in reasons[0]


def test_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="contains no tasks"):
        task_paths(tmp_path)


_TERMINAL_BENCH = {
    "task.yaml": "instruction: |-\n  Say hello.\ndifficulty: easy\nparser_name: pytest\ntags: [x]\n"
    "max_agent_timeout_sec: 120\n",
    "Dockerfile": "FROM debian:bookworm-slim\nCOPY data.txt /app/\nCOPY solution.sh /x\n",
    "docker-compose.yaml": "services:\n  client:\n    build: {dockerfile: Dockerfile}\n    image: x\n"
    "    command: [sh, -c, sleep infinity]\n    environment:\n      - TEST_DIR=${T_BENCH_TEST_DIR}\n      - A=b c\n"
    "    volumes:\n      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}\n",
    "data.txt": "x",
    "solution.sh": "echo hello > /app/out\n",
    "run-tests.sh": "pytest $TEST_DIR/test_outputs.py -rA\n",
    "tests/test_outputs.py": "def test_x(): pass\n",
}

_MOUNTED = "services:\n  client:\n    build: {{dockerfile: Dockerfile}}\n    volumes:\n      - {}\n"


def _written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_task_of_terminal_bench_1_is_converted_to_harbor(tmp_path: Path) -> None:
    source = _written(tmp_path / "hello", _TERMINAL_BENCH)
    assert task_paths(tmp_path) == [source]
    with task_folder(source) as found:
        instance, path = found.instance, found.path
        assert (instance.name, instance.instructions) == ("terminal-bench/hello", ("Say hello.",))
        assert (instance.task.agent.timeout_sec, instance.task.verifier.timeout_sec) == (120.0, 60.0)
        assert instance.task.environment.env == {"TEST_DIR": "/tests", "A": "b c"}
        assert sorted(each.name for each in (path / "environment").iterdir()) == [
            "Dockerfile",
            "data.txt",
            "solution.sh",
        ]
        assert sorted(each.name for each in (path / "tests").iterdir()) == [
            "run-tests.sh",
            "test.sh",
            "test_outputs.py",
        ]
        assert (path / "solution" / "solve.sh").read_text() == "echo hello > /app/out\n"
        assert list(unsupported(needs_of(instance))) == []


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("task.yaml", "instruction: x\nparser_name: mlebench", "'mlebench', not pytest or swebench"),
        ("docker-compose.yaml", _MOUNTED.format("./out:/data"), "mounts './out', which is not in the task"),
        ("task.yaml", "instruction: [", "not YAML"),
        ("task.yaml", "difficulty: easy", "instruction"),
        ("docker-compose.yaml", "services:\n  client:\n    build: {context: ../..}", "lies outside the task"),
    ],
)
def test_inconvertible_task_is_refused_by_name(tmp_path: Path, name: str, text: str, named: str) -> None:
    source = _written(tmp_path / "hello", {**_TERMINAL_BENCH, name: text})
    (source / "out").symlink_to("/etc")
    with pytest.raises(InvalidRequest) as refused, task_folder(source):
        pass
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("001. TASK", "001.-TASK"),
        ("a b  c", "a-b-c"),
        (".hidden", "hidden"),
        ("a..b", "a-.b"),
        ("ünicode", "nicode"),
        ("ü", "task"),
    ],
)
def test_folder_may_have_any_name(tmp_path: Path, folder: str, name: str) -> None:
    with task_folder(_written(tmp_path / folder, _TERMINAL_BENCH)) as found:
        assert found.instance.name == f"terminal-bench/{name}"


def test_errors_name_the_path_of_the_user(tmp_path: Path) -> None:
    source = _written(tmp_path / "hello", {**_TERMINAL_BENCH, "task.yaml": "instruction: ' '\n"})
    with pytest.raises(InvalidRequest) as refused, task_folder(source):
        pass
    assert f"{source}/instruction.md" in str(refused.value)


@pytest.mark.parametrize(
    ("mount", "line", "files"),
    [
        ("./:/app", '["{}/", "/app/"]', {"data.txt"}),
        ("./data.txt:/etc/data.txt:ro", '["{}", "/etc/data.txt"]', None),
        ("{type: bind, source: ./sub, target: /sub/}", '["{}/", "/sub/"]', {"x"}),
        ("./absent:/runs", '["{}/", "/runs/"]', set()),
    ],
)
def test_mount_of_the_tasks_own_files_is_copied(tmp_path: Path, mount: str, line: str, files: set[str] | None) -> None:
    """The solution and the tests of the harness are not copied."""
    compose = _MOUNTED.format(mount)
    ignored = {"sub/x": "1", ".dockerignore": ".*\n**/*.txt\nx"}
    source = _written(tmp_path / "hello", {**_TERMINAL_BENCH, "docker-compose.yaml": compose, **ignored})
    with task_folder(source) as found:
        assert list(unsupported(needs_of(found.instance))) == []
        (name,) = [each.name for each in (found.path / "environment").iterdir() if each.name.startswith(".mount-")]
        text = (found.path / "environment" / "Dockerfile").read_text()
        assert text.splitlines()[-1] == f"COPY {line.format(name)}"
        place = found.path / "environment" / name
        folder = found.path / "environment"
        context = BuildContext.of(folder, folder / "Dockerfile")
        assert {each.relative for each in context.tree(name) if each.relative.count("/") == 0} - {""} == (
            {each.name for each in place.iterdir()} if place.is_dir() else set()
        )
        if files is not None:
            more = {"sub", ".dockerignore"} if "data.txt" in files else set()
            assert {each.name for each in place.iterdir()} == files | more


@pytest.mark.parametrize(
    "mounts",
    [
        "      - ./tests:PLACE/tests:ro\n      - ./data.txt:PLACE/data.txt:z,ro\n",
        "      - {type: bind, source: ./tests, target: PLACE/tests, read_only: true}\n"
        "      - ./data.txt:PLACE/data.txt:ro\n      - ./tests:/tests:ro\n",
    ],
)
def test_read_only_mounts_are_restored_before_tests_run(tmp_path: Path, mounts: str) -> None:
    place = tmp_path / "app"
    compose = _MOUNTED.format("./tests:/rw/tests") + mounts.replace("PLACE", str(place))
    task = {**_TERMINAL_BENCH, "docker-compose.yaml": compose, "run-tests.sh": "true\n"}
    with task_folder(_written(tmp_path / "hello", task)) as found:
        test = found.path / "tests" / "test.sh"
        (tmp_path / "logs").mkdir()
        script = test.read_text().replace("/logs/verifier", str(tmp_path / "logs"))
        script = script.replace('"/tests/', f'"{found.path}/tests/').replace(" /tests/", f" {found.path}/tests/")
        # as a policy may leave them
        _written(place, {"tests/conftest.py": "", "tests/.hidden/x": "", "data.txt/x": "1", "out": "kept"})
        (place / "tests" / "test_outputs.py").symlink_to("/dev/null")
        subprocess.run(["bash", "-c", script], check=False, capture_output=True)
    left = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
    assert left == ["data.txt", "out", "tests", "tests/test_outputs.py"]
    assert (place / "data.txt").read_text() == "x"
    assert (place / "tests" / "test_outputs.py").read_text() == _TERMINAL_BENCH["tests/test_outputs.py"]
    assert [line.split()[0] for line in script.splitlines() if line.startswith("own ")] == ["own", "own"]


@pytest.mark.parametrize(
    ("service", "entrypoint", "command"),
    [
        ("command: sh -c 'sleep infinity'", (), ()),
        ("command: tail -f /dev/null", (), ()),
        ("command: [/bin/bash, -c, exec sleep 1d]", (), ()),
        ("command: bash", (), ()),
        (
            "command: [bash, -c, 'service x start && sleep infinity']",
            (),
            ("bash", "-c", "service x start && sleep infinity"),
        ),
        ("command: /start.sh --name 'a b' $$HOME", (), ("/start.sh", "--name", "a b", "$HOME")),
        ("entrypoint: /entry.sh\n    command: sleep infinity", ("/entry.sh",), ()),
        ("entrypoint: [/entry.sh, -x]\n    command: [serve]", ("/entry.sh", "-x"), ("serve",)),
        ('command: "\'"', (), ()),
    ],
)
def test_program_of_a_compose_file_is_that_of_the_container(
    task: Callable[..., Path], tmp_path: Path, service: str, entrypoint: tuple[str, ...], command: tuple[str, ...]
) -> None:
    path = task(**{"environment__docker-compose_DOT_yaml": f"services:\n  main:\n    {service}\n"})
    instance = read_task(path).instance
    assert (instance.entrypoint, instance.command) == (entrypoint, command)
    files = _TERMINAL_BENCH | {"docker-compose.yaml": f"services:\n  client:\n    build: .\n    {service}\n"}
    with task_folder(_written(tmp_path / "hello", files)) as found:
        assert (found.instance.entrypoint, found.instance.command) == (entrypoint, command)
        assert list(unsupported(needs_of(found.instance))) == []


def test_dockerfile_of_a_compose_file_is_built_with_its_arguments(tmp_path: Path) -> None:
    compose = "services:\n  client:\n    build: {context: ., dockerfile: sub/Other, args: {TAG: '12 $x', NONE: 1}}\n"
    other = "ARG TAG=11\nFROM debian:$TAG\nARG  TAG\nARG TAGS=2\nCOPY \\\n  run-tests.sh \\\n  task.yaml /x/\n"
    files = _TERMINAL_BENCH | {"docker-compose.yaml": compose, "sub/Other": other}
    with task_folder(_written(tmp_path / "hello", files)) as found:
        folder = found.path / "environment"
        text = (folder / "Dockerfile").read_text()
        assert text == other.replace("TAG=11", 'TAG="12 \\$x"').replace("ARG  TAG", 'ARG  TAG="12 \\$x"')
        assert {"run-tests.sh", "task.yaml", "data.txt"} <= {each.name for each in folder.iterdir()}
        assert not (folder / "solution.sh").exists()
    files["docker-compose.yaml"] = compose.replace("sub/Other", "sub/None")
    with (
        pytest.raises(InvalidRequest, match="builds 'sub/None', which does not exist"),
        task_folder(_written(tmp_path / "other", files)),
    ):
        pass


@pytest.mark.parametrize("mount", ["/etc:/host", "~/x:/x", "../out:/x", "./../out:/x", "named:/x", "${HOME}:/x"])
def test_mount_of_other_files_is_refused_by_name(tmp_path: Path, mount: str) -> None:
    source = _written(tmp_path / "hello", {**_TERMINAL_BENCH, "docker-compose.yaml": _MOUNTED.format(mount)})
    with task_folder(source) as found:
        assert "folders of the host" in " ".join(unsupported(needs_of(found.instance)))


_SUMMARY = "==== short test summary info ====\n"
_SWEBENCH = "SWEBench results starts here\n{}\nSWEBench results ends here\n"


@pytest.mark.parametrize(
    ("printed", "reward"),
    [
        (_SWEBENCH.format("PASSED"), "1"),
        ("noise\n" + _SWEBENCH.format("  PASSED  ") + "after\n", "1"),
        (_SWEBENCH.format("FAILED"), "0"),
        (_SWEBENCH.format("PASSED") + _SWEBENCH.format("FAILED"), "0"),
        (_SWEBENCH.format("PASSED") + _SWEBENCH.format("PASSED"), "0"),
        (_SWEBENCH.format("PASSED PASSED"), "0"),
        (_SWEBENCH.format(""), "0"),
        ("SWEBench results starts here\nPASSED\n", None),
        ("PASSED\nSWEBench results ends here\n", None),
        ("", None),
        ("PASSED a.py::x\n", None),
        (f"{_SUMMARY}PASSED a.py::x\n", "1"),
        (f"{_SUMMARY.upper()}PASSED a.py::x\nSKIPPED [1] a.py:3: no\nXFAIL a.py::y - known\n", "1"),
        (f"{_SUMMARY}PASSED a.py::x\nFAILED a.py::y - assert 1 - 1\n", "0"),
        (f"{_SUMMARY}PASSED a.py::x\nXPASS a.py::y\n", "0"),
        (f"{_SUMMARY}PASSED a.py::x\nERROR b.py - x\n", "0"),
        (f"{_SUMMARY}FAILED a.py::x - flaky\nPASSED b.py::x\n", "1"),
        (f"FAILED a.py::x\n{_SUMMARY}PASSED a.py::$(touch x)]\n", "1"),
        (_SUMMARY, "0"),
    ],
)
def test_test_output_is_parsed_as_terminal_bench_parses_it(tmp_path: Path, printed: str, reward: str | None) -> None:
    parser = "swebench" if "SWEBench" in printed else "pytest"
    task = {**_TERMINAL_BENCH, "task.yaml": f"instruction: x\nparser_name: {parser}"}
    with task_folder(_written(tmp_path / "hello", task)) as found:
        script = (found.path / "tests" / "test.sh").read_text()
    (tmp_path / "logs").mkdir()
    (tmp_path / "run-tests.sh").write_text(f"cat <<'END'\n{printed}END\n")
    script = script.replace("/logs/verifier", str(tmp_path / "logs")).replace("/tests/", f"{tmp_path}/")
    subprocess.run(["bash", "-c", script], check=False, capture_output=True)
    path = tmp_path / "logs" / "reward.txt"
    assert (path.read_text().strip() if path.exists() else None) == reward


def test_solution_of_commands_becomes_a_script(tmp_path: Path) -> None:
    files = {name: text for name, text in _TERMINAL_BENCH.items() if name != "solution.sh"}
    source = _written(tmp_path / "hello", {**files, "solution.yaml": "- command: echo a\n- command: echo b\n"})
    with task_folder(source) as found:
        assert (found.path / "solution" / "solve.sh").read_text() == "#!/bin/bash\necho a\necho b\n"


def test_sidecars_of_terminal_bench_are_recognized(tmp_path: Path) -> None:
    compose = _TERMINAL_BENCH["docker-compose.yaml"] + "  db:\n    image: postgres\n"
    source = _written(tmp_path / "hello", {**_TERMINAL_BENCH, "docker-compose.yaml": compose})
    with task_folder(source) as found:
        assert needs_of(found.instance).sidecars == ("db",)
