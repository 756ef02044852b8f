# Everything a person or CI does here, by name. `make` alone lists it.
# Needs Python 3.11 to 3.13, make and a compiler; the rest is installed into .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory --no-builtin-rules
.DEFAULT_GOAL := help
.ONESHELL:

VENV := .venv
BIN := $(VENV)/bin
PACKAGES := control dataplane trainer_agent engine_agent
PINS := $(wildcard requirements/*.txt)
INSTALLED := $(VENV)/.installed
LINKED := $(VENV)/.linked

# make demo SYNC=off TRANSPORT=disk ROUNDS=15 TRAINER=fsdp2 (or megatron-moe)
TRAINER ?= megatron
SYNC ?= on
# Empty: local, or the two ways of MIXED=1
TRANSPORT ?=
ROUNDS ?= 20
# make demo ASYNC=1: each round is generated while the one before is judged and trained; before it the same in turn
ASYNC ?= 0
# make demo SAVE_EVERY=5: every fifth version is kept as a checkpoint
SAVE_EVERY ?= 0
# make demo MIXED=1: one engine by direct, one elsewhere by sends, in the same rounds
MIXED ?=
DEMO_ARGS ?=
# make simulate SEEDS=100000 START=5000
# make simulate SETBACKS=1             with the journal set back to older copies
SEEDS ?= 1000
START ?= 0
# make mutants SLICE=3/8: every eighth, from the third on
SLICE ?= 0/1
# make bench-control AGENTS=256 SAVE=tests/bench/results/control.json
AGENTS ?= 2048
SAVE ?=
CYCLES ?= 10
# make chaos CYCLES=5 CHAOS_ARGS=--real
CHAOS_ARGS ?=
# make bench-gather BENCH="--backend nccl --shape qwen3-30b-a3b" on two GPUs
BENCH ?=
# make unit ARGS="-k lease -x"
ARGS ?=
# make test WORKERS=0: one file of tests after the other, in one process
WORKERS ?= 2
# Passed to every pip install, for example an index that holds CPU builds of torch.
PIP_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1
export OMP_NUM_THREADS ?= 1

##@ Start here

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: env ## Train a toy policy with real ranks (TRAINER=fsdp2, megatron-moe) and two real SGLang servers (SYNC=off to compare)
	@exec $(BIN)/weightbus demo --trainer $(TRAINER) --sync $(SYNC) $(if $(TRANSPORT),--transport $(TRANSPORT)) --rounds $(ROUNDS) --save-every $(SAVE_EVERY) $(if $(filter-out 0,$(ASYNC)),--asynchronous) $(if $(filter-out 0,$(MIXED)),--mixed) $(DEMO_ARGS)

env: $(INSTALLED) ## Install the pinned environment and the project into .venv
	@# An editable install is a folder of links: made anew when a file appeared or went.
	files=$$(find $(PACKAGES) pyproject.toml -name __pycache__ -prune -o -type f -print | LC_ALL=C sort)
	if [ "$$files" != "$$(cat $(LINKED) 2>/dev/null)" ] || [ pyproject.toml -nt $(LINKED) ] || [ ! -d build ]; then
		rm -rf build/__editable__*
		$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation \
			--config-settings editable_mode=strict --editable . 
		printf '%s\n' "$$files" > $(LINKED)
	fi

$(INSTALLED): $(PINS)
	@python=$$(requirements/find-python)
	started=$$SECONDS
	echo "env: installing into $(VENV) with $$($$python --version) (about 600 MB to fetch, 3 GB installed)"
	[ -x $(BIN)/python ] || $$python -m venv $(VENV)
	$(BIN)/python -m pip install -qq --no-compile $(PIP_ARGS) --constraint requirements/constraints.txt \
		$(foreach part,base engine-cpu trainer dev,--requirement requirements/$(part).txt)
	$(BIN)/python -m pip install -qq --no-compile $(PIP_ARGS) --no-deps --requirement requirements/engine-cpu-bare.txt
	@# Compiled on all cores, which pip does on one; a few templates in packages are not Python and stay as they are.
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	touch $(INSTALLED)
	echo "env: ready after $$((SECONDS - started)) s"

##@ Checks

test: lint types ## Everything that CI checks; tests that fail are run once more, alone
	@$(BIN)/python -m pytest -m "not gpu" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS) || {
		[ $$? -eq 1 ] || exit 2 # a file that cannot be collected, an interruption, an error of pytest itself
		echo "once more, alone: a test that passes now is flaky, which is a bug to report"
		$(BIN)/python -m pytest -m "not gpu" -p no:xdist --last-failed --last-failed-no-failures none
	}

lint: env ## Format, style, import directions, spelling
	@$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports
	$(BIN)/codespell

types: env ## mypy and pyright, both strict
	@$(BIN)/mypy & mypy=$$!
	pyright=0; $(BIN)/pyright --pythonpath $(BIN)/python || pyright=$$?
	wait $$mypy && exit $$pyright

unit: env ## Tests that start no server and no training rank
	@$(BIN)/python -m pytest -m "not real and not gpu" $(ARGS)

real: env ## Tests with real SGLang servers and real Megatron ranks
	@$(BIN)/python -m pytest -m "real and not gpu" $(ARGS)

gpu: ## Tests that need a CUDA device, by the python3 at hand: its torch is one for CUDA, and weightbus is installed there
	@python3 -m pytest -m gpu $(ARGS)

tree: ## How many modules and lines each room has, rooms inside it counted apart; it checks nothing
	@line() { printf '%-52s %4d modules %7d lines\n' "$$1" "$$(find $$2 -name '*.py' | wc -l)" "$$(find $$2 -name '*.py' -exec cat {} + | wc -l)"; }
	for package in $(PACKAGES); do
		line $$package $$package
		for room in $$(find $$package -name '*.py' -printf '%h\n' | LC_ALL=C sort -u); do
			[ $$room = $$package ] && name="$$room (root)" || name=$$room
			line "    $$name" "$$room -maxdepth 1"
		done
	done

##@ Measure and break

# make fuzz N=100000000
N ?= 1000000
fuzz: env ## Hostile input: N frames for the bus (100 million take half an hour on two cores), N/10 for the data plane
	@$(BIN)/python -m tests.fuzz.data_plane $$(( $(N) / 10 ))
	exec $(BIN)/python -m tests.fuzz.decoder $(N)

fuzz-live: env ## Attacks on a running coordinator's CURVE sockets, with N frames of garbage
	@exec $(BIN)/python -m tests.fuzz.live $(N)

simulate: env ## Storms of faults over the real machines, SEEDS of them, on all cores (START: the first seed; SETBACKS=1)
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) --start $(START) $(if $(SETBACKS),--setbacks)

mutants: env ## Plants one bug after the other in a copy of the source; the simulation has to find them (SLICE=3/8)
	@$(BIN)/python -m tests.simulation.mutants --slice $(SLICE)

model: ## The round as a Spin model, explored exhaustively (needs Debian's spin)
	@exec tests/model/explore.sh

bench-control: env ## What the control plane costs with AGENTS=2048 simulated agents, beside bare sockets (JSON last)
	@exec $(BIN)/python tests/bench/control.py --agents $(AGENTS) $(if $(SAVE),--save $(SAVE))

bench-pause: env ## How long a server is paused for a version beyond copy and proof, hop by hop (JSON)
	@exec $(BIN)/python tests/bench/pause.py $(BENCH)

bench-gather: env ## How fast ranks assemble buckets, beside the published procedures (BENCH="--backend nccl"; JSON last)
	@exec $(BIN)/python tests/bench/gather.py $(BENCH)

bench-plan: env ## How long planning takes for 20,000 tensors on 64 ranks (PLAN="--tensors N --ranks N"; JSON)
	@exec $(BIN)/python tests/bench/plan.py $(PLAN)

bench-meeting: env ## What rank 0 of a broadcast pays for looking at 8, 64 and 512 engines (JSON)
	@exec $(BIN)/python tests/bench/meeting.py

bench-failover: env ## Kill and stop leaders CYCLES times, with two coordinators and a real etcd (JSON last)
	@exec $(BIN)/python tests/bench/failover.py --cycles $(CYCLES) $(if $(SAVE),--save $(SAVE))

chaos: env ## Kill, stop and part real processes during real rounds, CYCLES times (root also fills and freezes disks)
	@exec $(BIN)/python tests/chaos/campaign.py --cycles $(CYCLES) $(if $(SAVE),--save $(SAVE)) $(CHAOS_ARGS)

# make deaths DEATHS="--transport sends --signals killed --out /tmp/deaths.json"
DEATHS ?=
deaths: env ## Kill and stop a rank, a worker and a sidecar in every phase of a round of real servers (JSON last; an hour)
	@exec $(BIN)/python -m tests.e2e.deaths $(DEATHS)

nixl: env ## Sends over NIXL, on CPUs over TCP; installs it beside the pinned environment
	@$(BIN)/python -m pip install -qq $(PIP_ARGS) --no-deps --requirement requirements/nixl.txt
	$(BIN)/python -m pytest tests/dataplane/transports/sends/test_nixl_group.py tests/engine_agent/worker/test_sends.py -k nixl $(ARGS)

layouts: env ## Every family in every layout of its ranks, not only a slice of them
	@LAYOUTS=all $(BIN)/python -m pytest tests/trainer_agent/sources/megatron/test_model_families.py $(ARGS)

names: env ## Every language model class of transformers, named before and after fully_shard, not only a slice of them
	@NAMES=all $(BIN)/python -m pytest tests/trainer_agent/sources/test_sharded_names.py $(ARGS)

##@ Packages

build: env ## The wheel, in dist/
	@rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	ls -l dist

deploy-check: env ## Image, compose, a real engine and a real Prometheus (needs Docker; exit 77 says why not)
	@PYTHON=$(BIN)/python exec deploy/prove.sh

clean: ## Remove everything that make made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

.PHONY: help demo env test lint types tree unit real layouts names mutants model fuzz fuzz-live simulate bench-control bench-failover bench-gather bench-meeting bench-pause bench-plan chaos deaths nixl build deploy-check clean
