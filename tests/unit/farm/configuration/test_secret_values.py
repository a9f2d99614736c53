"""Secrets in settings, variables and addresses are found, and replaced in displays."""

from __future__ import annotations

import pytest

from farm.configuration.secret_values import (
    has_credentials,
    secret_settings,
    secret_variables,
    secrets_in,
    shown_host,
    without_credentials,
)
from farm.settings import Settings


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:hunter22@host:1/0", "redis://:***@host:1/0"),
        ("postgresql://a:un/es@caped@host/db", "postgresql://a:***@host/db"),
        ("http://host:8000/v1 and a@b", "http://host:8000/v1 and a@b"),
        ("http://host/hook?token=hunter22&n=1", "http://host/hook?token=***&n=1"),
        ("http://host/?api_key=hunter22'", "http://host/?api_key=***'"),
        ("{'Authorization': 'Bearer sk-hunter22'}", "{'Authorization': 'Bearer ***'}"),
        ("Basic authentication failed for bearer certificates", "Basic authentication failed for bearer certificates"),
    ],
)
def test_credentials_are_replaced(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


def test_addresses_with_credentials_are_recognised() -> None:
    assert has_credentials("see http://a:b@c")
    assert not has_credentials("http://host:8000/a@b")
    assert {*secrets_in("http://a:un%2Fescaped@b?key=k")} == {"un%2Fescaped", "un/escaped", "k"}


def test_path_of_a_webhook_is_not_shown() -> None:
    assert shown_host("https://hooks.chat.org:8443/services/T0/hunter22") == "https://hooks.chat.org:8443/..."
    assert shown_host("http://a:b@host") == "http://host"


def test_secret_variables_are_found_by_name_and_by_address() -> None:
    given = {"HF_TOKEN": "one", "HTTPS_PROXY": "http://a:two@b", "TOKENIZERS_PARALLELISM": "x", "PATH": "/bin"}
    assert {*secret_variables(given)} == {"one", "two"}


def test_every_secret_setting_is_known() -> None:
    mapping = {"PIP_INDEX_URL": "http://a:five5@b/simple", "NPM_TOKEN": "six666", "LANG": "C"}
    assert {*secret_settings(["three", "", mapping], ["http://a:four@b", 7, None])} == {
        *("three", "four", "five5", "six666")
    }
    known = Settings(broker_url="redis://:broken1@h/0", search_key="s3cret", webhook_url="http://h/x", policy_key="k")
    assert {"broken1", "s3cret", "http://h/x", "k"} <= known.secrets
    named = {name for name, field in Settings.model_fields.items() if not field.repr}
    suspects = {name for name in Settings.model_fields if name.endswith(("_key", "_secret", "_password", "_token"))}
    assert suspects <= named
