# SPDX-License-Identifier: Apache-2.0
"""Dockerfile, compose file and manifests say only what the package, KServe and Kubernetes know."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from kimi_triton.llm.metrics import LLM_METRICS
from kimi_triton.llm.vllm_command import VllmCommand
from kimi_triton.serve.cli import _parser
from kimi_triton.vision.metrics import VISION_METRICS

TOP = Path(__file__).parents[2]
DOCKER = TOP / "docker"
FIELDS: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "kserve_fields.json").read_text())
QUANTITY = re.compile(r"^\d+(\.\d+)?(m|[kMGT]i?)?$")
TRITON_METRIC = re.compile(r"\b(nv_inference_\w+|kimi_\w+|vllm:\w+)")


def manifests() -> list[dict[str, Any]]:
    return [
        part for file in sorted((DOCKER / "kserve").glob("*.yaml")) for part in yaml.safe_load_all(file.read_text())
    ]


def manifest_named(name: str, kind: str = "InferenceService") -> dict[str, Any]:
    return next(found for found in manifests() if (found["metadata"]["name"], found["kind"]) == (name, kind))


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return loaded


def dockerfile() -> dict[str, list[str]]:
    """Instruction -> its arguments, continuation lines joined."""
    text = re.sub(r"\\\n\s*", " ", (DOCKER / "Dockerfile").read_text())
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, arguments = line.partition(" ")
            found.setdefault(name, []).append(arguments)
    return found


def check(value: Any, kind: str, where: str) -> None:
    """`value` as the type `kind` of the field table."""
    if kind.startswith("list["):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            check(item, kind[5:-1], f"{where}[{number}]")
    elif kind.startswith("dict("):
        assert isinstance(value, dict), where
        for key, item in value.items():
            check(item, kind[5:-1].partition(", ")[2], f"{where}.{key}")
    elif kind in FIELDS:
        assert isinstance(value, dict), where
        for key, item in value.items():
            assert key in FIELDS[kind], f"{where}: {kind} has no field {key}"
            check(item, FIELDS[kind][key], f"{where}.{key}")
    else:
        assert isinstance(value, {"str": str, "int": int, "bool": bool}.get(kind, object)), f"{where}: not {kind}"


def served_options(words: list[str]) -> Any:
    """The package's own parser must know every word."""
    return _parser().parse_args(words)


@pytest.mark.parametrize(
    "manifest", manifests(), ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}"
)
def test_manifests_have_known_fields_of_the_right_type(manifest: dict[str, Any]) -> None:
    group, version = {"ServingRuntime": ("serving.kserve.io", "v1alpha1")}.get(
        manifest["kind"], ("serving.kserve.io", "v1beta1")
    )
    assert manifest["apiVersion"] == f"{group}/{version}"
    check(manifest, f"V{version.removeprefix('v')}{manifest['kind']}", manifest["kind"])


def test_the_check_above_can_fail() -> None:
    good = manifests()[0]
    for path, wrong in ((["spec", "predictor", "minReplica"], 1), (["spec", "predictor", "minReplicas"], "one")):
        bad = json.loads(json.dumps(good))
        inner = bad
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = wrong
        with pytest.raises(AssertionError):
            check(bad, "V1beta1InferenceService", "bad")


def test_quantities_are_quantities() -> None:
    text = "".join(file.read_text() for file in (DOCKER / "kserve").glob("*.yaml"))
    found = re.findall(r"(?:memory|cpu|sizeLimit|nvidia\.com/gpu): \"?([^\s\",}]+)", text)
    assert len(found) > 10
    assert [value for value in found if not QUANTITY.match(value)] == []


def test_the_runtime_of_the_service_exists_and_serves_its_format() -> None:
    runtime = next(manifest for manifest in manifests() if manifest["kind"] == "ServingRuntime")
    model = next(manifest for manifest in manifests() if manifest["metadata"]["name"] == "kimi-vision")["spec"][
        "predictor"
    ]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [entry["name"] for entry in runtime["spec"]["supportedModelFormats"]]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    container = runtime["spec"]["containers"][0]
    options = served_options([*container["command"][1:], *container["args"], *model["args"]])
    assert options.health_port == container["readinessProbe"]["httpGet"]["port"]
    assert options.http_port == container["ports"][0]["containerPort"]
    assert str(options.metrics_port) == runtime["metadata"]["annotations"]["prometheus.kserve.io/port"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in runtime["spec"]["volumes"]
    }


