"""Every view in Chromium with a running farm: changes are shown, no errors, all elements can be reached."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farm
from farm.client.local import LocalFarm
from farm.web.app import application
from tests.doubles import EngineDouble
from tests.services.api import KEY, served
from tests.services.farms import embedded, farm_folder, until
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

QUESTION = "How many hops?"
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
LOOKS = ScriptedTurn(
    content=f"I look. {HOSTILE}",
    reasoning="perhaps four",
    tool_calls=(ScriptedCall(name="python", arguments={"code": f"print({HOSTILE!r} * 40)"}),),
)
SCRIPT = Script(
    problems=[
        ScriptedProblem(
            match=QUESTION,
            branches=(
                Branch(name="right", turns=(LOOKS, ScriptedTurn(content="<answer>4</answer>"))),
                Branch(name="wrong", turns=(ScriptedTurn(content="<answer>5</answer>"),)),
            ),
        )
    ]
)
VIEWS = {
    "batches": "/",
    "batch": "/batches/{b}",
    "rollouts": "/batches/{b}/rollouts",
    "failures": "/batches/{b}/failures",
    "figures": "/batches/{b}/figures",
    "selection": "/batches/{b}/selection",
    "group": "/groups/{b}.0",
    "transcript": "/rollouts/{r}",
    "terminal": "/rollouts/{r}/terminal",
    "tokens": "/rollouts/{r}/tokens",
    "annotations": "/rollouts/{r}/tokens?by=1",
    "timeline": "/rollouts/{r}/timeline",
    "cluster": "/cluster",
    "alarms": "/alarms",
}
_AXE = Path(os.environ["FARM_WEB_PACKAGES"]) / "axe_playwright_python" / "axe.min.js"


@pytest.fixture(scope="module")
def client() -> Iterator[LocalFarm]:
    with (
        farm_folder() as folder,
        serving(EngineDouble(SCRIPT, weight_version="3").app()) as policy,
        embedded(folder, FARM_POLICY_URL=f"{policy}/v1") as here,
        farm.connect(here.store_url, broker_url=here.broker_url) as connected,
    ):
        assert isinstance(connected, LocalFarm)
        until(lambda: connected.engines()[0].engine.info is not None, "the engine was asked what it can do")
        yield connected


@pytest.fixture(scope="module")
def url(client: LocalFarm) -> Iterator[str]:
    with served(client, page=application) as api:
        yield f"{api}/web"


@pytest.fixture(scope="module")
def batch_id(client: LocalFarm) -> str:
    """A batch that has run."""
    batch_id = client.submit(_request(3, 4))
    client.wait(batch_id, 300)
    client.annotate("grpo", 1, _figures(client, batch_id))
    return batch_id


@pytest.fixture(scope="module")
def long_named(client: LocalFarm) -> str:
    """A batch with long, malicious names without a space."""
    name = f"{'y' * 90}{HOSTILE.replace(' ', '')}"[:190]
    fields = {"question": QUESTION, "answer": "4"}
    instance = {"data_source": "answer", "instance_id": name, "fields": fields}
    batch_id = client.submit({"instances": [instance], "n_samples": 2, "metadata": {name: name}})
    client.wait(batch_id, 300)
    client.annotate(name[:60], 1, _figures(client, batch_id))
    return batch_id


def _figures(client: LocalFarm, batch_id: str) -> list[dict[str, Any]]:
    """The advantage of each rollout, as a whole and by token, as a trainer writes it back."""
    result: list[dict[str, Any]] = []
    for rollout in client.collect(batch_id, timeout_s=0):
        advantage = {"rollout_id": rollout.rollout_id, "name": "advantage"}
        value = 2.0 * (rollout.reward or 0.0) - 1.0
        result.append(advantage | {"value": value})
        for row, segment in enumerate(rollout.segments):
            result.append(advantage | {"row": row, "tokens": value * np.asarray(segment.response_mask, np.float32)})
    return result


def _request(n_groups: int, n_samples: int) -> dict[str, Any]:
    fields = {"family": "chain_sum", "question": QUESTION, "answer": "4", "metadata": {}}
    instances = [{"data_source": "math", "instance_id": f"hops-{n}", "fields": fields} for n in range(n_groups)]
    return {"instances": instances, "n_samples": n_samples}


class Tab:
    """A page of the browser, and all output of its console."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.console: list[str] = []
        page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.console.append(f"error: {error}"))

    @property
    def complaints(self) -> list[str]:
        return [line for line in self.console if line.startswith(("error", "warning"))]


