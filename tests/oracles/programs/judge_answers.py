"""Judge whole answers like the scorers of well-known forms: JSON in, the score of each answer by rule out.

`python judge_answers.py FOLDER`, like `judge_outputs.py`. All parts of the scorers are used except Ray, which sends
their function to other machines.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import types

from judge_outputs import FOLDER, PACKAGES, VERL, module


def of_livecodebench(folder, package, styles, extraction):
    judge = module(folder, package)
    style = module(folder, styles).LMStyle.OpenAIChat
    extract = module(folder, extraction).extract_code
    for each in [each for each in sys.modules if each.partition(".")[0] == package.partition(".")[0]]:
        del sys.modules[each]

    def score(answer, tests):
        code = extract(answer, style)
        result, _ = judge.check_correctness({"input_output": json.dumps(tests)}, code, timeout=6, debug=False)
        return float(all(each == True for each in result))  # noqa: E712

    return score


def of_skyrl(answer, tests):
    kind = {"testtype": "functional", "metadata": {"func_name": tests["fn_name"]}} if tests["fn_name"] else {}
    pairs = zip(tests["inputs"], tests["outputs"], strict=True)
    cases = [{"input": given, "output": expected, "testtype": "stdin", **kind} for given, expected in pairs]
    judge = module(PACKAGES / "skyrl_gym" / "envs" / "lcb", "livecodebench")
    return judge.compute_score(answer, cases)[1]


def of_verl(answer, tests):
    return float(module(VERL, "prime_code").compute_score(answer, json.dumps(tests), continuous=True)[0])


def scorers():
    remote = lambda *_, **__: lambda function: function  # noqa: E731
    sys.modules["ray"] = types.SimpleNamespace(remote=remote)
    sys.modules["tqdm"] = types.SimpleNamespace(tqdm=iter)
    return {
        "livecodebench": of_livecodebench(
            FOLDER / "LiveCodeBench",
            "lcb_runner.evaluation.compute_code_generation_metrics",
            "lcb_runner.lm_styles",
            "lcb_runner.utils.extraction_utils",
        ),
        "nemo_gym": of_livecodebench(
            PACKAGES / "resources_servers" / "code_gen",
            "lcb_integration.compute_code_generation_metrics",
            "lcb_integration.lm_styles",
            "lcb_integration.extraction_utils",
        ),
        "skyrl_lcb": of_skyrl,
        "prime_code": of_verl,
    }


def main():
    requested = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)
    found = {}
    for rule, score in scorers().items():
        found[rule] = {}
        for name, case in requested.items():
            with contextlib.redirect_stdout(io.StringIO()):
                found[rule][name] = score(case["answer"], case["tests"])
    os.write(out, json.dumps(found).encode())


if __name__ == "__main__":
    main()
