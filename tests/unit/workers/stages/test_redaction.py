"""Secrets are removed from recorded, shown and logged text."""

from __future__ import annotations

import asyncio

from farm.records.submission import Submission, SubmittedFile
from farm.records.trajectory import ModelCall
from tests.services.model_calls import model_call
from workers.plugins.interfaces import Artefact
from workers.stages.redaction import Redactor, SecretsInUse
from workers.testing import EchoTool

SECRETS = ["hunter22", "hunter22-long", "short"]
REDACTOR = Redactor(SECRETS)


def test_texts_bytes_and_json_are_redacted() -> None:
    assert REDACTOR.text("a hunter22-long and hunter22, short") == "a [secret] and [secret], short"
    assert REDACTOR.data(b"\xffhunter22\0") == b"\xff[secret]\0"
    assert REDACTOR.json({"hunter22": [{"y": ("hunter22", 1, None)}]}) == {"[secret]": [{"y": ["[secret]", 1, None]}]}
    assert REDACTOR.artefact(Artefact("hunter22.txt", "text/plain", b"hunter22")).data == b"[secret]"


def test_submissions_are_redacted() -> None:
    given = Submission(answer="hunter22", files={"a": "hunter22"}, tree={"b": SubmittedFile(data=b"\xffhunter22")})
    kept = REDACTOR.submission(given)
    assert "hunter22" not in kept.model_dump_json()
    assert kept.tree["b"].data == b"\xff[secret]"
    assert Submission.model_validate(kept.model_dump(mode="json")) == kept
    assert Redactor(()).submission(given) is given


def test_tools_are_redacted() -> None:
    tool = REDACTOR.tool(EchoTool())
    assert asyncio.run(tool.call(EchoTool.arguments(text="hunter22"), 1.0)).text == "[secret]"
    assert (tool.name, tool.description) == (EchoTool.name, EchoTool.description)
    assert isinstance(Redactor(()).tool(EchoTool()), EchoTool)


def test_recorded_calls_are_redacted() -> None:
    kept: list[ModelCall] = []

    async def record(call: ModelCall) -> None:
        kept.append(call)

    secret = {"role": "user", "content": "hunter22"}
    tools = [{"type": "function", "function": {"name": "log_in", "description": "hunter22"}}]
    call = model_call(messages=[secret], response=secret, observations=[secret], tools=tools)
    asyncio.run(REDACTOR.record(record)(call))  # type: ignore[arg-type]
    assert "hunter22" not in str(kept)
    assert str(kept).count("[secret]") == 4
    assert call.tools is tools


def test_secrets_in_use_are_counted() -> None:
    in_use = SecretsInUse()
    with in_use.held(["hunter22"]):
        with in_use.held(["hunter22"]):
            pass
        assert in_use.redacted("hunter22") == "[secret]"
    assert in_use.redacted("hunter22") == "hunter22"
    in_use.add("hunter22")
    assert in_use.redacted("hunter22") == "[secret]"


def test_process_secrets_and_credentials_are_always_redacted() -> None:
    in_use = SecretsInUse(lambda: ["of-the-farm"])
    given = "of-the-farm http://a:hunter22@b/ Authorization: Basic aHVudGVyMjI= Basic authentication"
    assert in_use.redacted(given) == "[secret] http://a:***@b/ Authorization: Basic *** Basic authentication"
