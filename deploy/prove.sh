#!/usr/bin/env bash
# Proves this folder on one host: the image, the compose file, a real SGLang engine with its sidecar, real Megatron
# ranks that publish to it, and a real Prometheus that is asked what it saw.
#
#   make deploy-check             or  PYTHON=.venv/bin/python deploy/prove.sh
#
# It runs on its own ports, under its own compose project, beside whatever else runs here, and removes what it made.
# Set in the environment, all optional:
#   PYTHON            interpreter with the project and the CPU engine installed (default .venv/bin/python)
#   BASE              base image of the build (default: the Dockerfile's)
#   BUILD_FLAGS       more flags for `docker build`, for example "--network host"
#   PROMETHEUS_IMAGE  image of Prometheus (default: compose.yaml's; else one is made of this host's prometheus)
#   KEEP=1            leave everything running and say where
# Exit status: 0 proven, 77 nothing to prove it with (and why), anything else a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'deploy-check: %s\n' "$*"; }
skip() { say "NOT RUN: $*"; exit 77; }
fail() { say "FAILED: $*" >&2; exit 1; }

PYTHON=${PYTHON:-.venv/bin/python}
command -v docker >/dev/null || skip "no docker command; install a Docker engine and a compose"
docker info >/dev/null 2>&1 || skip "no Docker engine answers; start one, or join its group"
if docker compose version >/dev/null 2>&1; then
    compose=(docker compose)
elif command -v docker-compose >/dev/null; then
    compose=(docker-compose)
else
    skip "neither docker compose nor docker-compose is installed"
fi
"$PYTHON" -c 'import importlib.util as u, weightbus.control.cli.entry_point; assert u.find_spec("sglang") and u.find_spec("megatron")' 2>/dev/null ||
    skip "$PYTHON lacks the project or SGLang; run: make env"

work=$(mktemp -d)
read -r ROUTER HTTP PROM SIDE SERVER MASTER < <("$PYTHON" - <<'PY'
import socket
probes = [socket.socket() for _ in range(6)]
for probe in probes:
    probe.bind(("127.0.0.1", 0))
print(*(probe.getsockname()[1] for probe in probes))
PY
)
export WEIGHTBUS_IMAGE=weightbus:prove WEIGHTBUS_KEYS=$work/keys PROMETHEUS_CONFIG=$work/prometheus
export WEIGHTBUS_ROUTER_PORT=$ROUTER WEIGHTBUS_HTTP_PORT=$HTTP PROMETHEUS_PORT=$PROM
export OMP_NUM_THREADS=1
compose+=(--project-name "weightbus-prove-$$" --file deploy/compose.yaml)
declare -A group=()

