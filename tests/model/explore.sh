#!/usr/bin/env bash
# Explores tests/model/round.pml with Spin: the protocol as it is, then with each of four bugs, which must be found.
# Needs Debian's `spin` and a C compiler; about 5 GiB of memory and, on one idle core, some minutes.
set -euo pipefail
model=$(cd "$(dirname "$0")" && pwd)/round.pml
command -v spin >/dev/null || { echo "model: spin is not installed (Debian: apt-get install spin)" >&2; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

explore() { # name, options of the model, options of the compiler, least states
	spin $2 -a "$model"
	gcc -O2 -w -DSAFETY -DCOLLAPSE -DMEMLIM=6000 $3 -o pan pan.c
	./pan -m300000 >out 2>&1 || true
}

small="-DEPOCHS=2 -DCRASHES=1"
for bug in FENCE DURABLE DIRTY MONOTONE; do
	explore "$bug" "$small -D$bug=0" "-DBFS"
	grep -q "assertion violated" out || { echo "model: $bug=0 was not found" >&2; exit 1; }
	echo "model: planted $bug=0, found after $(awk '/states, stored/ {print $1}' out) states"
done
explore protocol "$small" ""
grep -q "errors: 0" out && ! grep -q "not completed\|max search depth too small" out || { cat out; exit 1; }
echo "model: states=$(awk '/states, stored/ {print $1}' out) violations=0 unwanted_end_states=0"
