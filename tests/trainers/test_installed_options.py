"""The options of the installed trainers are those that adapters map or refuse, and their own: a new one shows."""

from __future__ import annotations

import json

from tests.trainers.conftest import ROOT, Program

OPTIONS = json.loads((ROOT / "tests/data/trainer_options.json").read_text())


def test_no_option_of_an_installed_trainer_is_unknown(run: Program) -> None:
    installed = run("installed_options")
    assert installed.keys() == OPTIONS.keys()
    for trainer, names in installed.items():
        known = {name for listed in OPTIONS[trainer].values() for name in listed}
        assert set(names) - known == set(), f"options of {trainer} that are new"
        assert known - set(names) == set(), f"options of {trainer} that are gone"
