"""What ``deploy/`` hands to Kubernetes, Prometheus and an image's builder agrees with the server.

Whether Kubernetes would take the manifests is ``make clients``' to ask: its schemas are large.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from clients.environments import python_of
from quire.cli import command_line
from quire.config import ServerConfig
from quire.server.metrics.definitions import FAMILIES

DEPLOY = Path(__file__).parents[1] / "deploy"
MANIFESTS = DEPLOY / "kubernetes" / "quire.yaml"
ADAPTER = DEPLOY / "kubernetes" / "prometheus-adapter.yaml"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
VALIDATE = """
import sys, yaml, kubernetes_validate
for each in yaml.safe_load_all(open(sys.argv[1])):
    kubernetes_validate.validate(each, sys.argv[2], strict=True)
"""


COMPOSE = DEPLOY / "compose.yaml"
SERVICE = DEPLOY / "systemd" / "quire.service"
SCRAPE = DEPLOY / "prometheus" / "prometheus.yml"


def manifest(kind: str) -> dict[str, Any]:
    """Return the one manifest of a kind."""
    several = yaml.safe_load_all(MANIFESTS.read_text("utf-8"))
    (found,) = [each for each in several if each["kind"] == kind]
    return found


@pytest.fixture
def pod() -> dict[str, Any]:
    return manifest("Deployment")["spec"]["template"]["spec"]


def served(arguments: list[str]) -> ServerConfig:
    """Return what ``quire serve`` makes of the words behind ``quire``."""
    name, *flags = arguments
    command = get_command(command_line(["serve"])).commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, flags)
    fields = ServerConfig.__dataclass_fields__
    given = {key: value for key, value in context.params.items() if key in fields}
    return ServerConfig.from_options(**{k: v for k, v in given.items() if v is not None})


def seconds(pod: dict[str, Any], flag: str) -> float:
    """Return the value that a flag has in the manifest."""
    (value,) = [
        each.partition("=")[2]
        for each in pod["containers"][0]["args"]
        if each.startswith(f"{flag}=")
    ]
    return float(value)


def test_the_server_takes_the_manifests_flags(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    # Keys in place of their files.
    config = served([each.replace("=@", "=") for each in container["args"]])
    assert config.host == "0.0.0.0"
    assert config.api_key
    assert config.port == container["ports"][0]["containerPort"]


def test_a_stop_has_the_time_that_it_takes(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    before_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    stop_s = seconds(pod, "--shutdown-timeout")
    assert before_s + stop_s < pod["terminationGracePeriodSeconds"]
    live = container["livenessProbe"]
    assert live["periodSeconds"] * live["failureThreshold"] > stop_s


def test_all_manifests_are_of_the_same_pods() -> None:
    deployment = manifest("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert manifest("Service")["spec"]["selector"] == labels
    assert manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    target = manifest("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])


def exported() -> set[str]:
    """Return the names of the server's samples."""
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    return {
        family.name + ending for family in FAMILIES for ending in endings.get(family.kind, ("",))
    }


def test_alerts_ask_for_metrics_that_there_are() -> None:
    rules = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]
    for rule in rules:
        names = set(re.findall(r"(?:vllm|quire):\w+", rule["expr"]))
        assert names, rule["alert"]
        assert names <= exported(), rule["alert"]


def test_the_autoscaler_asks_for_metrics_that_the_adapter_names() -> None:
    (rule,) = yaml.safe_load(ADAPTER.read_text("utf-8"))["rules"]
    query = re.search(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    assert query is not None
    named = {
        re.sub(rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1"), name)
        for name in exported()
        if re.match(query[1], name)
    }
    metrics = manifest("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert {each["pods"]["metric"]["name"] for each in metrics} == named


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here (Debian: prometheus)"
)
def test_alerts_fire_when_they_should() -> None:
    command = ["promtool", "test", "rules", "alerts_test.yaml"]
    done = subprocess.run(command, cwd=ALERTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here (Debian: prometheus)"
)
def test_prometheus_takes_the_scrape(tmp_path: Path) -> None:
    for each in (SCRAPE, ALERTS):
        shutil.copy(each, tmp_path)
    (tmp_path / "metrics-key.txt").write_text("key")
    command = ["promtool", "check", "config", SCRAPE.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_scrape_asks_for_a_path_that_the_server_has() -> None:
    (job,) = yaml.safe_load(SCRAPE.read_text("utf-8"))["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["authorization"]["credentials_file"]


def test_the_server_takes_the_flags_of_compose_and_has_time_to_stop() -> None:
    service = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]["quire"]
    config = served(service["command"])
    assert config.host == "0.0.0.0"
    assert float(service["stop_grace_period"].removesuffix("s")) > config.shutdown_timeout
    dockerfile = DEPLOY.parent / service["build"]["dockerfile"]
    assert (COMPOSE.parent / service["build"]["context"]).resolve() == DEPLOY.parent
    assert "ARG PIP_EXTRA_INDEX_URL=" in dockerfile.read_text("utf-8")
    kept = [each.partition(":")[2] for each in service["volumes"]]
    assert f"VOLUME {kept[0]}" in dockerfile.read_text("utf-8")
    (made,) = re.findall(r"install -d -o quire -m 0700 (.+)", dockerfile.read_text("utf-8"))
    assert set(kept) <= set(made.split())  # else a new volume is root's


@pytest.mark.skipif(
    not python_of("compose").exists(), reason="python tests/clients/environments.py compose"
)
def test_compose_takes_the_file() -> None:
    check = python_of("compose").with_name("check-jsonschema")
    command = [str(check), "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def unit() -> dict[str, str]:
    """Return the settings of the service, the last of each name."""
    lines = SERVICE.read_text("utf-8").splitlines()
    return dict(each.split("=", 1) for each in lines if "=" in each and each[0] not in "#[")


def test_the_server_takes_the_flags_of_the_unit_and_has_time_to_stop() -> None:
    settings = unit()
    command, *arguments = settings["ExecStart"].replace("%C", "/var/cache").split()
    assert Path(command).name == "quire"
    config = served(arguments)
    assert float(settings["TimeoutStopSec"]) > config.shutdown_timeout
    assert "MemoryDenyWriteExecute" not in settings  # kernels are compiled on the spot


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    started = unit()["ExecStart"].split()[0]
    copy = tmp_path / SERVICE.name
    copy.write_text(SERVICE.read_text("utf-8").replace(started, sys.executable))
    command = ["systemd-analyze", "verify", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert SERVICE.name not in done.stderr, done.stderr


@pytest.mark.skipif(
    not python_of("kubernetes").exists(), reason="python tests/clients/environments.py kubernetes"
)
@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_kubernetes_takes_the_manifests(version: str) -> None:
    command = [str(python_of("kubernetes")), "-c", VALIDATE, str(MANIFESTS), version]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_image_runs_as_the_manifests_user(pod: dict[str, Any]) -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    user = pod["securityContext"]["runAsUser"]
    assert f"useradd --uid {user} " in text
    assert f"\nUSER {user}\n" in text
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    ignored = (DEPLOY.parent / ".dockerignore").read_text("utf-8").splitlines()
    for name in " ".join(copied).split():
        assert (DEPLOY.parent / name).exists()
        assert f"!{name}" in ignored


def test_the_image_has_what_the_package_needs() -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert "README.md" in text
    assert "-c /src/constraints.txt" in text
