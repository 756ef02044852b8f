#!/usr/bin/env bash
# Explores tests/model/round.pml with Spin: the protocol as it is, then with each of four bugs, which must be found.
# Needs Debian's `spin` and a C compiler; about 1 GiB of memory and, on one idle core, two minutes.
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

plant DURABLE "-DEPOCHS=2 -DCRASHES=1" "-DBFS"
plant DIRTY "-DEPOCHS=2 -DCRASHES=1" "-DBFS"
plant MONOTONE "-DEPOCHS=3 -DCRASHES=0 -DAGENT_CRASHES=0" ""
plant FENCE "-DEPOCHS=2 -DCRASHES=0 -DAGENT_CRASHES=0" "-DBFS"
explore protocol "-DEPOCHS=2 -DCRASHES=4" ""
grep -q "errors: 0" out && ! grep -q "not completed\|max search depth too small" out || { cat out; exit 1; }
echo "model: states=$(awk '/states, stored/ {print $1}' out) violations=0 unwanted_end_states=0"
