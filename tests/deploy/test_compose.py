"""What compose.yaml promises about ports, rights and data, read from its text: these run where there is no Docker."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from weightbus.control.cli import entry_point as cli
from weightbus.control.server.settings import CoordinatorSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
Service = dict[str, Any]


def defaults(value: str) -> str:
    """The text as it reads where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Service]:
    return compose["services"]


def test_both_composes_understand_it(compose: dict[str, Any]) -> None:
    """No top-level key that either docker-compose 1.28 or `docker compose` refuses or warns of."""
    assert {key for key in compose if not key.startswith("x-")} == {"services", "volumes"}


def test_every_port_is_on_the_loopback_unless_told(services: dict[str, Service]) -> None:
    """A plain `up` opens nothing to the network (S20)."""
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published
    for port in published:
        assert defaults(port).startswith("127.0.0.1:"), port
    assert "--web.listen-address=127.0.0.1:$$PROMETHEUS_PORT" in services["prometheus"]["command"][0]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def prometheus_config(services: dict[str, Service], folder: Path, **ports: str) -> dict[str, Any]:
    """What Prometheus is told in `folder` if `.env` has these ports: its entry point's shell, up to the program."""
    [entry] = services["prometheus"]["command"]
    script = (
        entry.replace("$$", "$").replace("/etc/prometheus", str(DEPLOY / "prometheus")).replace("/tmp", str(folder))
    )
    script = re.sub(r"^exec .*", "", script, flags=re.MULTILINE | re.DOTALL)
    variables = {
        name: ports.get(re.sub(r"\$\{(\w+):-.*", r"\1", value), defaults(value))
        for name, value in services["prometheus"]["environment"].items()
    }
    subprocess.run(["/bin/sh", "-euc", script], check=True, env=variables, timeout=30)
    return yaml.safe_load((folder / "prometheus.yml").read_text())


@pytest.mark.parametrize(
    ("ports", "targets"),
    [
        ({}, {"weightbus-coordinator": "127.0.0.1:5752", "prometheus": "127.0.0.1:9090"}),
        (
            {"WEIGHTBUS_HTTP_PORT": "15752", "PROMETHEUS_PORT": "19090"},
            {"weightbus-coordinator": "127.0.0.1:15752", "prometheus": "127.0.0.1:19090"},
        ),
    ],
)
def test_one_variable_moves_a_port_and_what_reads_it(
    services: dict[str, Service], tmp_path: Path, ports: dict[str, str], targets: dict[str, str]
) -> None:
    """Prometheus scrapes the published HTTP port and itself at their present ports, and follows the list of engines."""
    found = {
        job["job_name"]: job["static_configs"][0]["targets"][0]
        for job in prometheus_config(services, tmp_path, **ports)["scrape_configs"]
        if "static_configs" in job
    }
    assert found == targets
    assert not (tmp_path / "prometheus.yml").is_symlink()
    for name in ("alerts.yml", "engines.yml"):
        assert (tmp_path / name).resolve() == DEPLOY / "prometheus" / name
    [published] = [port for port in services["coordinator"]["ports"] if port.endswith(":5752")]
    assert services["prometheus"]["environment"]["HTTP_PORT"] in published
    assert defaults(services["grafana"]["environment"]["PROMETHEUS_URL"]) == "http://127.0.0.1:9090"


