"""The hacks on our own format of SWE instances score nothing on rows of SWE-bench either.

`make test` runs every eighth, `make soak` all of them.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.acceptance.scores.issue_hacks import edits as edits_of_rows
from tests.acceptance.scores.swe_hacks import edits
from tests.conftest import absent
from tests.integration.scores.issue_project import SharedSandboxes, row_of, score
from tests.integration.scores.swe_project import Project
from tests.services.soak import at_length
from workers.plugins.interfaces import Score
from workers.plugins.registry import sandbox as provider

pytestmark = [pytest.mark.timeout(1800), pytest.mark.soak]
MORE = {name: edit for name, edit in edits().items() if name not in edits_of_rows()}
HACKS = at_length({name: MORE[name] for name in [*MORE][::8]}, MORE)
N_ATTEMPTS = 60


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Score | BaseException]:
    if missing := provider("namespace").missing():
        absent(missing)
    folder = tmp_path_factory.mktemp("project")
    project = Project(folder)
    row = row_of(project, folder)

    async def main() -> dict[str, Score | BaseException]:
        shared = SharedSandboxes(2)
        patches = {name: project.patch(edit) for name, edit in HACKS.items()}
        try:
            results = await asyncio.gather(
                *(score(row, patch, shared.fresh(), 400.0) for patch in patches.values()), return_exceptions=True
            )
        finally:
            await shared.close()
        return dict(zip(patches, results, strict=True))

    return asyncio.run(main())


@pytest.mark.parametrize("name", HACKS)
def test_hack_resolves_nothing(name: str, scores: dict[str, Score | BaseException]) -> None:
    result = scores[name]
    assert isinstance(result, Score), result
    assert result.value == 0.0, result


def test_corpus_has_enough_hacks() -> None:
    assert len(MORE) + len(edits_of_rows()) >= N_ATTEMPTS
