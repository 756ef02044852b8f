"""Copies and digests of strided boxes on one device: torch, Triton, CUDA copy engines.

copy_table and box_digests are data; copy_engine is the interface, and executes them on a CPU; copy_cuda and
copy_triton execute them on a GPU.
"""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .box_digests import (
        PACKED_ALIGNMENT as PACKED_ALIGNMENT,
        Assembly as Assembly,
        BoxTable as BoxTable,
        Lanes as Lanes,
        PackedBoxes as PackedBoxes,
        digest_from_parts as digest_from_parts,
        make_box_table as make_box_table,
        odd_boxes as odd_boxes,
        pack_boxes as pack_boxes,
        tensor_from_parts as tensor_from_parts,
    )
    from .copy_cuda import copy_engine_for as copy_engine_for, copy_streams_setting as copy_streams_setting
    from .copy_engine import (
        CopyEngine as CopyEngine,
        DeviceFence as DeviceFence,
        NeededParts as NeededParts,
        PreparedCopies as PreparedCopies,
        PreparedDigest as PreparedDigest,
        ReadyFlags as ReadyFlags,
        WaitStage as WaitStage,
        needed_parts_by_stage as needed_parts_by_stage,
        ready_flags_in as ready_flags_in,
        stages_of_rows as stages_of_rows,
    )
    from .copy_table import (
        AXES as AXES,
        ITEM_SIZES as ITEM_SIZES,
        CopySide as CopySide,
        CopyTable as CopyTable,
        make_copy_table as make_copy_table,
        merge_copy_rows as merge_copy_rows,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
