"""What compose.yaml promises about ports, rights and data, read from its text: these run where there is no Docker."""

import re
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
    listens = [defaults(word) for word in services["prometheus"]["command"] if "listen-address" in word]
    assert listens == ["--web.listen-address=127.0.0.1:9090"]


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


@pytest.mark.parametrize("name", ["coordinator", "prometheus", "keygen", "trust"])
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
    """The folder exists, so that Docker does not make it as root, and git ignores what is put there."""
    assert (DEPLOY / "keys/.gitignore").read_text().splitlines()[-2:] == ["*", "!.gitignore"]
