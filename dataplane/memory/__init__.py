"""Memory that other processes open: export, import, CUDA IPC, shared memory, staging buffers, and device identity."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .cuda_memory import (
        NCCL_HOSTID as NCCL_HOSTID,
        CudaMemory as CudaMemory,
        Driver as Driver,
        device_name as device_name,
        error_name as error_name,
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
    from .exports import LocalMemory as LocalMemory, RegionExporter as RegionExporter, RegionImporter as RegionImporter
    from .gpu_topology import (
        GpuSurveyFailed as GpuSurveyFailed,
        VisibleGpu as VisibleGpu,
        gpus_visible_here as gpus_visible_here,
        gpus_visible_to as gpus_visible_to,
    )
    from .shared_memory import (
        BucketBuffers as BucketBuffers,
        HostMemory as HostMemory,
        HostSegment as HostSegment,
        TorchSharedBuffers as TorchSharedBuffers,
        addresses_of as addresses_of,
        bytes_of as bytes_of,
        decode_handle as decode_handle,
        map_readonly as map_readonly,
        sizes_of as sizes_of,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
