"""The views of the page over HTTP on a real store: stored data, exports, live numbers, hostile content."""

from __future__ import annotations

import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import httpx2
import pytest

from farm.client.local import LocalFarm
from farm.errors import StoreUnavailable
from farm.ids import rollout_id
from farm.store import trajectories
from farm.store.blobs import artefacts
from farm.web.batch_views import N_BATCHES
from tests.integration.web.hostile_pages import HOSTILE, VIEWS, ParsedPage
from tests.services.farms import NOOP, until
from tests.services.model_calls import model_call


def test_hostile_content_is_shown_as_text_in_every_view(browser: httpx2.Client, batch_id: str) -> None:
    for view in VIEWS:
        answer = browser.get(view.format(b=batch_id))
        assert answer.status_code == 200, (view, answer.text)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        page = ParsedPage(answer.text)
        for tag, attributes in page.tags:
            assert not any(name.startswith("on") for name in attributes), (view, tag)
            assert not str(attributes.get("href", "")).startswith("javascript"), (view, tag)
            if tag == "script":
                assert attributes.get("src", "/web/static/").startswith("/web/static/")  # type: ignore[union-attr]
            assert not (tag == "img" and attributes.get("src") == "x"), view
        assert "\x1b" not in answer.text, view
        assert "\u202e" not in answer.text, view
    transcript = ParsedPage(browser.get(f"/rollouts/{batch_id}.0.0").text)
    assert transcript.words.count("<script>alert(1)</script>") > 5
    assert "{{7*7}}" in transcript.words
    assert "␛[31m⟨U+202E⟩" in transcript.words


def test_views_show_stored_data(browser: httpx2.Client, farm: LocalFarm, batch_id: str) -> None:
    listed = ParsedPage(browser.get("/").text).words
    assert batch_id in listed
    assert "1/4" in listed
    table = ParsedPage(browser.get(f"/batches/{batch_id}/rollouts?failure=engine_error").text)
    links = [str(value.get("href")) for tag, value in table.tags if tag == "a"]
    assert [link for link in links if "/rollouts/" in link] == [f"/web/rollouts/{batch_id}.0.0"]
    assert "No rollout meets this filter" in browser.get(f"/batches/{batch_id}/rollouts?min_reward=1").text
    failures = ParsedPage(browser.get(f"/batches/{batch_id}/failures").text).words
    assert "engine_error" in failures
    assert "<b>node" in failures
    for id, place in (
        (batch_id, f"/web/batches/{batch_id}"),
        (f"{batch_id}.0", f"/web/groups/{batch_id}.0"),
        (f" {batch_id}.0.1 ", f"/web/rollouts/{batch_id}.0.1"),
    ):
        assert browser.get("/find", params={"id": id}).headers["location"] == place


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nothing", 404),
        ("/batches/none", 404),
        ("/batches/none/rollouts", 404),
        ("/batches/none/live", 404),
        ("/batches/none/failures", 404),
        ("/batches/none/figures", 404),
        ("/batches/none/selection", 404),
        ("/batches/none/rollouts.jsonl", 404),
        ("/batches/none/rollouts.parquet", 404),
        ("/groups/none.0", 404),
        ("/groups/none", 404),
        ("/rollouts/none.0.0", 404),
        ("/rollouts/none", 404),
        ("/rollouts/none.0.0/tokens", 404),
        ("/rollouts/none.0.0/trace.json", 404),
        ("/rollouts/none.0.0/artefact?name=x", 404),
        ("/find?id=%00", 404),
        ("/find", 404),
        ("/batches/{b}/rollouts?order=sideways", 400),
        ("/batches/{b}/rollouts?min_reward=nan", 400),
        ("/batches/{b}/rollouts?min_tokens=99999999999999999999", 400),
        ("/batches/{b}/rollouts?unknown=1", 400),
        ("/batches/{b}/rollouts?after=x", 400),
        ("/batches/{b}/rollouts?message=%00", 400),
        ("/rollouts/{b}.0.0/artefact?name=%00", 404),
    ],
)
def test_invalid_address_is_an_error_page(browser: httpx2.Client, batch_id: str, path: str, status: int) -> None:
    answer = browser.get(path.format(b=batch_id))
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert "Traceback" not in answer.text


def test_live_numbers_are_sent_on_change_until_the_batch_has_ended(
    browser: httpx2.Client, farm: LocalFarm, batch_id: str
) -> None:
    parts: list[str] = []
    with browser.stream("GET", f"/batches/{batch_id}/live") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("event:"):
                parts.append(line)
                if len(parts) == 1:
                    farm.cancel(batch_id)
    assert parts[0] == "event: part"
    assert parts[-2:] == ["event: part", "event: end"]


