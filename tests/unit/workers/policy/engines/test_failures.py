from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from farm.errors import EngineError, LimitReached
from farm.records.rollout import Outcome
from workers.policy.engines import failures
from workers.policy.engines.failures import NoRoute, broken, refused, retry_after_s
from workers.policy.generation import EngineBusy, EngineRefused, EngineUnfit

DATA = Path(__file__).parents[4] / "data"
RECORDED: dict[str, Any] = orjson.loads((DATA / "vllm_wire" / "requests.json").read_bytes())
ENGINE = "http://e:1/v1"


def test_retry_after_in_seconds_or_as_a_date() -> None:
    assert retry_after_s({"retry-after": "2.5"}) == 2.5
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert 90 < (retry_after_s({"retry-after": date}) or 0) <= 100
    past = format_datetime(datetime.now(UTC) - timedelta(seconds=100), usegmt=True)
    assert retry_after_s({"retry-after": past}) == 0.0


@pytest.mark.parametrize("text", ["", "soon", "inf", "nan", "1e999", "Fri, 99 Foo 2026"])
def test_unreadable_retry_after_is_none(text: str) -> None:
    assert retry_after_s({"retry-after": text}) is None
    assert retry_after_s({}) is None


@pytest.mark.parametrize("status", [429, 503])
def test_busy_status_is_an_error_with_a_retry_time(status: int) -> None:
    farm_error = refused(ENGINE, status, {"retry-after": "3"}, {"error": {"message": "full"}})
    assert isinstance(farm_error, EngineBusy)
    assert farm_error.retry_after_s == 3.0
    assert f"engine {ENGINE} answered {status}: full" in str(farm_error)


@pytest.mark.parametrize(
    ("status", "body", "advice"),
    [
        (400, RECORDED["err_vocab"]["resp"], "the tokenizer is not this model's"),
        (400, RECORDED["err_json"]["resp"], "check the sampling parameters"),
        (422, {"detail": "x"}, "check the sampling parameters"),
        (413, "too large", "check the sampling parameters"),
    ],
)
def test_refusal_has_a_remedy(status: int, body: Any, advice: str) -> None:
    farm_error = refused(ENGINE, status, {}, body)
    assert type(farm_error) is EngineRefused
    assert not farm_error.retryable
    assert f"engine {ENGINE} answered {status}" in str(farm_error)
    assert advice in str(farm_error)


@pytest.mark.parametrize(
    ("status", "body", "advice"),
    [
        (401, {"error": "Unauthorized"}, "check the engine's API key"),
        (403, "Forbidden", "check the engine's API key"),
        (404, "Not Found", "check the address"),
        (405, "Not Allowed", "check the address"),
        (404, RECORDED["err_model"]["resp"], "it does not have this model"),
    ],
)
def test_unfit_engine_refusal_allows_another_engine(status: int, body: Any, advice: str) -> None:
    farm_error = refused(ENGINE, status, {}, body)
    assert isinstance(farm_error, EngineUnfit)
    assert isinstance(farm_error, NoRoute) == (status != 401 and "model" not in advice)
    assert not farm_error.retryable
    assert f"engine {ENGINE} answered {status}" in str(farm_error)
    assert advice in str(farm_error)


def test_redirect_names_the_new_address() -> None:
    farm_error = refused(ENGINE, 307, {"location": "https://b/v1"}, "")
    assert type(farm_error) is EngineError
    assert "it is at https://b/v1: name that address" in str(farm_error)
    assert "somewhere else" in str(refused(ENGINE, 302, {}, ""))


@pytest.mark.parametrize("status", [500, 502, 504, 408])
def test_server_error_is_an_engine_error(status: int) -> None:
    farm_error = refused(ENGINE, status, {}, "<html>bad gateway</html>")
    assert type(farm_error) is EngineError
    assert "look at its log" in str(farm_error)


@pytest.mark.parametrize(
    "body",
    [
        RECORDED["err_len"]["resp"],
        RECORDED["err_len_chat"]["resp"],
        {"error": {"message": "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"}},
        {"error": {"message": "The decoder prompt (length 2048) is longer than the maximum model length of 2048."}},
        {"error": {"message": "too long", "param": "input_tokens", "code": 400}},
        {"error": {"message": "x", "code": "context_length_exceeded"}},
        {"error": {"message": "the request exceeds the available context size", "type": "exceed_context_size_error"}},
        {"object": "error", "message": "The input (12 tokens) is longer than the model's context length (10 tokens)."},
    ],
)
def test_full_context_is_a_limit(body: Any) -> None:
    farm_error = refused(ENGINE, 400, {}, body)
    assert isinstance(farm_error, LimitReached)
    assert farm_error.outcome is Outcome.CONTEXT_FULL


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (httpx2.ReadTimeout(""), "FARM_POLICY_TIMEOUT_S"),
        (httpx2.ConnectError("refused"), "cannot be reached (refused); is it running"),
        (httpx2.ReadError(""), "broke off before it had answered (ReadError)"),
    ],
)
def test_connection_errors_have_a_remedy(error: Exception, advice: str) -> None:
    engine_error = broken(ENGINE, error)
    assert type(engine_error) is EngineError
    assert str(engine_error).startswith(f"engine {ENGINE} ")
    assert advice in str(engine_error)


def test_unreadable_answer_names_the_fault() -> None:
    unreadable = failures.unreadable(ENGINE, KeyError("choices"))
    assert "KeyError('choices')" in str(unreadable)
    assert ENGINE in str(unreadable)
