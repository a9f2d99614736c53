"""What an LLM server can do for the farm, and what would make it more able: `farm doctor --engine URL`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from farm.engine import EngineInfo
from farm.errors import FarmError
from farm.store.engines import normal_url, sound_key
from workers.policy import parsing
from workers.policy.engines import detect
from workers.policy.engines.connection import FAILURES, Connection, Refusal
from workers.policy.engines.detection import NO_VERSIONS
from workers.policy.generation import EngineAddress
from workers.policy.tokens.tokenizer import ModelText, load

console = Console()

_WIRES = {"generate": "/inference/v1/generate", "completions": "/v1/completions", "sglang": "/generate"}
_LOGPROBS = {"raw": "of the model itself, before temperature and filters", "processed": "after temperature and filters"}
_SPOKEN = 'Ünïcode ✓ 漢字\n\tif x_1 != 0.25: return {"a": [1, 22, 333]}  # ok'
"""Text that tokenizers of different models split differently."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table; `ok` False is what training lacks."""

    what: str
    ok: bool
    text: str


@click.command()
@click.argument("url")
@click.option("--key", default="none", help="Its API key.")
@click.option("--model", default="", help="Instead of the first that it lists.")
@click.option(
    "--tokenizer", default="", metavar="NAME", help="A folder or a hub name, instead of what the engine says."
)
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, metavar="SECONDS", help="For one answer.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def main(url: str, key: str, model: str, tokenizer: str, timeout_s: float, as_json: bool) -> None:
    """Ask the engine at URL (http://host:port/v1) for a few tokens, and show what it can do. Exit 1 if it cannot."""
    try:
        address = EngineAddress(normal_url(url), model, sound_key(key), tokenizer)
        info = asyncio.run(detect(address, timeout_s=timeout_s))
    except FarmError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    findings = [*_able(info), *_text(address, info)]
    if as_json:
        print(json.dumps(_json(address, info, findings), indent=1))
    else:
        _show(address, info, findings)


def _able(info: EngineInfo) -> Iterator[Finding]:
    yield Finding("kind", True, f"{info.kind} {info.version}".strip())
    context = f", context {info.context_tokens:,} tokens" if info.context_tokens else ", its context is not told"
    yield Finding("model", True, f"{info.model}{f' from {info.root}' if info.root else ''}{context}")
    yield Finding("token ids in", bool(info.token_in), _WIRES.get(info.token_in, "no"))
    yield Finding("token ids out", info.token_out, "with log-probabilities" if info.token_out else "no: text only")
    yield Finding("log-probabilities", bool(info.logprobs), _LOGPROBS.get(info.logprobs, "none that can be used"))
    told = bool(info.token_in) and NO_VERSIONS not in info.notes
    yield Finding("weight versions", told, "told with every answer" if told else "not told; the fleet's are taken")
    control = "pauses and takes versions itself" if info.control else "no; the farm holds its own calls back instead"
    yield Finding("control", info.control, control)


def _text(address: EngineAddress, info: EngineInfo) -> Iterator[Finding]:
    """Token ids need the model's tokenizer and chat template on the farm's side."""
    name = address.tokenizer or info.root or info.model
    try:
        text = load(name)
    except FarmError as error:
        yield Finding("tokenizer", False, str(error))
        return
    agrees = asyncio.run(_agrees(address, info, text))
    said = {True: "; splits text as the engine does", False: "; splits text otherwise than the engine does", None: ""}
    yield Finding("tokenizer", agrees is not False, f"{name}{said[agrees]}")
    tool_format = parsing.detect(text.template.source)
    yield Finding("tool calls", tool_format != "none", f"written as {tool_format}")


async def _agrees(address: EngineAddress, info: EngineInfo, text: ModelText) -> bool | None:
    """Whether the engine splits a text into the same ids; None if it has no way to say."""
    connection = Connection(address.url, address.key, 10.0)
    try:
        asked = {"model": info.model, "prompt": _SPOKEN, "add_special_tokens": False}
        found = await connection.post("/tokenize", asked)
        return bool(found["tokens"] == text.tokenizer.encode(_SPOKEN).tolist())
    except (Refusal, *FAILURES, KeyError, TypeError):
        return None
    finally:
        await connection.aclose()


def _json(address: EngineAddress, info: EngineInfo, findings: list[Finding]) -> dict[str, Any]:
    return {
        "url": address.url,
        "info": info.model_dump(mode="json"),
        "findings": [{"what": finding.what, "ok": finding.ok, "text": finding.text} for finding in findings],
    }


def _show(address: EngineAddress, info: EngineInfo, findings: list[Finding]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark = "[green]ok[/green]" if finding.ok else "[yellow]no[/yellow]"
        table.add_row(mark, finding.what, escape(finding.text))
    console.print(f"engine {address.url}", highlight=False)
    console.print(table)
    for note in info.notes:
        console.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    lacking = [finding.what for finding in findings if not finding.ok]
    verdict = f"it lacks: {', '.join(lacking)}" if lacking else "rollouts on it are token-exact"
    console.print(verdict, highlight=False)


if __name__ == "__main__":
    sys.exit(main(prog_name="farm doctor --engine"))