def test_every_probe_path_is_one_that_the_health_page_has() -> None:
    container = manifest_named("kimi-triton", "ServingRuntime")["spec"]["containers"][0]
    source = (TOP / "python_backend/kimi_triton/serve/health.py").read_text()
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        path = container[name]["httpGet"]["path"]
        assert f'self.path == "{path}"' in source


def test_the_image_copies_what_exists_and_starts_what_the_package_has() -> None:
    steps = dockerfile()
    for copy in steps["COPY"]:
        for source in shlex.split(copy)[:-1]:
            assert (TOP / source).exists(), source
    entry = json.loads(steps["ENTRYPOINT"][0])
    assert entry[0] == "kimi-triton"
    options = served_options(entry[1:])
    assert options.host == "0.0.0.0"
    exposed = {int(port) for port in steps["EXPOSE"][0].split()}
    assert exposed == {options.http_port, options.grpc_port, options.metrics_port, options.health_port}
    health = json.loads(steps["HEALTHCHECK"][0].partition("CMD ")[2])
    assert served_options(health[1:]).http_port == options.http_port
    assert steps["USER"] != ["root"]
    assert int(steps["USER"][0]) >= 10000


def test_images_and_packages_are_pinned() -> None:
    images = [
        *dockerfile()["FROM"],
        *(service["image"] for service in compose()["services"].values() if "image" in service),
    ]
    assert [image for image in images if not re.search(r":v?\d+\.\d+", image)] == []
    tested = dict(line.split("==") for line in (TOP / "tests/requirements.txt").read_text().split() if "==" in line)
    tested = {name.partition("[")[0]: version for name, version in tested.items()}
    pinned = dict(line.split("==") for line in (DOCKER / "constraints.txt").read_text().split() if "==" in line)
    assert pinned == {name: tested[name] for name in pinned}
    assert {"torch", "numpy", "transformers", "tritonclient"} <= pinned.keys()


def test_compose_mounts_files_that_exist_and_gives_options_that_exist() -> None:
    services = compose()["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (DOCKER / volume.split(":")[0]).is_file(), volume
    command = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in services["triton"]["command"]]
    options = served_options([*json.loads(dockerfile()["ENTRYPOINT"][0])[1:], *command])
    assert options.llm_url == ["http://vllm:8100"]
    scraped = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    for job in scraped:
        (target,) = job["static_configs"][0]["targets"]
        assert target.split(":")[0] in services


@pytest.mark.parametrize(("where", "port"), [("compose", 8100), ("kserve", 8080)])
def test_vllm_is_started_as_llm_command_says(where: str, port: int, tiny_k25: Path) -> None:
    if where == "compose":
        words = compose()["services"]["vllm"]["command"]
    else:
        (container,) = next(m for m in manifests() if m["metadata"]["name"] == "kimi-vllm")["spec"]["predictor"][
            "containers"
        ]
        words = container["args"]
    given = {re.sub(r"[= ].*", "", word) for word in words if word.startswith("--")}
    (line,) = VllmCommand(checkpoint=tiny_k25, port=port).lines()
    said = {word for word in shlex.split(line) if word.startswith("--")}
    assert said <= given
    assert given - said <= {"--tensor-parallel-size"}
    assert f"--port={port}" in words


def test_the_dashboard_shows_metrics_that_exist() -> None:
    dashboard = json.loads((DOCKER / "grafana/kimi-triton.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    shown = {name for query in queries for name in TRITON_METRIC.findall(query)}
    ours = {spec.name for spec in (*VISION_METRICS, *LLM_METRICS)}
    for name in shown:
        if name.startswith("kimi_"):
            assert re.sub(r"_(bucket|sum|count)$", "", name) in ours, name
    assert len(shown) >= 15
    assert {name for name in shown if name.startswith("nv_")} <= {
        "nv_inference_request_success", "nv_inference_request_failure", "nv_inference_pending_request_count",
        "nv_inference_queue_duration_us", "nv_inference_request_duration_us",
    }  # fmt: skip
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
