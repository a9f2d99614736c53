"""The options of the installed trainers are mapped or refused by adapters, or the trainers' own: new ones fail here."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tests.conftest import absent
from tests.trainers.conftest import ROOT, Program

OPTIONS = json.loads((ROOT / "tests/data/trainer_options.json").read_text())


def test_every_option_of_an_installed_trainer_is_known(run: Program, trainers: Path) -> None:
    installed = run("installed_options", trainers)
    missing = {name.partition(".")[0] for name in OPTIONS.keys() - installed.keys()}
    assert missing <= {"slime", "rllm", "prime_rl"}, "only sources that are on no package index may be missing"
    for trainer, names in installed.items():
        listed = OPTIONS[trainer]
        known = {*listed["mapped"], *listed["refused"], *itertools.chain(*listed["of_trainer"].values())}
        assert set(names) - known == set(), f"options of {trainer} that are new"
        assert known - set(names) == set(), f"options of {trainer} that are gone"
    if missing:
        absent(f"no source of {', '.join(sorted(missing))}: tests/trainers/environment.sh could not fetch it")
