"""How fast buckets are assembled from training ranks: ours beside the published procedures, on the same parameters.

    python3 tests/bench/gather.py                                        two gloo ranks on the CPU, a tiny model that
                                                                         Megatron-core built
    python3 tests/bench/gather.py --backend nccl --shape qwen3-30b-a3b   two GPUs, Qwen3-30B-A3B, TP2 and EP2, 61 GB
    ... --layers 24                                                      half of it, where memory is short

Starts its ranks itself, checks that all ways give the same tensors, measures each in turn, several times. Needs torch,
numpy, msgspec and this tree. Progress goes to standard error; the last line of standard output is one JSON object,
also where a rank failed or time ran out: then of what was measured until then, with ``"error"``. `--save` writes it.

Seconds are the best warm pass, from a barrier to a barrier. Bytes and calls are those of the busiest rank. Memory is
the peak beyond parameters, of the worst rank, in buckets; on a CPU of resident pages, which with a tiny model say
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KIT = HERE.parent / "kit"
ROOT = HERE.parents[1]
PACKAGES = ("control", "dataplane", "trainer_agent", "engine_agent")
WAYS = ("sync", "async", "ours")


def say(text: str) -> None:
    """Progress."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def importable(folder: Path) -> Path:
    """A folder from which this tree is imported as `weightbus`, installed or not."""
    package = folder / "tree" / "weightbus"
    package.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        link = package / name
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT / name)
    return package.parent


def start(args: argparse.Namespace, folder: Path) -> list[subprocess.Popen[bytes]]:
    """All ranks; each writes its log and its passes into `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(importable(folder)), str(KIT), str(KIT / "te_stub"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "WORLD_SIZE": str(args.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    argv = [sys.executable, str(HERE / "gather_rank.py"), "--shape", args.shape, "--layers", str(args.layers)]
    argv += ["--bucket-bytes", str(int(args.bucket_mb * 2**20)), "--repetitions", str(args.repetitions)]
    argv += ["--backend", args.backend, "--model", args.model, "--out", str(folder)]
    ranks = []
    for rank in range(args.ranks):
        with (folder / f"rank{rank}.log").open("wb") as log:
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(argv, env=own, stdout=log, stderr=log))
    return ranks


def follow(ranks: list[subprocess.Popen[bytes]], folder: Path, deadline_s: float) -> str:
    """Show what rank 0 measures until all have ended; what went wrong, or nothing."""
    shown = 0
    give_up_at = time.monotonic() + deadline_s
    while True:
        lines = _lines(folder / "rank0.jsonl")
        for line in lines[shown:]:
            say(json.dumps(line))
        shown = len(lines)
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return ""
        failed = [(number, code) for number, code in enumerate(codes) if code]
        if failed:
            number, code = failed[0]
            tail = (folder / f"rank{number}.log").read_text(errors="replace")[-3000:]
            say(tail)
            return f"rank {number} ended with status {code}"
        if time.monotonic() >= give_up_at:
            return f"not over after {deadline_s:.0f} s"
        time.sleep(0.2)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def verdict(args: argparse.Namespace, folder: Path, error: str) -> dict[str, Any]:
    """Everything in one object."""
    said = [_lines(folder / f"rank{rank}.jsonl") for rank in range(args.ranks)]
    model = next((line for line in said[0] if line["what"] == "model"), {})
    equal = next((line for line in said[0] if line["what"] == "equal"), {})
    layout = next((line for line in said[0] if line["what"] == "layout"), {})
    bucket = int(args.bucket_mb * 2**20)
    ways = {way: _way([_passes(rank, way) for rank in said], bucket) for way in WAYS}
    ours, best = ways["ours"], {way: each.get("seconds") for way, each in ways.items()}
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python3", *sys.argv]),
        "backend": args.backend,
        "device": _device(args.backend),
        "ranks": args.ranks,
        "shape": args.shape,
        **{key: model.get(key) for key in ("layers", "model_bytes", "tensors", "buckets", "plan_s")},
        "bucket_bytes": bucket,
        "model": args.model,
        "equal": equal.get("equal"),
        "as_laid_out": layout.get("equal"),
        **ways,
    }
    for way in ("sync", "async"):
        both = best[way] and best["ours"]
        result[f"speedup_vs_{way}"] = round(best[way] / best["ours"], 2) if both else None
    result["peak_extra_buckets"] = ours.get("peak_extra_buckets")
    if not error and equal.get("equal") is not True:
        error = f"the ways differ in {equal.get('odd')}"
    if not error and layout.get("equal") is False:
        error = f"Megatron-core's model is not as it is laid out by hand: {layout.get('odd')}"
    return {"error": error, **result} if error else result


def _passes(said: list[dict[str, Any]], way: str) -> list[dict[str, Any]]:
    return [line for line in said if line["what"] == "pass" and line["way"] == way]


def _way(passes: list[list[dict[str, Any]]], bucket: int) -> dict[str, Any]:
    complete = min(len(each) for each in passes)
    warm = [index for index in range(complete) if passes[0][index]["warm"]]
    if not warm:
        return {}
    seconds = [max(rank[index]["seconds"] for rank in passes) for index in warm]
    peak = max(rank[index]["peak_extra_bytes"] for rank in passes for index in warm)
    return {
        "seconds": round(min(seconds), 4),
        "all_seconds": [round(each, 4) for each in seconds],
        "calls": max(rank[warm[-1]]["calls"] for rank in passes),
        "bytes": max(rank[warm[-1]]["bytes"] for rank in passes),
        "peak_extra_bytes": peak,
        "peak_extra_buckets": round(peak / bucket, 3),
    }


def _device(backend: str) -> str:
    if backend != "nccl":
        return "cpu"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")
    return found[0].strip()


def main() -> int:
    """Run, and print the verdict whatever happens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="nccl: one GPU for each rank")
    parser.add_argument("--shape", choices=("tiny", "qwen3-30b-a3b"), default="tiny")
    parser.add_argument(
        "--model",
        choices=("megatron", "laid-out"),
        help="whose parameters: Megatron-core's, through MegatronSource (default on gloo), or of the same layout",
    )
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    parser.add_argument("--ranks", type=int, default=2, help="tensor and expert parallel over all of them")
    parser.add_argument("--bucket-mb", type=float, default=0, help="default: 512, and 1/16 for the tiny shape")
    parser.add_argument("--repetitions", type=int, default=3, help="warm passes of each way")
    parser.add_argument("--deadline-s", type=float, default=330.0, help="then what was measured counts")
    parser.add_argument("--out", type=Path, help="keep logs and passes here")
    parser.add_argument("--save", type=Path, help="write the last line here too")
    args = parser.parse_args()
    args.bucket_mb = args.bucket_mb or (0.0625 if args.shape == "tiny" else 512)
    args.model = args.model or ("megatron" if args.backend == "gloo" and args.shape == "tiny" else "laid-out")
    folder = args.out or Path(tempfile.mkdtemp(prefix="weightbus-gather-"))
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("rank*.jsonl"):  # of an earlier run: its passes are not ours
        stale.unlink()
    ranks = start(args, folder)
    try:
        error = follow(ranks, folder, args.deadline_s)
    except KeyboardInterrupt:
        error = "interrupted"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    result = verdict(args, folder, error)
    text = json.dumps(result)
    if args.save:
        args.save.write_text(json.dumps(result, indent=2) + "\n")
    say(f"gather: logs are in {folder}")
    sys.stdout.write(text + "\n")
    return 1 if error or "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
