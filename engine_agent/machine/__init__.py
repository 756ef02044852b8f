"""Decisions of the sidecar, pure: versions on the server, commands. Imports control.protocol only."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .admission import (
        BOUND_HEADERS as BOUND_HEADERS,
        AdmissionVerdict as AdmissionVerdict,
        BadBounds as BadBounds,
        VersionBounds as VersionBounds,
        admit as admit,
        version_name as version_name,
    )
    from .engine_machine import (
        ORPHANED_S as ORPHANED_S,
        EngineMachine as EngineMachine,
        ServerView as ServerView,
        name_of as name_of,
    )
    from .events import (
        INCOMPLETE as INCOMPLETE,
        Answer as Answer,
        Cancel as Cancel,
        Commanded as Commanded,
        Effect as Effect,
        Event as Event,
        ForeignAct as ForeignAct,
        ForgetAnswers as ForgetAnswers,
        JoinAgain as JoinAgain,
        Label as Label,
        Note as Note,
        Operated as Operated,
        Operation as Operation,
        OperationDone as OperationDone,
        OperationFailed as OperationFailed,
        OrphanPolicy as OrphanPolicy,
        PauseServer as PauseServer,
        Receive as Receive,
        Received as Received,
        ReceiveDoubleBuffered as ReceiveDoubleBuffered,
        Recognize as Recognize,
        ReleaseServer as ReleaseServer,
        Remember as Remember,
        Result as Result,
        RunOperation as RunOperation,
        ServerFound as ServerFound,
        ServerGone as ServerGone,
        ServerTaken as ServerTaken,
        ServerWatched as ServerWatched,
        StateRecord as StateRecord,
        TimePassed as TimePassed,
        Validate as Validate,
        VerificationPassed as VerificationPassed,
        Verify as Verify,
        Welcomed as Welcomed,
    )
    from .left_record import LeftRecord as LeftRecord
    from .weight_state import GENERATES as GENERATES, WeightState as WeightState
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