finish() {
    local status=$?
    if [ "${KEEP:-}" = 1 ]; then
        say "kept: files in $work, coordinator on port $HTTP, Prometheus on port $PROM; process groups ${group[*]}"
        exit "$status"
    fi
    if [ "$status" != 0 ] && [ "$status" != 77 ]; then
        "${compose[@]}" logs --tail 30 || true
        tail -n 20 "$work"/*.log || true
    fi
    for leader in "${group[@]}"; do kill -KILL -- "-$leader" 2>/dev/null || true; done
    wait "${group[@]}" 2>/dev/null || true # reaped here, or bash reports each of them as killed
    "${compose[@]}" down --volumes --timeout 15 >"$work/down.log" 2>&1 || cat "$work/down.log"
    rm -rf "$work"
    exit "$status"
}
trap finish EXIT

# background NAME COMMAND...: in a process group of its own, its output in NAME.log
background() {
    local name=$1
    shift
    setsid "$@" >>"$work/$name.log" 2>&1 &
    group[$name]=$!
}

# within SECONDS WHAT COMMAND...: repeats the command until it succeeds
within() {
    local seconds=$1 what=$2 until=$((SECONDS + $1))
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $until ] || fail "waited $seconds s for $what"
        sleep 0.5
    done
    say "$what"
}

http() { "$PYTHON" -c 'import sys, urllib.request as r; sys.stdout.write(r.urlopen(sys.argv[1], timeout=3).read().decode())' "$1"; }

# ask EXPRESSION: Prometheus' answer, one series a line
ask() { docker exec "$prometheus" promtool query instant "http://127.0.0.1:$PROM" "$1"; }

# seen EXPRESSION VALUE: at least one series, and every one has this value
seen() {
    local answer
    answer=$(ask "$1") && [ -n "$answer" ] && ! grep -qv "=> $2 @" <<<"$answer"
}

# -- images ------------------------------------------------------------------------------------------------------------

say "building $WEIGHTBUS_IMAGE${BASE:+ from $BASE}"
# shellcheck disable=SC2086  # BUILD_FLAGS are several words
docker build ${BUILD_FLAGS:-} ${BASE:+--build-arg BASE="$BASE"} --quiet --tag "$WEIGHTBUS_IMAGE" --file deploy/Dockerfile . \
    >"$work/build.log" 2>&1 || { cat "$work/build.log"; fail "the image does not build"; }
say "image: $(docker image inspect --format '{{.Size}} bytes, user {{.Config.User}}' "$WEIGHTBUS_IMAGE"), of which the base" \
    "$(docker image inspect --format '{{.Size}}' "${BASE:-python:3.11-slim-bookworm}" 2>/dev/null || echo unknown)"
docker run --rm --network none --entrypoint python3 "$WEIGHTBUS_IMAGE" -c '
import importlib.util as u, os
assert os.getuid() != 0
assert not [name for name in ("torch", "numpy", "pip", "sglang") if u.find_spec(name)]
' || fail "the image holds what it must not"
say "image: not root; no torch, numpy or pip in its environment"

if [ -z "${PROMETHEUS_IMAGE:-}" ]; then
    public=$(sed -n 's/.*PROMETHEUS_IMAGE:-\([^}]*\)}.*/\1/p' deploy/compose.yaml)
    if ! docker image inspect "$public" >/dev/null 2>&1 && ! docker pull --quiet "$public" >/dev/null 2>&1; then
        command -v prometheus >/dev/null || skip "$public cannot be pulled and no prometheus is installed here"
        mkdir "$work/image"
        cp "$(command -v prometheus)" "$(command -v promtool)" "$work/image"
        docker build --quiet --tag weightbus-prometheus:prove --file - "$work/image" >/dev/null 2>"$work/build.log" <<DOCKERFILE ||
FROM ${BASE:-python:3.11-slim-bookworm}
COPY prometheus promtool /bin/
RUN install -d -o 65534 -g 65534 /prometheus
USER 65534:65534
VOLUME /prometheus
ENTRYPOINT ["/bin/prometheus"]
DOCKERFILE
            fail "no image can be made of this host's prometheus: $(cat "$work/build.log")"
        export PROMETHEUS_IMAGE=weightbus-prometheus:prove
        say "$public cannot be pulled: using this host's $(prometheus --version 2>&1 | head -n 1)"
    fi
fi

# -- keys, coordinator, Prometheus ---------------------------------------------------------------------------------------

# Without keys the coordinator refuses to leave the loopback: shown before anything else relies on it.
mkdir -m 0755 "$work/keys"
if timeout 30 docker run --rm --network none -e WEIGHTBUS_COORDINATOR_BIND=0.0.0.0 "$WEIGHTBUS_IMAGE" >"$work/refused.log" 2>&1; then
    fail "the coordinator listens off the loopback without keys"
fi
say "without keys: $(tail -n 1 "$work/refused.log")"

export WEIGHTBUS_UID=${WEIGHTBUS_UID:-$(id -u)}
if [ "$WEIGHTBUS_UID" = 0 ]; then # root lends the folder to the image's user rather than lend its own id
    WEIGHTBUS_UID=10001
    chown 10001 "$work/keys"
fi
"${compose[@]}" run --rm keygen e0 trainer >"$work/keygen.log" 2>&1 || fail "no keys: $(cat "$work/keygen.log")"
for agent in "e0 --role engine" "trainer --role trainer"; do
    # shellcheck disable=SC2086  # a name and a flag
    "${compose[@]}" run --rm trust add $agent --channels e2e >>"$work/keygen.log" 2>&1 || fail "no trust: $(cat "$work/keygen.log")"
done
# What the agents trust is theirs: a list that another user (here the coordinator's) may change is refused.
cp -r "$work/keys" "$work/agent-keys"
chown -R "$(id -u)" "$work/agent-keys"
cp -r deploy/prometheus "$work/prometheus"
sed -i "s/127.0.0.1:5760/127.0.0.1:$SIDE/" "$work/prometheus/engines.yml"
chmod 0711 "$work"
chmod -R a+rX "$work/prometheus"
"${compose[@]}" up -d --no-build coordinator prometheus >"$work/up.log" 2>&1 || fail "docker compose up: $(cat "$work/up.log")"
coordinator=$("${compose[@]}" ps -q coordinator)
prometheus=$("${compose[@]}" ps -q prometheus)
within 120 "coordinator ready on 127.0.0.1:$HTTP" http "http://127.0.0.1:$HTTP/readyz"
within 120 "prometheus ready on 127.0.0.1:$PROM" http "http://127.0.0.1:$PROM/-/ready"
within 60 "prometheus scrapes the coordinator" seen 'up{job="weightbus-coordinator"}' 1

# -- a real engine, and a trainer ----------------------------------------------------------------------------------------

for seed in 0 1 2 3 4 5; do "$PYTHON" tests/kit/tiny_model.py "$work/seed$seed" --seed "$seed" >/dev/null; done
background server "$PYTHON" -m weightbus.engine_agent.engines.sglang.cpu_server --model-path "$work/seed0" --port "$SERVER" \
    --skip-tokenizer-init --log-level warning
start_sidecar() {
    background sidecar "$PYTHON" -m weightbus.control.cli.entry_point engine-agent --name e0 --channel e2e \
        --server "http://127.0.0.1:$SERVER" --coordinator "tcp://127.0.0.1:$ROUTER" --keys "$work/agent-keys" \
        --http-port "$SIDE" --state-dir "$work/state"
}
start_sidecar
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$MASTER WORLD_SIZE=2 WEIGHTBUS_TRAINER_KEYS=$work/agent-keys
rank=("$PYTHON" tests/e2e/trainer_rank.py "$work" "tcp://127.0.0.1:$ROUTER")
mkfifo "$work/orders"
RANK=1 background rank1 "${rank[@]}"
# shellcheck disable=SC2016  # expanded by the inner bash: orders come in by a pipe, answers alone go to rank0.log
RANK=0 background rank0 bash -c 'exec "$@" <"$0/orders" 2>"$0/rank0-errors.log"' "$work" "${rank[@]}"
exec {orders}>"$work/orders"
within 600 "engine joined over CURVE and is ready" \
    http "http://127.0.0.1:$SIDE/readyz"
within 600 "trainer ready" grep -q '"ready"' "$work/rank0.log"

# publish VERSION: that seed's weights as that version; the report is the next line of rank 0
publish() {
    local before
    before=$(grep -c '^{' "$work/rank0.log")
    echo "{\"seed\": $1, \"version\": $1, \"transport\": \"local\"}" >&"$orders"
    within 180 "version $1 published" test_lines "$before"
    tail -n 1 "$work/rank0.log" | grep -q '"error"' && fail "publish: $(tail -n 1 "$work/rank0.log")"
    return 0
}
test_lines() { [ "$(grep -c '^{' "$work/rank0.log")" -gt "$1" ]; }

publish 1
publish 2
lag='weightbus_engine_version_lag{channel="e2e", engine="e0"}'
within 60 "prometheus: committed version 2" seen 'weightbus_committed_version{channel="e2e"}' 2
within 60 "prometheus: version lag 0" seen "$lag" 0
within 60 "prometheus: the sidecar says version 2 too" seen 'weightbus_sidecar_version' 2
say "query: $lag"
ask "$lag"

# -- what the alerts and the dashboard will ask --------------------------------------------------------------------------

"$PYTHON" - deploy/grafana/weightbus.json >"$work/expressions" <<'PY'
import json, sys
for panel in json.load(open(sys.argv[1]))["panels"]:
    for target in panel["targets"]:
        print(target["expr"].replace("$channel", "e2e"))
PY
answered=0 silent=0
while read -r expression; do
    answer=$(ask "$expression" </dev/null) || fail "prometheus refuses a query of the dashboard: $expression"
    if [ -n "$answer" ]; then answered=$((answered + 1)); else
        silent=$((silent + 1))
        say "dashboard, no data yet: $expression"
    fi
done <"$work/expressions"
say "dashboard: $((answered + silent)) queries accepted, $answered with data"
[ -z "$(ask 'ALERTS{alertstate="firing"}')" ] || fail "alerts fire though all is well: $(ask 'ALERTS{alertstate="firing"}')"
say "prometheus: no alert fires"

# -- an engine falls behind, and catches up ------------------------------------------------------------------------------

kill -KILL -- "-${group[sidecar]}"
within 120 "sidecar killed: engine off the ready list" seen 'weightbus_engine_ready{engine="e0"}' 0
publish 3
within 60 "prometheus: version lag 1" seen "$lag" 1
ask "$lag"
start_sidecar
within 120 "sidecar back on the bus" seen 'weightbus_agents_connected{channel="e2e", role="engine"}' 1
publish 4
within 60 "prometheus: version lag 0 again" seen "$lag" 0

# -- the coordinator forgets nothing, and stops when asked ---------------------------------------------------------------

started=$SECONDS
docker stop --time 15 "$coordinator" >/dev/null
status=$(docker inspect --format '{{.State.ExitCode}}' "$coordinator")
[ "$status" = 0 ] || fail "SIGTERM: exit status $status"
say "SIGTERM: stopped after $((SECONDS - started)) s with status 0"
within 120 "prometheus: WeightbusCoordinatorDown fires" seen 'ALERTS{alertname="WeightbusCoordinatorDown", alertstate="firing"}' 1
docker start "$coordinator" >/dev/null
within 120 "coordinator ready again" http "http://127.0.0.1:$HTTP/readyz"
within 120 "prometheus: committed version is still 4" seen 'weightbus_committed_version{channel="e2e"}' 4
within 120 "engine ready again, by itself" seen 'weightbus_engine_ready{engine="e0"}' 1
publish 5
within 60 "prometheus: version lag 0 after the restart" seen "$lag" 0
healthy() { [ "$(docker inspect --format '{{.State.Health.Status}}' "$coordinator")" = healthy ]; }
within 60 "container: healthy" healthy
say "container: $(docker stats --no-stream --format '{{.MemUsage}}, {{.PIDs}} processes and threads' "$coordinator")"
[ "$(docker inspect --format '{{.HostConfig.ReadonlyRootfs}}' "$coordinator")" = true ] || fail "the root file system can be written"
say "container: uid $(docker exec "$coordinator" id -u), capabilities $(docker exec "$coordinator" sed -n 's/^CapEff:\t*//p' /proc/1/status), root read-only"
say "PROVEN in $SECONDS s"
