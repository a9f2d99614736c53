"""The programs that EvalPlus' own `sanitize` takes from answers, for the function `f`: two lists of texts, in and out.

`python evalplus_sanitize.py FOLDER`, FOLDER with its source. Its data sets, which are downloads, are not imported.
"""

import json
import sys
import types
from pathlib import Path

names = ("get_human_eval_plus", "get_mbpp_plus", "load_solutions", "write_directory", "write_jsonl")
sys.modules["evalplus.data"] = types.SimpleNamespace(**dict.fromkeys(names))
sys.modules["tqdm"] = types.SimpleNamespace(tqdm=iter)
sys.modules["termcolor"] = types.SimpleNamespace(colored=str)
sys.path.insert(0, str(Path(sys.argv[1]) / "evalplus"))
from evalplus.sanitize import sanitize  # noqa: E402

json.dump([sanitize(answer, "f") for answer in json.load(sys.stdin)], sys.stdout)
