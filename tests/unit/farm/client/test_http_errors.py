"""An error that is sent over HTTP has the same class and the same complaints on the other side."""

from __future__ import annotations

import pytest

from farm.client.http_errors import error_of, problem_of
from farm.client.request_checks import checked_request
from farm.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable


def test_all_complaints_about_a_request_arrive() -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked_request({"instances": [{"data_source": "a"}, {"fields": {}}], "n_samples": 0, "nonsense": 1})
    sent = refused.value
    assert [field for field, _ in sent.complaints] == [
        "n_samples",
        "instances[0].fields",
        "instances[1].data_source",
        "nonsense",
    ]
    arrived = error_of(problem_of(sent).body())
    assert isinstance(arrived, InvalidRequest)
    assert (arrived.complaints, arrived.field, str(arrived)) == (sent.complaints, sent.field, str(sent))


@pytest.mark.parametrize("error", [InvalidRequest("no", field="a"), InvalidRequest("no"), NotFound("b"), Conflict("k")])
def test_error_with_one_complaint_is_unchanged(error: InvalidRequest | NotFound | Conflict) -> None:
    arrived = error_of(problem_of(error).body())
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)


def test_number_of_sent_complaints_is_limited() -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked_request({"instances": [{} for _ in range(1000)]})
    assert len(refused.value.complaints) == 20


@pytest.mark.parametrize("more", [b'"x"', b"[1]", b'[["a"]]', b"null", b'{"a": 1}'])
def test_unknown_fields_of_another_version_are_ignored(more: bytes) -> None:
    body = b'{"error": {"kind": "InvalidRequest", "message": "no", "field": "a", "more": ' + more + b"}}"
    arrived = error_of(body)
    assert isinstance(arrived, InvalidRequest)
    assert str(arrived) == "a: no"


def test_store_unavailable_keeps_its_class() -> None:
    assert isinstance(error_of(problem_of(StoreUnavailable("gone")).body()), StoreUnavailable)
