"""Memory that other processes open: export, import, CUDA IPC, shared memory, staging buffers, and device identity."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import ipc_handles as ipc_handles, posix_shm as posix_shm
    from .cuda_driver import Driver as Driver, error_name as error_name
    from .device_identity import (
        HOST_OF_NCCL as HOST_OF_NCCL,
        device_name as device_name,
        readable_peers as readable_peers,
        seat_here as seat_here,
        seat_on as seat_on,
    )
    from .export_map import (
        MARK_BYTES as MARK_BYTES,
        ExportedPlace as ExportedPlace,
        ExportMap as ExportMap,
        MadeRegion as MadeRegion,
        Parts as Parts,
        Region as Region,
    )
    from .exporter import RegionExporter as RegionExporter
    from .gpu_topology import Gpu as Gpu, SurveyFailed as SurveyFailed, seen_by as seen_by, seen_here as seen_here
    from .importer import RegionImporter as RegionImporter
    from .ipc_handles import CudaMemory as CudaMemory, HostMemory as HostMemory
    from .local_memory import OwnMemory as OwnMemory
    from .staging_buffers import BucketPool as BucketPool
    from .tensor_bytes import addresses_of as addresses_of, bytes_of as bytes_of, sizes_of as sizes_of
    from .torch_shared_memory import EngineMemory as EngineMemory
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
