"""What the Dockerfile and its build context promise, read from their text: these run where there is no Docker."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Instruction = tuple[str, str]


def instructions(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile: keyword and arguments, with continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = (line.split(maxsplit=1) for line in joined.splitlines())
    return [(keyword.upper(), " ".join(rest.split())) for keyword, rest in pairs]


@pytest.fixture
def dockerfile() -> list[Instruction]:
    return instructions((ROOT / "deploy/Dockerfile").read_text())


def last_stage(dockerfile: list[Instruction]) -> list[Instruction]:
    """What the image consists of, without what only builds it."""
    start = max(at for at, (keyword, _) in enumerate(dockerfile) if keyword == "FROM")
    return dockerfile[start:]


def only(stage: list[Instruction], keyword: str) -> str:
    """The arguments of an instruction that stands once."""
    [arguments] = [arguments for found, arguments in stage if found == keyword]
    return arguments


def test_base_is_chosen_by_the_builder(dockerfile: list[Instruction]) -> None:
    """The first line names a public slim image, and every stage starts from what the builder put in its place."""
    assert dockerfile[0] == ("ARG", "BASE=python:3.11-slim-bookworm")
    assert [arguments.split()[0] for keyword, arguments in dockerfile if keyword == "FROM"] == ["${BASE}", "${BASE}"]


def test_runs_as_any_user(dockerfile: list[Instruction]) -> None:
    """The image's user is a number that is not root, so that an orchestrator can see that it is not."""
    user, group = only(last_stage(dockerfile), "USER").split(":")
    assert int(user) > 0
    assert int(group) > 0


def test_image_has_no_torch_and_no_installer(dockerfile: list[Instruction]) -> None:
    """Only the coordinator's dependencies are asked for, without an extra, and pip stays in the stage that builds."""
    built = " ".join(arguments for _, arguments in dockerfile)
    final = " ".join(arguments for keyword, arguments in last_stage(dockerfile) if keyword != "LABEL")
    requirements = (ROOT / "requirements/base.txt").read_text()
    assert "torch" not in built + requirements
    assert "pip" not in final
    assert "apt-get" not in built


def test_nothing_of_this_host_is_in_the_image(dockerfile: list[Instruction]) -> None:
    """Certificates, indexes and proxies come with the base image or the build arguments, never from here."""
    text = " ".join(arguments for _, arguments in dockerfile).lower()
    for word in ("index-url", "pip_cert", "trusted-host", "proxy", "ca-certificates"):
        assert word not in text


def test_stops_and_reports_as_docker_expects(dockerfile: list[Instruction]) -> None:
    """SIGTERM reaches the coordinator itself, its health is asked over HTTP, and the journal outlives the container."""
    stage = last_stage(dockerfile)
    assert only(stage, "STOPSIGNAL") == "SIGTERM"
    assert only(stage, "ENTRYPOINT") == '["weightbus", "coordinator"]'
    assert "/healthz" in only(stage, "HEALTHCHECK")
    assert only(stage, "VOLUME") == "/var/lib/weightbus"
    assert "WEIGHTBUS_COORDINATOR_JOURNAL=/var/lib/weightbus/" in only(stage, "ENV")


def test_context_is_what_is_copied_and_no_more(dockerfile: list[Instruction]) -> None:
    """The build context is an allow-list (keys cannot slip in), and it lets in everything that the image copies."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copies = [a.split()[:-1] for keyword, a in dockerfile if keyword == "COPY" and not a.startswith("--from")]
    copied = {source for sources in copies for source in sources}
    assert lines[0] == "*"
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)
