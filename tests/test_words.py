"""Names in standard terms: one name per concept, none of our own making; docstrings say what a thing is or does.

A failure prints the place and the term to use; a term that is missing here goes into docs/concepts/glossary.md first.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("farm", "workers", "benchmarks", "examples", "testkit", "tests", "alembic")
PRODUCT = ("farm", "workers")

TERMS = {
    "asleep": "hung, blocked",
    "asked": "requested, parsed_request",
    "asking": "request, client",
    "bell": "message",
    "bells": "messages",
    "book": "script",
    "coming": "upcoming",
    "deaf": "unresponsive",
    "desk": "endpoints",
    "doubted": "suspect",
    "ending": "end, termination",
    "endings": "shutdown_signals",
    "flight": "call, in_flight",
    "forgive": "extend_deadline",
    "found": "the noun that it returns",
    "given": "the noun that it holds",
    "gone": "disconnected, closed (as the first word)",
    "heard": "received",
    "heeded": "acknowledged",
    "ledger": "reporter",
    "nobody": "none, unowned",
    "orphans": "cancelled_sandboxes, reaper",
    "patience": "timeout",
    "porter": "fork_client, fork_server",
    "question": "request, query",
    "questions": "requests, schemas",
    "ring": "enqueue",
    "ringing": "enqueueing",
    "rings": "messages",
    "rung": "enqueued",
    "seat": "router",
    "seats": "slots",
    "shaken": "recently_failed",
    "sick": "out_of_service, unhealthy",
    "standing": "health",
    "stocker": "warm_pool_filler",
    "tally": "counts, load_tracker",
    "told": "reported, parsed",
    "took": "committed",
    "unheard": "undelivered",
    "verdict": "decision, result",
    "verdicts": "decisions, results",
    "want": "demand",
    "wants": "demand",
    "wish": "requested_params, routing_key",
    "wishes": "requested_params",
}
"""Words of our own making, and the standard terms."""

ALLOWED = {
    ("question", "field"): "the name of a data set's field",
    ("in", "flight"): "the standard term",
    ("file", "not", "found"): "Python's own term",
    ("not", "found"): "HTTP's own term",
    ("client", "gone"): "the peer is gone: as a last word it is a state",
    ("sandbox", "gone"): "the same",
    ("peer", "gone"): "the same",
    ("is", "gone"): "the same",
    ("store", "gone"): "the same",
    ("n", "found"): "a count",
}
"""Parts of names that are allowed, and why."""

SENTENCES = ("workers/conformance/",)
"""Here names of functions are statements of a sandbox's promises, and are shown as such."""

OPENINGS = {"What", "Whether", "How", "Where", "Why", "Who", "Which", "Those", "Whose", "That", "When"}
NAMED_AFTER_OTHERS = ("farm/cli/", "workers/conformance/promises/")
"""Commands, and promises, about something with a module of that name elsewhere."""
REPEATED_FILES = {
    "__init__": "a package",
    "__main__": "what `python -m` runs",
    "app": "the application of a server, of which there are several",
    "conftest": "pytest's",
    "env": "Alembic's",
    # one folder per vendor or protocol, with the same parts under the same names
    "chat": "the chat endpoint, of one protocol",
    "control": "the control endpoints, of one vendor",
    "generate": "the generate endpoint, of one vendor",
    "requests": "the request bodies, of one vendor",
    "wire": "the paths and formats of one vendor",
    # the same resource at different levels: its endpoints, its records, its tables, its commands
    "batches": "one resource",
    "engines": "one resource",
    "rollouts": "one resource",
    "rollout": "one resource",
    "nodes": "one resource",
    "images": "one resource",
    "runs": "one resource",
}
"""Names of files that may exist in several folders, and why."""


def _files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    """Return a module with only its definitions and docstrings: whole trees of all files take a gigabyte."""
    tree = ast.parse(path.read_text())
    tree.body = list(_outline(tree.body))
    return tree


def _outline(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for each in body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            each.body = list(_outline(each.body))
            each.decorator_list = []
            yield each
        elif isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
            yield each
        else:
            inner = [child for child in ast.iter_child_nodes(each) if isinstance(child, ast.stmt | ast.excepthandler)]
            if kept := list(_outline(inner)):  # type: ignore[arg-type]
                yield ast.If(ast.Constant(True), kept, [])


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def _forbidden(name: str) -> Iterator[str]:
    words = _words(name)
    for n, word in enumerate(words):
        if word in TERMS:
            around = {tuple(words[max(0, n - before) : n + after]) for before in range(3) for after in range(1, 4)}
            if not around & set(ALLOWED):
                yield f"`{name}`: not {word}, but {TERMS[word]}"


def _named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the public classes, functions and methods of a module."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for body in [tree.body, *(node.body for node in classes)]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
                "_"
            ):
                yield node.lineno, node.name


def _at(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def words_of_our_own() -> list[str]:
    """Return the names of the product's modules, classes and functions, and of all classes, that contain such words."""
    faults = [
        f"{_at(path, 1)}: {fault}"
        for path in _files(*PACKAGES)
        for fault in _forbidden(path.stem)
        if path.stem[:4] != "test"
    ]
    for path in _files("farm", "workers", "benchmarks", "examples", "testkit"):
        if not str(path.relative_to(ROOT)).startswith(SENTENCES):
            named = _named(_tree(path))
            faults += [f"{_at(path, line)}: {fault}" for line, name in named for fault in _forbidden(name)]
    for path in _files("tests"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                faults += [f"{_at(path, node.lineno)}: {fault}" for fault in _forbidden(node.name)]
    return faults


def riddles() -> list[str]:
    """Return the docstrings that begin with a word that defers their subject."""
    faults = []
    for path in _files(*PACKAGES):
        for node in ast.walk(_tree(path)):
            for line, text in _docstrings(node):
                opening = re.match(r"\W*(\w+)", text)
                if opening and opening.group(1) in OPENINGS:
                    first = text.strip().splitlines()[0]
                    faults.append(f"{_at(path, line)}: {first[:70]!r}: name the thing, or `Return …`, `Tell whether …`")
    return faults


def _docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines and texts that describe a module, class or function, or the constant or attribute above them."""
    body = getattr(node, "body", None)
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not isinstance(
        body, list
    ):
        return
    for each in body:
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
            yield each.lineno, each.value.value


def classes_of_one_name() -> list[str]:
    """Return the public classes of modules that share their name with another."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in _files(*PACKAGES):
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(_at(path, node.lineno))
    return [
        f"{', '.join(at)}: {name}: one name for one thing, or `_{name}`" for name, at in homes.items() if len(at) > 1
    ]


def files_of_one_name() -> list[str]:
    """Return the modules of the product that share their name with another."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in _files(*PRODUCT):
        place = str(path.relative_to(ROOT))
        if not place.startswith(NAMED_AFTER_OTHERS):
            homes[path.stem].append(place)
    return [
        f"{', '.join(at)}: one name for one thing"
        for name, at in homes.items()
        if len(at) > 1 and name not in REPEATED_FILES
    ]


@pytest.mark.parametrize("faults", [words_of_our_own, riddles, classes_of_one_name, files_of_one_name])
def test_names_and_docstrings_are_in_standard_terms(faults: Callable[[], list[str]]) -> None:
    found = faults()
    assert not found, f"{len(found)}:\n" + "\n".join(found)