@pytest.fixture
def tab(chromium: Any, url: str) -> Iterator[Tab]:
    """A browser that has signed in like a person."""
    with chromium.new_context(viewport={"width": 1400, "height": 900}) as context:
        made = Tab(context.new_page())
        made.page.goto(f"{url}/cluster")
        made.page.get_by_label("API key of the farm").fill(KEY)
        made.page.get_by_role("button", name="Sign in").click()
        made.page.wait_for_url(f"{url}/cluster")
        yield made


@pytest.mark.parametrize("name", VIEWS)
def test_view_is_shown_without_an_error_and_is_accessible(
    tab: Tab, url: str, client: LocalFarm, batch_id: str, name: str
) -> None:
    looked = next(each.rollout_id for each in client.rollouts(batch_id) if each.n_turns > 1)
    tab.page.goto(url + VIEWS[name].format(b=batch_id, r=looked))
    tab.page.get_by_role("heading", level=1).wait_for()
    assert not str(tab.page.title()).isdigit(), "a script of the policy ran"
    assert _inaccessible(tab.page) == "[]"
    assert tab.complaints == []
    if folder := os.environ.get("FARM_SCREENSHOTS"):
        tab.page.screenshot(path=f"{folder}/{name}.png")


def _inaccessible(page: Any) -> str:
    """Return the complaints of axe-core, as JSON."""
    # the page's policy allows our scripts; it does not allow a checker from outside
    checker = page.context.new_cdp_session(page)
    checker.send("Runtime.evaluate", {"expression": _AXE.read_text()})
    found = checker.send(
        "Runtime.evaluate",
        {
            "expression": "axe.run().then((r) => JSON.stringify(r.violations.map((v) => [v.id, v.nodes[0].html])))",
            "awaitPromise": True,
            "returnByValue": True,
        },
    )
    return str(found["result"]["value"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", VIEWS)
def test_view_fits_a_narrow_window_in_both_colour_schemes(
    chromium: Any, url: str, long_named: str, name: str, scheme: str
) -> None:
    size = {"width": 380, "height": 700}
    with chromium.new_context(viewport=size, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(f"{url}/sign-in")
        page.get_by_label("API key of the farm").fill(KEY)
        page.get_by_role("button", name="Sign in").click()
        page.goto(url + VIEWS[name].format(b=long_named, r=f"{long_named}.0.0"))
        assert not str(page.title()).isdigit(), "a script in a name ran"
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 1, f"{wide} pixels are outside the window"
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, back[4:-1].split(",")[:3])) < 200) == (scheme == "dark")
        assert _inaccessible(page) == "[]"


def test_batch_is_updated_until_it_has_ended(tab: Tab, url: str, client: LocalFarm) -> None:
    batch_id = client.submit(_request(6, 8))
    tab.page.goto(f"{url}/batches/{batch_id}")
    counts = tab.page.locator("#progress")
    counts.get_by_text("48 / 48").wait_for(timeout=240_000)
    assert client.status(batch_id).done
    assert tab.complaints == []


def test_order_is_confirmed_and_carried_out(tab: Tab, url: str, client: LocalFarm) -> None:
    batch_id = client.submit(_request(200, 2))
    tab.page.goto(f"{url}/batches/{batch_id}")
    requested: list[str] = []

    def refuse(dialog: Any) -> None:
        requested.append(dialog.message)
        dialog.dismiss()

    tab.page.once("dialog", refuse)
    tab.page.get_by_role("button", name="Cancel open rollouts").click()
    assert len(requested) == 1
    assert not client.status(batch_id).n_cancelled
    tab.page.once("dialog", lambda dialog: dialog.accept())
    tab.page.get_by_role("button", name="Cancel open rollouts").click()
    tab.page.wait_for_url(f"{url}/batches/{batch_id}")
    assert client.wait(batch_id, 120).n_cancelled


def test_transcript_is_searched_replayed_and_navigated_by_keys(
    tab: Tab, url: str, client: LocalFarm, batch_id: str
) -> None:
    looked = next(each.rollout_id for each in client.rollouts(batch_id) if each.n_turns > 1)
    tab.page.goto(f"{url}/rollouts/{looked}")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("perhaps four")
    assert tab.page.locator(".turn.hit").count() >= 1
    assert (
        "turn" in tab.page.locator("#search-count").inner_text()
        or " of " in tab.page.locator("#search-count").inner_text()
    )
    tab.page.locator("#search").blur()
    tab.page.keyboard.press("j")
    assert tab.page.evaluate("document.activeElement.className").startswith("turn")
    tab.page.locator("#replay-speed").select_option("32")
    tab.page.get_by_role("button", name="Replay").click()
    tab.page.get_by_role("button", name="Replay").wait_for(timeout=60_000)
    assert tab.page.locator(".turn:visible").count() == tab.page.locator(".turn").count()


