#!/usr/bin/env bash
# Explores tests/model/round.pml with Spin: with each of six bugs, which must be found, then the protocol as it is, with
# all engines at a time, with engines that take turns, and with tables that follow.
# `explore.sh slice`, in `make test`: two of the bugs and few epochs, in seconds. Exit 77: spin is not installed.
# Needs Debian's `spin` and a C compiler; about 1 GiB of memory and, on one idle core, three minutes.
set -euo pipefail
model=$(cd "$(dirname "$0")" && pwd)/round.pml
command -v spin >/dev/null || { echo "model: spin is not installed (Debian: apt-get install spin)" >&2; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

explore() { # name, options of the model, options of the compiler
	spin $2 -a "$model"
	gcc -O2 -w -DSAFETY -DCOLLAPSE -DMEMLIM=6000 $3 -o pan pan.c
	./pan -m300000 >out 2>&1 || true
}

plant() { # bug, options of the model, options of the compiler
	explore "$1" "$2 -D$1=0" "$3"
	grep -q "assertion violated" out || { cat out; echo "model: $1=0 was not found" >&2; exit 1; }
	echo "model: planted $1=0, found after $(awk '/states, stored/ {print $1}' out) states"
}

whole() { # name, options of the model
	explore "$1" "$2" ""
	grep -q "errors: 0" out && ! grep -q "not completed\|max search depth too small" out || { cat out; exit 1; }
	found=$(awk '/states, stored/ {print $1}' out)
	echo "model: $1 explored, $found states"
	states=$((states + found))
}

states=0
if [ "${1:-}" = slice ]; then
	plant DIRTY "-DEPOCHS=2 -DCRASHES=1" "-DBFS"
	plant MONOTONE "-DEPOCHS=3 -DCRASHES=0 -DAGENT_CRASHES=0" ""
	whole "a slice" "-DEPOCHS=2 -DCRASHES=0 -DAGENT_CRASHES=0"
	whole "a slice in turns" "-DWAVES=1 -DEPOCHS=2 -DCRASHES=0 -DAGENT_CRASHES=0"
	echo "model: states=$states violations=0 unwanted_end_states=0"
	exit
fi

plant DURABLE "-DEPOCHS=2 -DCRASHES=1" "-DBFS"
plant DIRTY "-DEPOCHS=2 -DCRASHES=1" "-DBFS"
plant MONOTONE "-DEPOCHS=3 -DCRASHES=0 -DAGENT_CRASHES=0" ""
plant FENCE "-DEPOCHS=2 -DCRASHES=0 -DAGENT_CRASHES=0" "-DBFS"
plant DURABLE "-DWAVES=1 -DEPOCHS=2 -DCRASHES=1" "-DBFS"
plant COMPARE "-DOPEN=1 -DEPOCHS=2 -DCRASHES=0 -DAGENT_CRASHES=0" "-DBFS"
plant TABLE "-DOPEN=1 -DEPOCHS=2 -DCRASHES=0 -DAGENT_CRASHES=0" "-DBFS"

whole "all at a time" "-DEPOCHS=2 -DCRASHES=4"
whole "in turns" "-DWAVES=1 -DEPOCHS=3 -DCRASHES=0 -DAGENT_CRASHES=0"
whole "in turns, with crashes" "-DWAVES=1 -DEPOCHS=2 -DCRASHES=1"
whole "with tables that follow" "-DOPEN=1 -DEPOCHS=2 -DCRASHES=0 -DAGENT_CRASHES=0"
echo "model: states=$states violations=0 unwanted_end_states=0"
