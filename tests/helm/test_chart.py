"""The Helm chart by Helm's own engine: valid on each version of Kubernetes, and its references exist."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from farm.cli.main import COMMANDS
from farm.settings import Settings
from workers.node.command import main as node

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "rollout-farm"
VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
OF_OTHERS = {
    "ScaledObject": {"scaleTargetRef", "pollingInterval", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"},
    "TriggerAuthentication": {"secretTargetRef"},
    "Cluster": {"instances", "bootstrap", "storage"},
}
"""Kinds of KEDA and CloudNativePG, with their fields, from their documentation."""
VALUES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "scaled": {"scaling": {"enabled": True, "min": 0, "max": 40}, "nodes": {"env": {"FARM_LOG": "json"}}},
    "operator": {"postgres": {"kind": "cloudnativepg", "storageClass": "fast"}},
    "servers of the site": {"postgres": {"kind": "external"}, "redis": {"kind": "external"}},
    "kata": {
        "nodes": {
            "runtimeClass": "kata",
            "cacheClaim": "images",
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "farm", "operator": "Exists"}],
        }
    },
}
Manifest = dict[str, Any]


def rendered(values: Mapping[str, Any], name: str = "farm") -> list[Manifest]:
    from helm_python.chart import Chart

    with Chart.load(CHART) as chart:
        files = chart.render(values=dict(values), name=name, namespace="rl")
    texts = [text for file, text in files.items() if file.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return name → the pod of each Deployment and StatefulSet."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in manifests
        if each["kind"].endswith(("ment", "Set"))
    }


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_rendered_manifests_are_valid(values: dict[str, Any]) -> None:
    import kubernetes_validate
    from helm_python.chart import lint

    found = lint(CHART, values=values, strict=True)
    assert not found["errors"]
    assert {each["error"] for each in found["messages"]} <= {"icon is recommended"}
    for manifest in rendered(values):
        if (fields := OF_OTHERS.get(manifest["kind"])) is not None:
            assert set(manifest["spec"]) <= fields
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize(
    "values",
    [
        *({"postgres": {"kind": "sqlite"}}, {"nodes": {"env": {"PATH": "x"}}}, {"nodes": {"slots": 4}}, {"nods": {}}),
        *({"nodes": {"run": 0}}, {"scaling": {"max": 0}}, {"nodes": {"env": {"FARM_LOG": 1}}}, {"secret": ""}),
    ],
)
def test_meaningless_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"values don't meet the specifications|additional|enum|minimum"):
        rendered(values)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_referenced_objects_exist(values: dict[str, Any]) -> None:
    manifests = rendered(values, "a")
    found, services = pods(manifests), of_kind(manifests, "Service")
    assert {"a-api", "a-node"} <= found.keys()
    options = {each for option in cast(Any, node).params for each in option.opts}
    for name, pod in found.items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, "policies must not reach the cluster"
        volumes = {each["name"] for each in spec.get("volumes", [])} | {"data"}
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert {each["name"] for each in container.get("volumeMounts", [])} <= volumes
            env = {each["name"]: each for each in container.get("env", [])}
            assert len(env) == len(container.get("env", [])), "no duplicate variables"
            ours = {each.removeprefix("FARM_").lower() for each in env if each.startswith("FARM_")}
            assert ours <= set(Settings.model_fields) | {"log"}
            urls = " ".join(str(each.get("value", "")) for each in env.values())
            for host in re.findall(r"@([\w.-]+)", urls):
                assert host in services
            if name in ("a-api", "a-node"):
                assert container["args"][0] in COMMANDS | {"node": ""}
                assert {"FARM_STORE_URL", "FARM_BROKER_URL", "FARM_API_KEY", "FARM_SECRET_KEY"} <= env.keys()
    words = found["a-node"]["spec"]["containers"][0]["args"]
    assert {word for word in words if word.startswith("-")} <= options
    grace_s = int(words[words.index("--grace") + 1])
    assert found["a-node"]["spec"]["terminationGracePeriodSeconds"] >= grace_s + 25, (
        "it releases its work before it is killed"
    )
    for service in services.values():
        selected = [
            pod for pod in found.values() if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        assert len(selected) == 1
        ports = {port["containerPort"] for port in selected[0]["spec"]["containers"][0]["ports"]}
        assert {port["port"] for port in service["spec"]["ports"]} <= ports


def test_nodes_scale_with_the_queue() -> None:
    manifests = rendered({"scaling": {"enabled": True}, "nodes": {"init": 2, "run": 30, "eval": 3}})
    deployment = of_kind(manifests, "Deployment")["farm-node"]
    assert "replicas" not in deployment["spec"], "otherwise each upgrade would undo the scaling"
    scaled = of_kind(manifests, "ScaledObject")["farm-node"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == "farm-node"
    (trigger,) = scaled["triggers"]
    assert all(isinstance(each, str) for each in trigger["metadata"].values()), "its schema has nothing else"
    assert trigger["metadata"]["targetValue"] == "35"
    assert trigger["metadata"]["url"] == "http://farm-api.rl.svc:8600/metrics"
    source = (Path(__file__).parents[2] / "farm" / "metrics.py").read_text()
    assert f'"{trigger["metadata"]["valueLocation"]}"' in source
    assert trigger["authenticationRef"]["name"] in of_kind(manifests, "TriggerAuthentication")
    assert of_kind(rendered({}), "ScaledObject") == {}
    assert of_kind(rendered({}), "Deployment")["farm-node"]["spec"]["replicas"] == 1


def test_servers_without_tls_are_reachable_only_from_the_farms_pods() -> None:
    manifests = rendered({})
    assert set(of_kind(manifests, "NetworkPolicy")) == {"farm-postgres", "farm-redis"}
    for policy in of_kind(manifests, "NetworkPolicy").values():
        (rule,) = policy["spec"]["ingress"]
        assert rule["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "farm"}}}]
    assert of_kind(rendered(VALUES["servers of the site"]), "NetworkPolicy") == {}
