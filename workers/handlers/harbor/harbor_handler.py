"""The handler of Harbor tasks: instructions, steps with verifications between them, and collected artefacts.

Harbor's shared mode runs the tests in the policy's tree. Programs, interpreters and the files that these load
implicitly could then be the policy's, and so could the reward. So files on which the tests depend are the image's own,
whatever the policy changed; `docs/how-to/users/tasks/harbor.md` says what remains possible.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from farm.errors import HandlerError
from farm.records.request import SandboxSpec, TaskTimes
from farm.records.task_needs import TaskNeeds
from farm.records.trajectory import Message
from farm.tasks.harbor_config import StepTable
from farm.tasks.harbor_instance import DATA_SOURCE, HarborInstance, needs_of
from workers.handlers.harbor.artefact_files import REJECTED, ArtefactsTooLarge, entries, run_hooks, taken
from workers.handlers.harbor.entry_programs import await_healthy, begin
from workers.handlers.harbor.harbor_evaluator import BROKEN, STOPPED, HarborEvaluator, test_folders
from workers.handlers.harbor.harbor_verifier import staged
from workers.handlers.harbor.reward_files import gate
from workers.handlers.harbor.sandbox_specs import agent_sandbox
from workers.plugins.handler import Handler, NextTurn, NothingLeft, RestoredFiles, TaskContext
from workers.plugins.interfaces import NO_MODELS, ChatModel, Evaluator, FreshSandbox, Sandbox, Submission

TASK_FOLDERS = RestoredFiles(trees=("/tests", "/logs", "/solution"))
"""The folders that belong to the task in any case."""

_SHELLS = ("sh", "bash", "dash", "ash", "busybox", "env", "su", "sudo", "runuser", "setpriv")
_INTERPRETERS = ("python", "perl", "ruby", "node", "java", "php", "lua", "R", "Rscript", "julia", "go", "deno", "bun")
_TEST_RUNNERS = ("pytest", "py.test", "pip", "uv", "uvx", "npm", "npx", "git", "make", "cargo", "jq", "curl", "wget")
_TEXT = (
    *("cat", "head", "tail", "grep", "egrep", "fgrep", "sed", "awk", "gawk", "mawk", "cut", "tr", "sort", "uniq", "wc"),
    *("diff", "cmp", "comm", "tee", "xargs", "echo", "printf", "expr", "bc", "seq", "test", "[", "true", "false"),
    *("base64", "md5sum", "sha1sum", "sha256sum", "sha512sum", "od", "xxd", "strings", "file"),
)
_FILES = (
    *("ls", "cp", "mv", "rm", "ln", "mkdir", "rmdir", "touch", "chmod", "chown", "stat", "find", "realpath", "which"),
    *("readlink", "basename", "dirname", "mktemp", "install", "tar", "gzip", "unzip", "df", "du", "id", "whoami"),
    *("date", "sleep", "timeout", "ps", "kill", "pkill", "killall", "nohup", "setsid", "stdbuf", "nproc", "uname"),
)
_CONFIGURATION = ("conftest.py", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg", "setup.py")

GUARDED = replace(
    TASK_FOLDERS,
    # Configuration at the top applies to every test below it, including those in /tests.
    files=tuple(f"/{name}" for name in _CONFIGURATION),
    system=True,
    programs=(*_SHELLS, *_INTERPRETERS, *_TEST_RUNNERS, *_TEXT, *_FILES),
)
"""Everything removed from a policy's layer before tests run in it."""

_PATH = re.compile(r"(?:(?<![\w.~/$}])|(?<=~)|(?<=\$HOME)|(?<=\$\{HOME\}))/[\w.+@-]+(?:/[\w.+@-]+)*")
_MAX_READ = 1_000_000
_SETUP = "setup.sh"
_SETUP_S = 300.0
_SHOWN = 500


