"""The dashboard and alert rules in `deploy`: each metric and each label value that they name is exported.

Prometheus's own `promtool` checks the rules, too.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import farm
from farm import metrics
from farm.embedded.embedded_farm import Embedded
from farm.store.database import Store
from tests.conftest import absent
from tests.services.apptainer import HOME
from tests.services.farms import NOOP, embedded, farm_folder, until

DEPLOY = Path(__file__).parents[3] / "deploy"
RULES = DEPLOY / "prometheus" / "rollout-farm.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "rollout-farm.json"
SELECTOR = re.compile(r'(\w+)\s*(?:!=|=~|!~|=)\s*"([^"]*)"')


def expressions() -> list[str]:
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return rules + [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.fixture(scope="module")
def here() -> Iterator[Embedded]:
    with farm_folder() as folder, embedded(folder) as running:
        yield running


def test_metrics_and_labels_of_dashboards_and_rules_are_exported(here: Embedded) -> None:
    store = Store(here.store_url)

    def exported() -> Mapping[str, list[dict[str, str]]]:
        found: dict[str, list[dict[str, str]]] = {}
        for family in text_string_to_metric_families(generate_latest(metrics.registry(store, 60.0)).decode()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append({**sample.labels, "": str(sample.value)})
        return found

    with farm.connect(here.store_url, broker_url=here.broker_url) as client:
        client.wait(client.submit({"instances": [NOOP]}), 600)
    until(lambda: {"outcome": "submitted", "": "1.0"} in exported()["farm_rollouts_ended_total"], "it is counted")
    known = exported()
    store.close()
    named = set()
    for expression in expressions():
        for name, selectors in re.findall(r"\b(farm_\w+)(?:\{([^}]*)\})?", expression):
            assert name in known, expression
            named.add(name)
            for label, pattern in SELECTOR.findall(selectors):
                values = {each.get(label, "") for each in known[name]}
                for alternative in pattern.split("|"):
                    assert any(re.fullmatch(alternative, value) for value in values), (
                        f"{expression}: {label}={alternative}"
                    )
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in known}
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named} == families, "all are shown"


def test_promtool_accepts_the_rules_and_dashboard_expressions(tmp_path: Path) -> None:
    promtool = shutil.which("promtool") or shutil.which(HOME / "prometheus" / "usr" / "bin" / "promtool")
    if promtool is None:
        absent("no promtool: run `make promtool`")
    as_rules = [
        {"record": f"x{at}", "expr": each.replace("$__rate_interval", "5m")} for at, each in enumerate(expressions())
    ]
    (tmp_path / "dashboard.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": as_rules}]}))
    subprocess.run([promtool, "check", "rules", RULES, tmp_path / "dashboard.yml"], check=True)
    config: list[str | Path] = [
        promtool,
        "check",
        "config",
        "--syntax-only",
        DEPLOY / "prometheus" / "prometheus.yml",
    ]
    subprocess.run(config, check=True)
