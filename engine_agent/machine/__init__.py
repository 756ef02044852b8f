"""What the sidecar decides, pure: what the server holds, commands, resync. Imports control.protocol only."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .engine_machine import Application as Application
    from .events import (
        Answer as Answer,
        Broken as Broken,
        Cancel as Cancel,
        Commanded as Commanded,
        Effect as Effect,
        Event as Event,
        Finished as Finished,
        ForgetAnswers as ForgetAnswers,
        Label as Label,
        Note as Note,
        Operated as Operated,
        Operation as Operation,
        PauseServer as PauseServer,
        Proven as Proven,
        Receive as Receive,
        Received as Received,
        Record as Record,
        Release as Release,
        Remember as Remember,
        Result as Result,
        Run as Run,
        ServerFound as ServerFound,
        ServerGone as ServerGone,
        Stage as Stage,
        Ticked as Ticked,
        Validate as Validate,
        Verify as Verify,
        Welcomed as Welcomed,
    )
    from .operation_state import View as View
    from .resync import SAVED as SAVED, CatchUp as CatchUp
    from .weight_state import WeightState as WeightState
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