def guarded(instance: HarborInstance, folders: Iterable[Path]) -> RestoredFiles:
    """Return the paths to remove from the layer of a task with these folders of tests. Blocks."""
    if instance.restore == "nothing":
        return TASK_FOLDERS
    texts = [*instance.instructions, instance.task.model_dump_json(exclude_unset=True), *instance.env.values()]
    for path in sorted(each for folder in folders for each in folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open(encoding="utf-8", errors="replace") as file:
                texts.append(file.read(_MAX_READ))
    return replace(GUARDED, named=tuple(sorted(named_paths(texts))), footprint=instance.footprint)


def named_paths(texts: Iterable[str]) -> set[str]:
    """Return the absolute paths in texts; a home given as `~` or `$HOME` is root's."""
    paths = set()
    for text in texts:
        for match in _PATH.finditer(text):
            of_home = text[: match.start()].endswith(("~", "$HOME", "${HOME}"))
            paths.add(("/root" if of_home else "") + match[0].rstrip("."))
    return paths


class HarborHandler(Handler[HarborInstance]):
    """Task folders of Harbor and of terminal-bench 1; `farm submit DIR` creates instances of them."""

    data_source: ClassVar[str] = DATA_SOURCE
    instance_type: ClassVar[type[BaseModel]] = HarborInstance
    tools: ClassVar[Collection[str]] = ("bash", "edit", "submit")
    keeps_layer: ClassVar[bool] = True

    def __init__(self, instance: HarborInstance, task: TaskContext | None = None) -> None:
        super().__init__(instance, task)
        self._index = 0

    def needs(self) -> TaskNeeds:
        """Return the needs that no sandbox meets."""
        return needs_of(self.instance)

    def task_times(self) -> TaskTimes:
        """Return the task's limits: the sum of all steps for the agent, the longest one for tests."""
        own = [step.agent.timeout_sec or self.instance.task.agent.timeout_sec for step in self.instance.steps]
        stated = [seconds for seconds in own if seconds is not None]
        run_s = sum(stated) if stated and len(stated) == len(own) else self.instance.task.agent.timeout_sec
        return TaskTimes(
            run_s=run_s, eval_s=max(self.instance.verifier_s(step) for step in self.instance.steps or (None,))
        )

    def sandbox(self) -> SandboxSpec | None:
        """Return the policy's sandbox; without an archive, as at submit, one that names no folder."""
        if self.task.archive is None:
            return agent_sandbox(self.instance, Path(), None)
        return agent_sandbox(self.instance, self.task.archive, self.task.batch.secrets)

    def restored(self) -> RestoredFiles:
        """Return the paths that tests find as in the image, whatever the policy left there."""
        if self.task.batch.verification == "as_authors":
            return TASK_FOLDERS
        archive = self.task.archive
        steps = self.instance.steps or (None,)
        return guarded(
            self.instance,
            [] if archive is None else [f for s in steps for f in test_folders(self.instance, s, archive)],
        )

    def tests_services(self) -> bool:
        """Return whether its tests run where the policy worked: then they reach its services, as in Harbor."""
        return any(self.instance.task.mode(step) == "shared" for step in self.instance.steps or (None,))

    def messages(self) -> list[Message]:
        """Return the first instruction."""
        return [{"role": "user", "content": self._instruction(0)}]

    def _instruction(self, index: int) -> str:
        text = self.instance.instructions[index]
        folder = self.instance.task.environment.skills_dir
        return f"{text}\n\nNotes on how to do such work are in {folder}." if folder and index == 0 else text

    async def prepare(self, sandbox: Sandbox) -> None:
        """Create the folders of logs, start the entry program, and begin the first step when it is healthy."""
        async with staged(()) as stage:
            await sandbox.upload(stage.logs, "/logs")
        instance = self.instance
        await begin(sandbox, instance.name, instance.entrypoint, instance.command, instance.healthcheck)
        if check := self.instance.task.environment.healthcheck:
            await await_healthy(sandbox, check, self.instance.name)
        if self.instance.steps:
            await self._begin(self.instance.steps[0], sandbox)

    async def _begin(self, step: StepTable, sandbox: Sandbox) -> None:
        """Copy a step's files into the working directory, run its setup.sh, and wait until it is healthy."""
        what = f"{self.instance.name}, step {step.name}"
        folder = self._archive() / "steps" / step.name / "workdir"
        for path in await asyncio.to_thread(_children, folder):
            await sandbox.upload(path, path.name)
        if f"steps/{step.name}/workdir/{_SETUP}" in self.instance.files:
            result = await sandbox.exec(["/bin/bash", _SETUP], timeout_s=_SETUP_S)
            if result.code != 0:
                output = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-_SHOWN:]
                end = "took too long" if result.timed_out else f"ended with {result.code}"
                raise HandlerError(f"{what}: its {_SETUP} {end}: {output}")
        if step.healthcheck:
            await await_healthy(sandbox, step.healthcheck, what)

    def _archive(self) -> Path:
        if self.task.archive is None:
            raise HandlerError(
                f"{self.instance.name}: the instance names no archive; `farm submit DIR` uploads it", retryable=False
            )
        return self.task.archive

    async def next_messages(
        self,
        sandbox: Sandbox | None,
        n_done: int,
        answer: str | None,
        steps: Sequence[dict[str, Any]],
        fresh: FreshSandbox,
    ) -> NextTurn:
        """Verify the ended step in a copy of the sandbox, and begin the next one if its gate is passed."""
        if n_done >= len(self.instance.steps) or sandbox is None:
            return NextTurn()
        step, self._index = self.instance.steps[n_done - 1], n_done
        submission = await self._collected(step, sandbox, answer)
        if REJECTED in submission.files:
            return NextTurn(record={"step": step.name, "rewards": {}, BROKEN: submission.files[REJECTED]})
        evaluator = HarborEvaluator(self.instance, self.task)
        try:
            verdict = await evaluator.verify_step(step, submission, fresh, self.task.batch.limits.eval_s)
        except NothingLeft as error:
            return NextTurn(record={"step": step.name, "rewards": {}, BROKEN: str(error)})
        record = {"step": step.name, "rewards": verdict.rewards, **verdict.details}
        if reason := gate(step, verdict.rewards):
            return NextTurn(record={**record, STOPPED: reason})
        try:
            await self._begin(self.instance.steps[n_done], sandbox)
        except HandlerError as error:
            # In Harbor, too, a task ends here: the preconditions of a step are under the policy's control.
            return NextTurn(record={**record, BROKEN: str(error)})
        return NextTurn([{"role": "user", "content": self._instruction(n_done)}], record)

    async def collect(self, sandbox: Sandbox | None, answer: str | None) -> Submission:
        """Return the artefacts of the last step, after its collect hooks."""
        if sandbox is None:
            raise HandlerError(f"{self.instance.name}: the files to score are in a sandbox, and there is none")
        step = self.instance.steps[min(self._index, len(self.instance.steps) - 1)] if self.instance.steps else None
        return await self._collected(step, sandbox, answer)

    async def _collected(self, step: StepTable | None, sandbox: Sandbox, answer: str | None) -> Submission:
        task = self.instance.task
        await run_hooks(sandbox, [*task.verifier.collect, *(step.verifier.collect if step else ())])
        if task.mode(step) == "shared":
            return Submission(answer=answer)
        try:
            tree = await taken(sandbox, entries(task.artifacts, step.artifacts if step else ()))
        except ArtefactsTooLarge as error:
            return Submission(answer=answer, files={REJECTED: str(error)})
        return Submission(answer=answer, tree=tree)

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return HarborEvaluator(self.instance, self.task)


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
