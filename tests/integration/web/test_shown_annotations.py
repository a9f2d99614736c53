"""Annotations of trainers on the page of tokens: listed, and shown over their row's tokens; their names are data."""

from __future__ import annotations

import httpx2
import numpy as np

from farm.store.database import Store
from tests.contract.retention.test_pruning import ended_batch, farm_of
from tests.integration.web.hostile_pages import HOSTILE, ParsedPage


def test_annotations_are_listed_and_shade_the_tokens_of_their_row(sqlite_store: Store, browser: httpx2.Client) -> None:
    rollout_id = f"{ended_batch(sqlite_store)}.0.0"
    path = f"/rollouts/{rollout_id}/tokens"
    assert "Annotations of trainers" not in browser.get(path).text
    name = f"loss {HOSTILE}"[:64]
    farm_of(sqlite_store).annotate(
        name,
        7,
        [
            {"rollout_id": rollout_id, "name": "advantage", "value": -0.625},
            {"rollout_id": rollout_id, "name": name, "row": 0, "tokens": np.asarray([2.5], np.float32)},
        ],
    )
    plain = ParsedPage(browser.get(path).text)
    assert "-0.625" in plain.words
    assert name in plain.words
    assert [value.get("href") for tag, value in plain.tags if tag == "a"].count("?by=1") == 1
    shaded = browser.get(path, params={"by": "1"}).text
    assert 'class="tokens by"' in shaded
    assert shaded.count('class="t l0 p3"') + shaded.count('class="t p3"') == 2, "of the key and of the token"
    assert "<script>" not in shaded
    for by in ("0", "2", "-1", "x", "9" * 30):
        answer = browser.get(path, params={"by": by})
        assert (answer.status_code, 'class="tokens by"' in answer.text) == (200, False)
