"""Copies and digests of strided boxes on one device: torch, Triton, CUDA copy engines."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .box_digests import BoxTable as BoxTable, Lanes as Lanes, odd_boxes as odd_boxes, table_of as table_of
    from .box_packing import (
        Packed as Packed,
        digest_of as digest_of,
        packed as packed,
        parts_of as parts_of,
        put_together as put_together,
    )
    from .copy_engine import (
        CopyEngine as CopyEngine,
        PreparedCopies as PreparedCopies,
        PreparedDigest as PreparedDigest,
        Ready as Ready,
    )
    from .copy_rows import RowSide as RowSide, joined as joined, rows_of as rows_of
    from .copy_table import AXES as AXES, ITEM_SIZES as ITEM_SIZES, CopyTable as CopyTable
    from .device_fence import DeviceFence as DeviceFence
    from .engine_selection import branches_asked as branches_asked, engine_for as engine_for
    from .ready_flags import (
        Needs as Needs,
        ReadyFlags as ReadyFlags,
        marks_in as marks_in,
        needs_of as needs_of,
        stages_of as stages_of,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