def test_grafana_finds_its_data_source_and_its_dashboard(services: dict[str, Service]) -> None:
    """Provisioned files have the keys of Grafana's schema and name what compose.yaml mounts; there is no login."""
    grafana = services["grafana"]
    mounts = dict(volume.removesuffix(":ro").split(":") for volume in grafana["volumes"])
    provisioning = DEPLOY / "grafana/provisioning"
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    sources = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())
    [source] = sources["datasources"]
    assert sources["apiVersion"] == 1
    assert source["url"].removeprefix("$") in grafana["environment"]
    assert (source["type"], source["access"], source["isDefault"]) == ("prometheus", "proxy", True)
    boards = yaml.safe_load((provisioning / "dashboards/weightbus.yml").read_text())
    [provider] = boards["providers"]
    assert (boards["apiVersion"], provider["type"]) == (1, "file")
    board = mounts["./grafana/weightbus.json"]
    assert board.startswith(f"{provider['options']['path']}/")
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == board
    assert grafana["environment"]["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="no docker-compose is installed")
def test_docker_compose_accepts_the_file() -> None:
    """All variables have defaults, and every key is known."""
    command = ["docker-compose", "--file", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    subprocess.run(command, check=True, timeout=60)


def test_what_has_no_authentication_stays_on_the_loopback(services: dict[str, Service]) -> None:
    """No variable moves the HTTP port to another address: it would hand the status to everybody."""
    [http] = [port for port in services["coordinator"]["ports"] if port.endswith(":5752")]
    assert http.startswith("127.0.0.1:")


def test_listening_off_the_loopback_comes_with_keys(services: dict[str, Service]) -> None:
    """The bus leaves the container's loopback only with CURVE, and the keys are mounted read-only."""
    environment = services["coordinator"]["environment"]
    folder = environment["WEIGHTBUS_COORDINATOR_KEYS"]
    assert environment["WEIGHTBUS_COORDINATOR_BIND"] == "0.0.0.0"
    assert any(volume.endswith(f":{folder}:ro") for volume in services["coordinator"]["volumes"])


def test_no_secret_is_in_the_environment(services: dict[str, Service]) -> None:
    """Keys are files: what is in the environment is in every `docker inspect` (S20)."""
    for service in services.values():
        for name in service.get("environment", {}):
            assert not re.search(r"SECRET|TOKEN|PASSWORD|_KEY$", name)


def test_settings_exist(services: dict[str, Service]) -> None:
    """Every variable given to the coordinator names a setting of it."""
    prefix = "WEIGHTBUS_COORDINATOR_"
    names = {field.name for field in msgspec.structs.fields(CoordinatorSettings)}
    for variable in services["coordinator"]["environment"]:
        assert variable.removeprefix(prefix).lower() in names, variable


def test_ports_are_the_coordinators_defaults(services: dict[str, Service]) -> None:
    """What is published is what the coordinator listens on."""
    settings = CoordinatorSettings()
    inside = {int(port.rsplit(":", 1)[1]) for port in services["coordinator"]["ports"]}
    assert inside == {settings.router_port, settings.http_port}


@pytest.mark.parametrize("name", ["coordinator", "prometheus", "grafana", "keygen", "trust"])
def test_services_can_do_little(services: dict[str, Service], name: str) -> None:
    """No capability, no way to gain one, nothing to write but volumes, and never the Docker socket (S20)."""
    service = services[name]
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert not service.get("privileged")
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert not any("docker.sock" in volume for volume in service.get("volumes", []))


def test_coordinator_is_not_root(services: dict[str, Service]) -> None:
    """It runs as the owner of the keys, by default the image's user."""
    assert defaults(services["coordinator"]["user"]) == "10001:10001"
    assert services["coordinator"]["user"] == services["keygen"]["user"] == services["trust"]["user"]


@pytest.mark.parametrize("name", ["keygen", "trust"])
def test_tools_are_commands_without_a_network(services: dict[str, Service], name: str) -> None:
    """What makes keys and says who is trusted writes to the folder of keys, and reaches nothing else."""
    service = services[name]
    assert service["entrypoint"] == ["weightbus", name, "--keys=/keys"]
    assert name in cli.BUILT_IN
    assert service["network_mode"] == "none"
    assert service["profiles"] == ["tools"]


def test_journal_is_a_named_volume(compose: dict[str, Any]) -> None:
    """`down` keeps what was committed; only `down --volumes` forgets it."""
    assert "journal:/var/lib/weightbus" in compose["services"]["coordinator"]["volumes"]
    assert "journal" in compose["volumes"]


def test_stopping_is_given_the_time_it_needs(services: dict[str, Service]) -> None:
    """The coordinator ends its round at a durable boundary within ten seconds; the kill comes later than that."""
    assert int(services["coordinator"]["stop_grace_period"].removesuffix("s")) > 10


def test_keys_stay_out_of_git() -> None:
    """The folder exists, so that Docker does not make it as root, and git ignores what is put there, and `.env`."""
    assert (DEPLOY / "keys/.gitignore").read_text().splitlines()[-2:] == ["*", "!.gitignore"]
    ignored = (DEPLOY.parent / ".gitignore").read_text().splitlines()
    assert "/deploy/.env" in ignored
