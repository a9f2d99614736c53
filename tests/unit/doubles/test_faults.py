from __future__ import annotations

import pytest

from farm.errors import UsageError
from tests.doubles.faults import Faults, NoSuchFault, rates


def test_no_fault_strikes_unless_requested() -> None:
    assert [Faults().strike() for _ in range(5)] == [""] * 5


def test_requested_faults_strike_first() -> None:
    faults = Faults({"slow": 1.0})
    faults.fail_next("500", 2)
    faults.fail_next("429")
    assert [faults.strike() for _ in range(4)] == ["500", "500", "429", "slow"]
    assert faults.n_struck == {"500": 2, "429": 1, "slow": 1}
    faults.clear()
    assert faults.strike() == ""


def test_seed_decides_which_calls_are_struck() -> None:
    def struck(seed: int) -> list[str]:
        faults = Faults({"500": 0.2, "reset": 0.1}, seed=seed)
        return [faults.strike() for _ in range(1000)]

    assert struck(1) == struck(1) != struck(2)
    assert 150 < struck(1).count("500") < 250
    assert 60 < struck(1).count("reset") < 140


def test_fault_rates_are_parsed() -> None:
    assert rates(["500:0.1", "hang"]) == {"500": 0.1, "hang": 1.0}
    with pytest.raises(NoSuchFault, match="502"):
        rates(["501:0.1"])
    with pytest.raises(UsageError, match=r"500:0\.1"):
        rates(["500:often"])
    with pytest.raises(NoSuchFault, match="garbage"):
        Faults().fail_next("no")
