"""Artefacts contain the output that the model did not see: from a command in a sandbox to the trainer's machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import farm
from farm.cli.main import main
from farm.errors import NotFound
from tests.doubles import EngineDouble
from tests.services.commands import output_of
from tests.services.farms import embedded, farm_folder
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

INSTANCE = {
    "data_source": "code",
    "fields": {
        "task_id": "artefacts/0",
        "prompt": "def one():\n    '''Give 1, and count a lot on the way.'''\n",
        "entry_point": "one",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    },
}
COMMANDS = ("seq 200000", "seq 20000", "head -c 3000000 /dev/urandom", "echo short", "head -c 3000000 /dev/urandom")
SCRIPT = Script(
    [
        ScriptedProblem(
            match="count a lot",
            branches=(
                Branch(
                    name="long outputs",
                    turns=(
                        *(
                            ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command}),))
                            for command in COMMANDS
                        ),
                        ScriptedTurn(tool_calls=(ScriptedCall(name="submit", arguments={}),)),
                    ),
                ),
            ),
        )
    ]
)


def sequence(last: int) -> bytes:
    return "".join(f"{n}\n" for n in range(1, last + 1)).encode()


def test_long_outputs_are_kept_up_to_the_cap_of_the_rollout() -> None:
    with (
        farm_folder() as folder,
        serving(EngineDouble(SCRIPT).app()) as policy,
        embedded(folder, FARM_POLICY_URL=f"{policy}/v1", FARM_ARTEFACTS_MB="5") as here,
        farm.connect(here.store_url, broker_url=here.broker_url) as client,
    ):
        (rollout,) = client.collect(client.submit({"instances": [INSTANCE]}), timeout_s=600)
        assert rollout.outcome == farm.Outcome.SUBMITTED, rollout.failure
        kept = {each.name: each for each in client.artefacts(rollout.rollout_id)}
        # random bytes do not compress, so the second three megabytes are beyond the limit
        assert list(kept) == ["0-bash.txt", "1-bash.txt", "2-bash.txt"]
        assert client.artefact(rollout.rollout_id, "0-bash.txt") == sequence(200_000)
        # cut only by the agent, so this is the tool's output, which ends without the last line break
        assert client.artefact(rollout.rollout_id, "1-bash.txt") == sequence(20_000).rstrip(b"\n")
        assert kept["2-bash.txt"].n_bytes == 3_000_000
        assert kept["0-bash.txt"].n_stored < kept["0-bash.txt"].n_bytes / 3
        shown = [str(call.observations[0]["content"]) for call in client.calls(rollout.rollout_id)]
        assert [("outside the sandbox: " in text) for text in shown] == [True, True, True, False, False, False]
        assert shown[0].endswith("outside the sandbox: 0-bash.txt]")
        n_dropped = len(sequence(200_000)) - 200_000
        assert f"[{n_dropped} bytes from the middle of the output are left out]" in shown[0]
        assert all(len(text) <= 16_000 for text in shown)
        for rollout_id, name in ((rollout.rollout_id, "9-bash.txt"), ("nope", "0-bash.txt")):
            with pytest.raises(NotFound, match=rollout_id):
                client.artefact(rollout_id, name)
        with pytest.raises(NotFound, match="nope"):
            client.artefacts("nope")
        on_the_command_line(here.store_url, rollout.rollout_id, folder)


def on_the_command_line(url: str, rollout_id: str, folder: Path) -> None:
    def run(*words: str) -> bytes:
        command = [str(Path(sys.executable).parent / "farm"), *words, "--url", url]
        return subprocess.run(command, capture_output=True, check=True, timeout=600, cwd=folder).stdout

    assert "0-bash.txt" in output_of(main, "show", rollout_id, "--url", url)
    listed = output_of(main, "artefacts", rollout_id, "--url", url).splitlines()[2:]
    assert [line.split()[0] for line in listed] == ["0-bash.txt", "1-bash.txt", "2-bash.txt"]
    assert run("artefacts", rollout_id, "0-bash.txt", "-o", "-") == sequence(200_000)
    run("artefacts", rollout_id, "0-bash.txt")
    assert (folder / "0-bash.txt").read_bytes() == sequence(200_000)
