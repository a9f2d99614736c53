"""The check of an LLM server by `farm doctor --engine URL`: its capabilities for the farm, and missing ones."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TextIO

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from farm.configuration.service_urls import normal_url, sound_key
from farm.errors import FarmError
from farm.records.engine import EngineInfo
from workers.policy import tool_calls
from workers.policy.engines import detect
from workers.policy.engines.capabilities import NO_VERSIONS
from workers.policy.engines.connection import FAILURES, EngineConnection, Refusal
from workers.policy.engines.kind import wire_of
from workers.policy.generation import EngineAddress
from workers.policy.tokens.tokenizer import ModelText, load

console = Console()

_LOGPROBS = {"raw": "of the model itself, before temperature and filters", "processed": "after temperature and filters"}
_SPOKEN = 'Ünïcode ✓ 漢字\n\tif x_1 != 0.25: return {"a": [1, 22, 333]}  # ok'
"""Text that tokenizers of different models split differently."""


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """One line of the table; `ok` False marks something that training lacks."""

    what: str
    ok: bool
    text: str


@click.command()
@click.argument("url")
@click.option("--key-file", type=click.File(), help="A file with its API key, which keeps it out of `ps`.")
@click.option("--model", default="", help="Default: the first that it lists.")
@click.option("--tokenizer", default="", metavar="NAME", help="A folder or a hub name; by default the engine's own.")
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, metavar="SECONDS", help="For one answer.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def main(url: str, key_file: TextIO | None, model: str, tokenizer: str, timeout_s: float, as_json: bool) -> None:
    """Ask the engine at URL (http://host:port/v1) for a few tokens, and show its capabilities. Exit 1 on failure."""
    key = key_file.read().strip() if key_file is not None else "none"
    try:
        address = EngineAddress(normal_url(url), model, sound_key(key), tokenizer)
        info = asyncio.run(detect(address, timeout_s=timeout_s))
    except FarmError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    findings = [*_able(info), *_text(address, info)]
    if as_json:
        shown = {"url": address.url, "info": info.model_dump(mode="json"), "findings": [*map(asdict, findings)]}
        print(json.dumps(shown, indent=1))
    else:
        _show(address, info, findings)


def _able(info: EngineInfo) -> Iterator[EngineCheck]:
    wire = wire_of(info)
    yield EngineCheck("kind", True, f"{info.kind} {info.version}".strip())
    context = f", context {info.context_tokens:,} tokens" if info.context_tokens else ", unknown context"
    yield EngineCheck("model", True, f"{info.model}{f' from {info.root}' if info.root else ''}{context}")
    yield EngineCheck("token ids in", bool(info.token_in), wire.path if wire is not None else "no")
    yield EngineCheck("token ids out", info.token_out, "with log-probabilities" if info.token_out else "no: text only")
    yield EngineCheck("log-probabilities", bool(info.logprobs), _LOGPROBS.get(info.logprobs, "none that can be used"))
    is_able = bool(info.token_in) and NO_VERSIONS not in info.notes
    yield EngineCheck(
        "weight versions",
        is_able,
        "reported with every answer" if is_able else "not reported; the farm's own is recorded",
    )
    control = "pauses and takes versions itself" if info.control else "no; the farm holds its own calls back instead"
    yield EngineCheck("control", info.control, control)


def _text(address: EngineAddress, info: EngineInfo) -> Iterator[EngineCheck]:
    """Check the tokenizer and chat template, which token ids require on the farm's side."""
    name = address.tokenizer or info.root or info.model
    try:
        text = load(name)
    except FarmError as error:
        yield EngineCheck("tokenizer", False, str(error))
        return
    agrees = asyncio.run(_agrees(address, info, text))
    notes = {True: "; splits text as the engine does", False: "; splits text otherwise than the engine does", None: ""}
    yield EngineCheck("tokenizer", agrees is not False, f"{name}{notes[agrees]}")
    tool_format = tool_calls.detect(text.template.source)
    yield EngineCheck("tool calls", tool_format != "none", f"written as {tool_format}")


async def _agrees(address: EngineAddress, info: EngineInfo, text: ModelText) -> bool | None:
    """Return whether the engine splits a text into the same ids; None if it cannot report its own."""
    connection = EngineConnection(address.url, address.key, 10.0)
    try:
        body = {"model": info.model, "prompt": _SPOKEN, "add_special_tokens": False}
        value = await connection.post("/tokenize", body)
        return bool(value["tokens"] == text.tokenizer.encode(_SPOKEN).tolist())
    except (Refusal, *FAILURES, KeyError, TypeError):
        return None
    finally:
        await connection.aclose()


def _show(address: EngineAddress, info: EngineInfo, findings: list[EngineCheck]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark = "[green]ok[/green]" if finding.ok else "[yellow]no[/yellow]"
        table.add_row(mark, finding.what, escape(finding.text))
    console.print(f"engine {address.url}", highlight=False)
    console.print(table)
    for note in info.notes:
        console.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    lacking = [finding.what for finding in findings if not finding.ok]
    decision = f"it lacks: {', '.join(lacking)}" if lacking else "rollouts on it are token-exact"
    console.print(decision, highlight=False)


if __name__ == "__main__":
    sys.exit(main(prog_name="farm doctor --engine"))
