"""The generated parts of docs/reference match the code, and the Python pages name existing modules."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

import farm
from testkit import reference_pages

PYTHON_PAGES = sorted((reference_pages.REFERENCE / "python").glob("*.md"))
DOCUMENTED = r"^::: ([\w.]+)$"


@pytest.mark.parametrize("name", reference_pages.PARTS)
def test_generated_part_matches_the_code(name: str) -> None:
    text = (reference_pages.REFERENCE / name).read_text()
    assert reference_pages.renewed(name, text) == text, "run `make reference`"


def test_edited_part_is_generated_again() -> None:
    text = (reference_pages.REFERENCE / "errors.md").read_text()
    assert reference_pages.renewed("errors.md", text.replace("| `FarmError` |", "| `Error` |")) == text


def test_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"errors\.md has no generated part"):
        reference_pages.renewed("errors.md", "# Errors\n")


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.stem)
def test_documented_modules_and_classes_exist(page: Path) -> None:
    names = re.findall(DOCUMENTED, page.read_text(), re.MULTILINE)
    assert names
    for name in names:
        assert pkgutil.resolve_name(name).__doc__, f"{name} has no docstring"


def test_public_names_of_the_client_are_documented() -> None:
    text = "\n".join(page.read_text() for page in (*PYTHON_PAGES, reference_pages.REFERENCE / "errors.md"))
    documented = [pkgutil.resolve_name(name) for name in re.findall(DOCUMENTED, text, re.MULTILINE)]
    for name in farm.__all__:
        value = getattr(farm, name)
        module = pkgutil.resolve_name(value.__module__)
        assert value in documented or module in documented or f"`{name}`" in text, name
