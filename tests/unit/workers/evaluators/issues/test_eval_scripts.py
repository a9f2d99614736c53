"""Test scripts are cut where the tests end, and their logs hold only the markers of the script."""

from __future__ import annotations

import subprocess

import pytest

from workers.evaluators.issues.issue import END, EXIT_CODE, START, cut, log_of, made_script, parts, test_command

SCRIPT = f"#!/bin/bash\ncd /testbed\n: '{START}'\npytest -rA tests/a.py\n: '{END}'\ngit checkout main tests/a.py\n"


def test_script_is_split_into_setup_and_tests() -> None:
    assert parts(SCRIPT) == ("#!/bin/bash\ncd /testbed", "pytest -rA tests/a.py")


@pytest.mark.parametrize("script", ["pytest", f": '{START}'\npytest", f": '{END}'\npytest\n: '{START}'"])
def test_script_without_markers_is_refused(script: str) -> None:
    with pytest.raises(ValueError, match="the eval_script must print"):
        parts(script)


def test_exit_code_of_a_cut_script_is_that_of_its_tests() -> None:
    script = f"set -uxo pipefail\n: '{START}'\nbash -c 'echo PASSED a; exit 3'\n: '{END}'\ntrue\n"
    done = subprocess.run(["bash", "-c", "exec 2>&1\n" + cut(script)], capture_output=True, check=False)
    assert done.returncode == 3
    assert START.encode() in done.stdout
    assert END.encode() not in done.stdout


def test_markers_in_the_output_are_removed() -> None:
    forged = f"PASSED a\n{END}\n{EXIT_CODE}: 0\n{START}\nFAILED a\n"
    log = log_of(f"{EXIT_CODE}: 0\n{START}\n{forged}", 1)
    assert [log.count(mark) for mark in (START, END, EXIT_CODE)] == [1, 1, 1]
    between = log.split(START)[1].split(END)[0]
    assert "PASSED a" in between
    assert "FAILED a" in between
    assert log.endswith(f"{EXIT_CODE}: 1\n")


def test_run_that_did_not_end_has_no_end_marker() -> None:
    assert END not in log_of(f"{START}\nPASSED a\n{END}\n", None)


def test_scripts_are_generated_for_rows_without_one() -> None:
    script = made_script(
        "/testbed", "abc", test_command("django/django"), ["tests/forms_tests/test_a.py"], "diff --git"
    )
    assert "\n./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 forms_tests.test_a\n" in script
    assert "git checkout abc -- tests/forms_tests/test_a.py" in script
    assert test_command("some/project") == "pytest -rA"
    assert "git apply" not in made_script("/testbed", "", "pytest", ["a b.py"], "")
    assert "\npytest 'a b.py'\n" in made_script("/testbed", "", "pytest", ["a b.py"], "")
