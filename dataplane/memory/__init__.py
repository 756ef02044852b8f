"""Memory that other processes open: export, import, CUDA IPC, shared memory, staging buffers, and device identity."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import ipc_handles as ipc_handles, posix_shm as posix_shm
    from .cuda_driver import Driver as Driver, error_name as error_name
    from .device_identity import (
        NCCL_HOSTID as NCCL_HOSTID,
        device_name as device_name,
        nccl_gpu_id as nccl_gpu_id,
        nccl_gpu_id_here as nccl_gpu_id_here,
        readable_peers as readable_peers,
    )
    from .export_map import (
        READY_FLAG_BYTES as READY_FLAG_BYTES,
        ArenaParts as ArenaParts,
        ArenaRegion as ArenaRegion,
        ExportedTensor as ExportedTensor,
        ExportMap as ExportMap,
        Region as Region,
    )
    from .exporter import RegionExporter as RegionExporter
    from .gpu_topology import (
        GpuSurveyFailed as GpuSurveyFailed,
        VisibleGpu as VisibleGpu,
        gpus_visible_here as gpus_visible_here,
        gpus_visible_to as gpus_visible_to,
    )
    from .importer import RegionImporter as RegionImporter
    from .ipc_handles import CudaMemory as CudaMemory, HostMemory as HostMemory
    from .local_memory import LocalMemory as LocalMemory
    from .staging_buffers import BucketBuffers as BucketBuffers
    from .tensor_bytes import addresses_of as addresses_of, bytes_of as bytes_of, sizes_of as sizes_of
    from .torch_shared_memory import TorchSharedBuffers as TorchSharedBuffers
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