def test_exports_contain_the_rollouts_of_the_filter(browser: httpx2.Client, farm: LocalFarm, batch_id: str) -> None:
    lines = browser.get(f"/batches/{batch_id}/rollouts.jsonl?failure=engine_error").text.splitlines()
    assert [json.loads(line)["rollout_id"] for line in lines] == [f"{batch_id}.0.0"]
    assert json.loads(lines[0])["messages"][0]["content"] == HOSTILE
    from pyarrow import parquet

    table = parquet.read_table(io.BytesIO(browser.get(f"/batches/{batch_id}/rollouts.parquet").content)).to_pylist()
    assert [(row["rollout_id"], row["outcome"]) for row in table] == [(f"{batch_id}.0.0", "engine_error")]
    assert table[0]["messages"][0]["content"] == HOSTILE
    trace = browser.get(f"/rollouts/{batch_id}.0.0/trace.json").json()
    calls = [(each["name"], each["args"]["label"]) for each in trace["traceEvents"] if each.get("cat") == "call"]
    assert calls == [("model call", "call 0: 2 + 2 tokens")]
    alone = browser.get(f"/rollouts/{batch_id}.0.0/page.html")
    assert "attachment" in alone.headers["content-disposition"]
    assert "<script" not in alone.text
    assert not any({"src", "href"} & set(attributes) for _, attributes in ParsedPage(alone.text).tags)


def test_only_image_artefacts_are_shown_inline(browser: httpx2.Client, farm: LocalFarm, batch_id: str) -> None:
    id = f"{batch_id}.0.0"
    png = b"\x89PNG\r\n\x1a\nrest"
    kept = {
        "plot.png": ("image/png", png),
        "evil.svg": ("image/svg+xml", b"<svg onload='alert(1)'/>"),
        HOSTILE[:40]: ("text/html", b"<b>"),
    }
    for name, (media_type, data) in kept.items():
        farm.store.write(partial(_keep, id=id, name=name, media_type=media_type, data=data))
    page = ParsedPage(browser.get(f"/rollouts/{id}").text)
    assert len([tag for tag, _ in page.tags if tag == "img"]) == 1
    for name, (_, data) in kept.items():
        answer = browser.get(f"/rollouts/{id}/artefact", params={"name": name})
        assert answer.content == data
        is_image = name == "plot.png"
        assert answer.headers["content-type"] == ("image/png" if is_image else "application/octet-stream")
        assert answer.headers.get("content-disposition") == (None if is_image else "attachment")
        assert "sandbox" in answer.headers["content-security-policy"]


def _keep(connection: Any, id: str, name: str, media_type: str, data: bytes) -> None:
    row = {"media_type": media_type, "n_bytes": len(data), "data": artefacts.packed(data), "created_at": 1.0}
    connection.execute(artefacts.artefacts.insert().values(rollout_id=id, attempt=1, name=name, **row))


def test_older_batches_are_on_the_next_page(browser: httpx2.Client, farm: LocalFarm) -> None:
    ids = [farm.submit({"instances": [NOOP]}) for _ in range(N_BATCHES + 3)]
    first = browser.get("/").text
    link = next(str(value["href"]) for tag, value in ParsedPage(first).tags if value.get("rel") == "next")
    second = browser.get(link.removeprefix("/web")).text
    assert [batch_id in first for batch_id in ids].count(True) == N_BATCHES
    assert all((batch_id in first) != (f"{batch_id}</a>" in second) for batch_id in ids)
    assert browser.get("/?before=none").status_code == 404


