"""Engine workers copy out of the trainer's exported memory."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import messages as messages
    from .messages import (
        Agreed as Agreed,
        Failed as Failed,
        Finished as Finished,
        GiveLayout as GiveLayout,
        Hello as Hello,
        Propose as Propose,
        Refused as Refused,
        Welcome as Welcome,
    )
    from .receiver import (
        Agreement as Agreement,
        DirectReceiver as DirectReceiver,
        ReadLayout as ReadLayout,
        read_layout as read_layout,
    )
    from .transport import TRANSPORT as TRANSPORT
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
