"""Judge outputs and values like the scorers of well-known forms: JSON in, and a text of 0 and 1 for each rule out.

`python judge_outputs.py FOLDER`, FOLDER with their sources, run by a Python that has numpy, not by the farm's. Each
output is represented by a program that prints its input, each value by one that returns it. Only the scorers' guards
against programs are omitted, which would lock this process in; CodeContests' scorer is the C++ program in FOLDER.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import subprocess
import sys
import types
from pathlib import Path

FOLDER = Path(sys.argv[1])
PACKAGES = next((FOLDER / ".venv" / "lib").glob("python3.*/site-packages"))
CAT = "import sys\nsys.stdout.write(sys.stdin.read())\n"
VERL = PACKAGES / "verl" / "utils" / "reward_score"


def module(folder, name):
    """Import a module without its parent packages, which would need many dependencies."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def fresh(folder, name):
    result = module(folder, name)
    for each in [each for each in sys.modules if each.partition(".")[0] == name.partition(".")[0]]:
        del sys.modules[each]
    result.reliability_guard = lambda *_: None
    return result


class RuntimeModule:
    """The one function of pyext that scorers use: a module from a source."""

    @staticmethod
    def from_string(name, doc, source):
        result = types.ModuleType(name, doc)
        exec(source, result.__dict__)
        return result


def function(given):
    return f"def f(x):\n    return {given}\n"


def of_livecodebench(judge):
    def is_right(case):
        if case["value"]:
            found = judge.grade_call_based(function(case["given"]), ["0"], [case["expected"]], "f", 60)
        else:
            found = judge.grade_stdio(CAT, [case["given"]], [case["expected"]], 60)
        return bool(found) and all(each == True for each in found[0])  # noqa: E712

    return is_right


def of_apps(run_test, json_texts):
    def is_right(case):
        tests = {"inputs": [case["given"]], "outputs": [case["expected"]]}
        program = CAT
        if case["value"]:
            expected = case["expected"] if json_texts else json.loads(case["expected"])
            tests = {"inputs": ["0" if json_texts else [0]], "outputs": [expected], "fn_name": "f"}
            program = function(case["given"])
        return all(each is True for each in run_test(tests, program))

    return is_right


def of_taco(judge):
    def is_right(case):
        if not case["value"]:
            return bool(judge.compare_std_results(case["given"], case["expected"]))
        inputs, outputs = judge.process_input_output([0], json.loads(case["expected"]))
        judge.reliability_guard = lambda *_: None
        space = {}
        exec(function(case["given"]), space)
        results, _ = judge.execute_cb_code(space["f"], [inputs], [outputs], timeout=60)
        return results[0][1] == "passed"

    return is_right


def one_by_one(is_right):
    def judged(cases):
        marks = []
        for case in cases:
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    marks.append("01"[is_right(case)])
                except Exception:
                    # an exception of a scorer counts as wrong
                    marks.append("0")
        return "".join(marks)

    return judged


def by_eval_plus(rule):
    _, dataset, atol = rule.split(":")
    check = module(FOLDER / "evalplus", "evalplus.eval").untrusted_check

    def judged(cases):
        given = ",\n".join(case["given"] for case in cases)
        code = f"VALUES = [\n{given}\n]\ndef f(i):\n    return VALUES[i]\n"
        expected = [eval(case["expected"]) for case in cases]
        numbers = [[number] for number in range(len(cases))]
        times = [60.0] * len(cases)
        _, details = check(dataset, code, numbers, "f", expected, float(atol), times)
        assert len(details) == len(cases), len(details)
        return "".join("01"[bool(each)] for each in details)

    return judged


def by_code_contests(cases):
    parts = []
    for case in cases:
        given, expected = case["given"].encode(), case["expected"].encode()
        parts.append(b"%d %d\n%b%b\n" % (len(given), len(expected), given, expected))
    done = subprocess.run([FOLDER / "code_contests_judge"], input=b"".join(parts), capture_output=True, check=True)
    return done.stdout.decode()


def judges():
    live = FOLDER / "LiveCodeBench"
    # pyext, and TACO's copy of it, cannot be imported since Python 3.11
    sys.modules["pyext"] = sys.modules["metrics.pyext2"] = types.SimpleNamespace(RuntimeModule=RuntimeModule)
    apps = fresh(FOLDER / "apps" / "eval", "testing_util")
    taco = fresh(FOLDER / "TACO", "metrics.testing_util")
    prime = fresh(VERL / "prime_code", "testing_util")
    result = {
        "livecodebench": one_by_one(of_livecodebench(fresh(live, "lcb_runner.evaluation.testing_util"))),
        "skyrl_lcb": one_by_one(of_livecodebench(fresh(PACKAGES / "skyrl_gym" / "envs" / "lcb", "livecodebench"))),
        "nemo_gym": one_by_one(
            of_livecodebench(fresh(PACKAGES / "resources_servers" / "code_gen", "lcb_integration.testing_util"))
        ),
        "prime_code": one_by_one(of_apps(lambda tests, test: prime.run_test(tests, test=test, timeout=60)[0], True)),
        "apps": one_by_one(
            of_apps(lambda tests, test: apps.run_test(problem={"input_output": tests}, test=test), False)
        ),
        "taco": one_by_one(of_taco(taco)),
    }
    if (FOLDER / "code_contests_judge").exists():
        result["codecontests"] = by_code_contests
    return result


def main():
    requested = json.load(sys.stdin)
    known = judges()
    found = {}
    for rule, cases in requested.items():
        judged = by_eval_plus(rule) if rule.startswith("evalplus") else known.get(rule)
        if judged:
            found[rule] = judged(cases)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
