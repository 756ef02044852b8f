"""What counting NaN and infinities costs in the digest kernels on a GPU, and a comparison of replicas: in one process.

    python3 tests/gpu/checks.py [--gigabytes 8]        one CUDA device, some 20 s; `--device cpu` tries the program

The program is tests/bench/weight_checks.py. Prints one JSON object; `--out` writes it too. Exits with 1 unless every
count and every digest was right.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import weight_checks

if __name__ == "__main__":
    raise SystemExit(weight_checks.main(device="cuda", gigabytes=8.0))
