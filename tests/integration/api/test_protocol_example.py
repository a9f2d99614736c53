"""The protocol of docs/how-to/plugins/add_a_protocol.md is installed unchanged, and its clients get rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import farm
from farm.client.local import LocalFarm
from tests.doubles import EngineDouble
from tests.services.api import KEY, served
from tests.services.entry_points import installed
from tests.services.farms import embedded, farm_folder
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "plugins" / "add_a_protocol.md"
QUESTION = {"key": "q-17", "question": "What is 6 times 7?", "answer": "42", "samples": 3}
BRANCH = Branch(name="right", turns=(ScriptedTurn(content=r"It is \boxed{42}."),))
SCRIPT = Script([ScriptedProblem(match="6 times 7", branches=(BRANCH,))])


def save_example(folder: Path) -> Path:
    """Save the module and the project file of the page; return their folder."""
    folder.mkdir()
    for language, name in (("python", "ask_protocol.py"), ("toml", "pyproject.toml")):
        [block] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        (folder / name).write_text(block)
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    made = tmp_path_factory.mktemp("protocol")
    with (
        installed(save_example(made / "project"), made / "site"),
        farm_folder() as folder,
        serving(EngineDouble(SCRIPT).app()) as engine,
        embedded(folder, FARM_POLICY_URL=f"{engine}/v1") as here,
        farm.connect(here.home) as client,
    ):
        assert isinstance(client, LocalFarm)
        with served(client, speak=("ask",)) as api:
            yield f"{api}/ask/ask"


def post_question(url: str, body: dict[str, object], key: str = KEY) -> httpx2.Response:
    return httpx2.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=120)


def test_module_has_at_most_as_many_lines_as_the_page_states(tmp_path: Path) -> None:
    lines = (save_example(tmp_path / "project") / "ask_protocol.py").read_text().splitlines()
    assert len(lines) <= 60


def test_repeated_request_returns_the_rewards_of_the_same_batch(url: str) -> None:
    first, again = post_question(url, QUESTION), post_question(url, QUESTION)
    assert first.status_code == 200, first.text
    assert first.json()["rewards"] == [1.0, 1.0, 1.0]
    assert again.json() == first.json()


def test_errors_name_the_field(url: str) -> None:
    answer = post_question(url, {"key": "q-18", "question": "?"})
    assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["body", "answer"])
    assert post_question(url, QUESTION | {"answer": "43"}).status_code == 409


def test_request_with_a_wrong_key_is_refused(url: str) -> None:
    answer = post_question(url, QUESTION, key="wrong")
    assert (answer.status_code, list(answer.json())) == (401, ["detail"])