def test_filter_is_kept_in_the_url(tab: Tab, url: str, batch_id: str) -> None:
    tab.page.goto(f"{url}/batches/{batch_id}/rollouts")
    tab.page.get_by_label("min reward").fill("1")
    tab.page.get_by_role("button", name="Show").click()
    assert "min_reward=1" in tab.page.url
    rows = tab.page.locator("tbody tr").count()
    assert rows > 0
    tab.page.reload()
    assert tab.page.locator("tbody tr").count() == rows
    assert tab.page.get_by_label("min reward").input_value() == "1"


def test_nothing_is_loaded_from_other_servers(tab: Tab, url: str, batch_id: str) -> None:
    requested: list[str] = []
    tab.page.on("request", lambda request: requested.append(request.url))
    for path in VIEWS.values():
        tab.page.goto(url + path.format(b=batch_id, r=f"{batch_id}.0.0"))
    assert [address for address in requested if not address.startswith(url)] == []


def test_all_elements_are_reachable_by_keyboard(chromium: Any, url: str, client: LocalFarm, batch_id: str) -> None:
    def reach(page: Any, words: str) -> None:
        """Move the focus by Tab to the element with this text."""
        for _ in range(200):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.innerText?.trim()") == words:
                return
        raise AssertionError(f"Tab does not lead to {words!r}")

    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(f"{url}/find?id={batch_id}")
        page.keyboard.press("Tab")
        while page.evaluate("document.activeElement.name") != "key":
            page.keyboard.press("Tab")
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        page.wait_for_url(f"{url}/batches/{batch_id}")
        reach(page, "Rollouts")
        page.keyboard.press("Enter")
        page.wait_for_url(f"{url}/batches/{batch_id}/rollouts")
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url(f"{url}/rollouts/*")
        page.keyboard.press("j")
        assert page.evaluate("document.activeElement.id") == "m1"
        before = client.rewards(page.url.rpartition("/")[2])
        page.once("dialog", lambda dialog: dialog.accept())
        reach(page, "Score again")
        with page.expect_navigation():
            page.keyboard.press("Enter")
        until(lambda: len(client.rewards(page.url.rpartition("/")[2])) > len(before), "it is scored again")
        page.keyboard.press("/")
        page.keyboard.type("perhaps")
        assert page.evaluate("document.activeElement.id") == "search"


def test_exported_file_runs_no_script_and_messages_have_anchors(
    tab: Tab, url: str, client: LocalFarm, batch_id: str, tmp_path: Path
) -> None:
    looked = next(each.rollout_id for each in client.rollouts(batch_id) if each.n_turns > 1)
    tab.page.goto(f"{url}/rollouts/{looked}")
    tab.page.get_by_role("link", name="link to message 2").click()
    assert tab.page.url == f"{url}/rollouts/{looked}#m2"
    assert tab.page.evaluate("document.querySelector(':target').id") == "m2"
    with tab.page.expect_download() as download:
        tab.page.get_by_role("link", name="as one file").click()
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    assert file.name == f"{looked}.html"
    requested: list[str] = []
    with tab.page.context.browser.new_context(offline=True) as context:
        alone = Tab(context.new_page())
        alone.page.on("request", lambda request: requested.append(request.url))
        alone.page.goto(file.as_uri())
        assert alone.page.title() == f"{looked} · rollout farm"
        assert HOSTILE in alone.page.locator(".turn.assistant").first.inner_text()
        assert alone.page.evaluate("getComputedStyle(document.querySelector('.turn')).borderLeftWidth") == "4px"
        assert (requested, alone.complaints) == ([file.as_uri()], [])


def test_filter_is_kept_between_views_and_applies_to_downloads(
    tab: Tab, url: str, client: LocalFarm, batch_id: str, tmp_path: Path
) -> None:
    tab.page.goto(f"{url}/batches/{batch_id}/rollouts?max_reward=0.5")
    wanted = {each.rollout_id for each in client.rollouts(batch_id) if (each.reward or 0.0) <= 0.5}
    assert wanted
    for view in ("Selection", "Figures", "Failures", "Rollouts"):
        tab.page.get_by_role("link", name=view, exact=True).click()
        assert tab.page.url == f"{url}/batches/{batch_id}/{view.lower()}?max_reward=0.5"
        assert tab.page.get_by_label("max reward").input_value() == "0.5"
    with tab.page.expect_download() as download:
        tab.page.get_by_role("link", name="JSONL").click()
    download.value.save_as(tmp_path / "some.jsonl")
    lines = (tmp_path / "some.jsonl").read_text().splitlines()
    assert {json.loads(line)["rollout_id"] for line in lines} == wanted
    assert tab.complaints == []
