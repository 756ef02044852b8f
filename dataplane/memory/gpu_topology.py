"""The GPUs that a process sees, and which of them read each other's memory, as the driver reports.

No torch, no context.

Asked in a process of its own, with the environment of the process in question: CUDA reads CUDA_VISIBLE_DEVICES once,
and numbers the rest. `python -m weightbus.dataplane.memory.gpu_topology` prints the result as JSON.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__PEER__ACCESS.html
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from typing import Final

import msgspec

_ANSWER_S: Final = 20.0
"""The driver of a machine with eight GPUs takes about a second to begin."""
_P2P_BY_NVLINK: Final = 2
"""NVML_P2P_CAPS_INDEX_NVLINK."""
VISIBILITY_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
"""Environment variables that decide which GPUs a process sees, and under which numbers."""


class VisibleGpu(msgspec.Struct, frozen=True):
    """One GPU that the process sees; its place in the list is its index there."""

    uuid: str
    reach: dict[str, str]
    """By uuid, how it reads the memory of the other visible GPUs: ``nvlink``, ``p2p`` or ``none``.

    Without NVML, ``p2p`` stands for both.
    """


class GpuSurveyFailed(Exception):
    """The driver could not be asked. That says nothing about the GPUs."""


def gpus_visible_here() -> tuple[VisibleGpu, ...]:
    """The GPUs that this process sees. Raises `GpuSurveyFailed`."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GpuSurveyFailed(f"the CUDA driver cannot be loaded: {error}") from error
    _check(driver.cuInit(0), "cuInit")
    count = ctypes.c_int()
    _check(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    names = [_uuid(driver, number) for number in range(count.value)]
    links = _Nvml()
    return tuple(
        VisibleGpu(
            name, {other: _way(driver, links, (at, name), (to, other)) for to, other in enumerate(names) if to != at}
        )
        for at, name in enumerate(names)
    )


def gpus_visible_to(environment: Mapping[str, str]) -> tuple[VisibleGpu, ...]:
    """The GPUs that a process of this host with `environment` sees. Takes about a second. Raises `GpuSurveyFailed`."""
    chosen = {name: environment[name] for name in VISIBILITY_VARIABLES if name in environment}
    own = {name: value for name, value in os.environ.items() if name not in VISIBILITY_VARIABLES}
    command = [sys.executable, "-m", "weightbus.dataplane.memory.gpu_topology"]
    try:
        done = subprocess.run(  # noqa: S603  our own module
            command, env=own | chosen, capture_output=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpuSurveyFailed(f"{error}") from error
    if done.returncode:
        raise GpuSurveyFailed(done.stderr.decode(errors="replace").strip()[-300:])
    return msgspec.json.decode(done.stdout, type=tuple[VisibleGpu, ...])


class _Nvml:
    """libnvidia-ml, which knows how two GPUs are connected; answers False where it is missing."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self._library: ctypes.CDLL | None = None
        else:
            self._library = None if library.nvmlInit_v2() else library

    def linked(self, one: str, other: str) -> bool:
        """True when peer access between the two goes over NVLink."""
        if self._library is None:
            return False
        ends = [ctypes.c_void_p(), ctypes.c_void_p()]
        for name, end in zip((one, other), ends, strict=True):
            if self._library.nvmlDeviceGetHandleByUUID(f"GPU-{name}".encode(), ctypes.byref(end)):
                return False
        status = ctypes.c_int(-1)
        code = self._library.nvmlDeviceGetP2PStatus(*ends, ctypes.c_int(_P2P_BY_NVLINK), ctypes.byref(status))
        return code == 0 and status.value == 0


def _uuid(driver: ctypes.CDLL, number: int) -> str:
    """The uuid as torch writes it."""
    device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _check(driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(number)), "cuDeviceGet")
    _check(driver.cuDeviceGetUuid_v2(ctypes.byref(found), device), "cuDeviceGetUuid_v2")
    return str(uuid.UUID(bytes=bytes(found)))


def _way(driver: ctypes.CDLL, links: _Nvml, reader: tuple[int, str], other: tuple[int, str]) -> str:
    if not _reads(driver, reader[0], other[0]):
        return "none"
    return "nvlink" if links.linked(reader[1], other[1]) else "p2p"


def _reads(driver: ctypes.CDLL, number: int, other: int) -> bool:
    can = ctypes.c_int()
    _check(
        driver.cuDeviceCanAccessPeer(ctypes.byref(can), ctypes.c_int(number), ctypes.c_int(other)),
        "cuDeviceCanAccessPeer",
    )
    return bool(can.value)


def _check(code: int, call: str) -> None:
    if code:
        raise GpuSurveyFailed(f"{call} answered {code}")


if __name__ == "__main__":
    try:
        sys.stdout.buffer.write(msgspec.json.encode(gpus_visible_here()))
    except GpuSurveyFailed as failed:
        sys.exit(str(failed))
