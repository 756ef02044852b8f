"""Every constant of the forecast, with its source. One set for all fleets; none is fitted to a single run.

The runs are in tests/gpu/results and tests/bench/results, of two H200s and of two busy cores. Constants that were not
measured are marked.
"""

from __future__ import annotations

from typing import Final

import msgspec


class CalibratedValue(msgspec.Struct, frozen=True):
    """A constant and its source."""

    value: float
    source: str
    measured: bool = True


DEVICE_GB_S: Final = CalibratedValue(1940.0, "colocated.json: 31.2 GB copied on one H200 in 16 ms")
NVLINK_GB_S: Final = CalibratedValue(
    375.0, "peer.json: 31.2 GB read from the other H200 in 80 ms, with what it takes to begin"
)
BOTH_WAYS: Final = CalibratedValue(
    0.9, "crosswise.json beside peer.json: what is left of NVLink one way while both are used"
)
NIC_GB_S: Final = CalibratedValue(45.0, "not measured: 0.9 of a 400 Gb/s NIC", measured=False)
STORAGE_GB_S: Final = CalibratedValue(0.75, "stock.json: 16.4 GB written and read in 43.8 s, one machine's disk")
GATHER_GB_S: Final = CalibratedValue(253.0, "gather.json: what the first rank receives of a model that two hold")

DIGEST_GB_S: Final = CalibratedValue(3200.0, "copies.json, digest: parameters where they lie")
DIGEST_TENSOR_S: Final = CalibratedValue(0.4e-6, "peer.json: 9,435 tensors")
DIGEST_BESIDE_GB_S: Final = CalibratedValue(
    1480.0, "colocated.json: the same on a GPU whose server generates meanwhile"
)
DIGEST_BESIDE_TP_S: Final = CalibratedValue(
    0.165, "crosswise.json: what it waits for a server whose workers wait for each other"
)
DIGEST_BUCKET_S: Final = CalibratedValue(2.8e-3, "stock.json: 30 buckets of 512 MB")
PROOF_GB_S: Final = CalibratedValue(3200.0, "colocated and peer.json: a worker reads its live parameters")
CHECKSUM_GB_S: Final = CalibratedValue(280.0, "stock.json: the server's own checksum of them")
LOCAL_BUCKET_S: Final = CalibratedValue(6.9e-3, "stock.json: one call to the server for each bucket")
GROUP_BUCKET_S: Final = CalibratedValue(3.8e-3, "stock.json, NCCL: the same, beside the broadcast; servers join")
LOAD_TENSOR_S: Final = CalibratedValue(110e-6, "colocated and peer.json, flattened buckets: the server's loader")
LOAD_GROUP_TENSOR_S: Final = CalibratedValue(
    62e-6, "stages.json: the same after a broadcast, but for the wire and the calls; servers join"
)
LOAD_PART_TENSOR_S: Final = CalibratedValue(
    205e-6, "crosswise.json: the same where each worker takes a part of each tensor"
)

ACQUIRE_S: Final = CalibratedValue(2.3e-3, "every run with one engine")
ANNOUNCE_S: Final = CalibratedValue(3.4e-3, "every run with one engine")
PREPARE_S: Final = CalibratedValue(3.1e-3, "every run with one engine")
PAUSE_S: Final = CalibratedValue(5.6e-3, "every run with one engine")
OFFER_S: Final = CalibratedValue(1.8e-3, "every run with one engine")
CALL_S: Final = CalibratedValue(7.0e-3, "colocated, peer and crosswise.json: a transfer but for offer, copy and proof")
VERIFY_S: Final = CalibratedValue(0.2e-3, "every run with one engine")
COMMIT_S: Final = CalibratedValue(0.7e-3, "every run with one engine: label, journal and fsync")
RESUME_S: Final = CalibratedValue(4.3e-3, "every run with one engine")
JOIN_S: Final = CalibratedValue(
    0.086, "joiner.json: a group, a manifest to read and small parts that an engine's first round has, mean of two"
)
JOIN_TENSOR_S: Final = CalibratedValue(
    14.5e-6, "joiner.json: layout, plan and what to expect of 9,435 tensors, by one worker"
)
GPU_GB: Final = CalibratedValue(288.0, "not measured: the memory of a B300", measured=False)
BARRIER_ENGINE_S: Final = CalibratedValue(
    0.035e-3, "control.json: 2,048 agents resumed in 72 ms, on two cores that ran them, too"
)