def test_live_numbers_continue_after_a_database_outage(
    browser: httpx2.Client, farm: LocalFarm, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[str] = []
    n_away = 0
    read = farm.store.read

    def away(*arguments: Any, **named: Any) -> Any:
        nonlocal n_away
        if len(parts) == 1 and n_away < 3:
            n_away += 1
            raise StoreUnavailable("the database is away")
        return read(*arguments, **named)

    monkeypatch.setattr(farm.store, "read", away)
    with browser.stream("GET", f"/batches/{batch_id}/live") as answer:
        for line in answer.iter_lines():
            if n_away == 3 and len(parts) == 1:
                farm.cancel(batch_id)
            if line.startswith("event:"):
                parts.append(line)
    assert n_away == 3
    assert parts[-2:] == ["event: part", "event: end"]


@pytest.mark.parametrize(("view", "read"), [("/cluster/live", "nodes"), ("/batches/{b}/live", "status")])
def test_concurrent_viewers_share_the_queries_to_the_store(
    browser: httpx2.Client, farm: LocalFarm, batch_id: str, monkeypatch: pytest.MonkeyPatch, view: str, read: str
) -> None:
    n_viewers, n_lines, n_requests = 8, 4, 0
    ask = getattr(farm, read)

    def counted(*arguments: Any) -> Any:
        nonlocal n_requests
        n_requests += 1
        return ask(*arguments)

    def watch(viewer: int) -> int:
        with browser.stream("GET", view.format(b=batch_id)) as answer:
            # a part, and then a line each second
            looks = (line for line in answer.iter_lines() if line.startswith((":", "event:")))
            return sum(1 for _ in islice(looks, n_lines))

    monkeypatch.setattr(farm, read, counted)
    started = time.monotonic()
    with ThreadPoolExecutor(n_viewers) as pool:
        assert list(pool.map(watch, range(n_viewers))) == [n_lines] * n_viewers
    assert 1 <= n_requests <= time.monotonic() - started + 2 < n_viewers * n_lines


def shown_ids(page: str) -> set[str]:
    hrefs = (str(values.get("href")) for tag, values in ParsedPage(page).tags if tag == "a")
    return {href.rpartition("/")[2] for href in hrefs if href.startswith("/web/rollouts/")}


def test_filter_is_kept_in_links_between_views(browser: httpx2.Client, batch_id: str) -> None:
    met, missed = "?failure=engine_error&node=%3Cb%3Enode&finished_after=1", "?failure=lost"
    for view in ("", "/rollouts", "/failures", "/figures", "/selection"):
        page = browser.get(f"/batches/{batch_id}{view}{met}").text
        links = [str(values.get("href")) for tag, values in ParsedPage(page).tags if tag == "a"]
        for other in ("", "/rollouts", "/failures", "/figures", "/selection"):
            assert f"/web/batches/{batch_id}{other}{met}" in links, (view, other)
        if view:
            fields = {
                values.get("name"): values.get("value") for tag, values in ParsedPage(page).tags if tag == "input"
            }
            assert (fields["node"], fields["finished_after"]) == ("<b>node", "1")
            assert "<option selected>engine_error</option>" in page
        assert browser.get(f"/batches/{batch_id}{view}?order=sideways").status_code == 400
    assert shown_ids(browser.get(f"/batches/{batch_id}/failures{met}").text) == {f"{batch_id}.0.0"}
    assert shown_ids(browser.get(f"/batches/{batch_id}/failures{missed}").text) == set()
    for view, n in (("figures", "meet the filter: "), ("selection", "meet the filter: ")):
        counted = ParsedPage(browser.get(f"/batches/{batch_id}/{view}{met}").text).words
        assert f"{n}1." in counted, (view, counted)
        assert f"{n}0." in ParsedPage(browser.get(f"/batches/{batch_id}/{view}{missed}").text).words


def test_messages_have_anchors_and_orders_require_confirmation(browser: httpx2.Client, batch_id: str) -> None:
    page = ParsedPage(browser.get(f"/rollouts/{batch_id}.0.0").text)
    ids = [values["id"] for tag, values in page.tags if tag == "section" and "id" in values]
    links = [values.get("href") for tag, values in page.tags if tag == "a"]
    assert ids == ["m1", "m2", "m3"]
    assert [link for link in links if link in ("#m1", "#m2", "#m3")] == ["#m1", "#m2", "#m3"]
    for view in VIEWS:
        for tag, values in ParsedPage(browser.get(view.format(b=batch_id)).text).tags:
            if tag == "form" and str(values.get("action")).startswith("/web/orders/"):
                assert values.get("data-confirm"), (view, values)


def test_concurrent_loads_of_the_batch_list_share_one_query(
    browser: httpx2.Client, farm: LocalFarm, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_requests = 0
    ask = farm.batches

    def counted(*arguments: Any) -> Any:
        nonlocal n_requests
        n_requests += 1
        # as long as it takes where batches are large
        time.sleep(0.05)
        return ask(*arguments)

    monkeypatch.setattr(farm, "batches", counted)
    with ThreadPoolExecutor(8) as pool:
        pages = list(pool.map(lambda path: browser.get(path).text, ["/"] * 8))
    assert n_requests == 1
    assert all(batch_id in page for page in pages)
    until(lambda: browser.get("/").is_success and n_requests == 2, "it is kept for fifty times as long as it took", 30)


def test_images_of_messages_are_shown_in_place(browser: httpx2.Client, farm: LocalFarm, batch_id: str) -> None:
    id = rollout_id(batch_id, 1, 0)
    digest = "ab" * 32

    def part(sha256: Any, media_type: Any) -> dict[str, Any]:
        return {"type": "image", "sha256": sha256, "media_type": media_type, "n_bytes": 8}

    none = [part('"><script>', "image/png"), part(digest, "text/html"), part(7, "image/png"), part(digest, None)]
    content = [{"type": "text", "text": "look"}, part(digest, "image/png"), *none]
    log = trajectories.CallLog(id, 1)
    row = log.row(model_call(0, messages=[{"role": "user", "content": content}]))
    farm.store.write(lambda connection: trajectories.record_call(connection, row))
    data = b"\x89PNG\r\n\x1a\n" + b"0" * 8
    farm.store.write(lambda connection: _keep(connection, id, f"{digest}.png", "image/png", data))
    page = ParsedPage(browser.get(f"/rollouts/{id}").text)
    (shown, kept) = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert shown == kept == f"/web/rollouts/{id}/artefact?name={digest}.png"
    assert browser.get(shown.removeprefix("/web")).content == data
    # one file needs nothing else, so it names them
    assert not [tag for tag, _ in ParsedPage(browser.get(f"/rollouts/{id}/page.html").text).tags if tag == "img"]
