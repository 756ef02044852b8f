"""The coordinator as a process: the loop that drives the machine, standby, HTTP, metrics, the plan document."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .coordinator_process import (
        CoordinatorCandidate as CoordinatorCandidate,
        CoordinatorProcess as CoordinatorProcess,
        read_keys as read_keys,
    )
    from .event_loop import on_signals as on_signals
    from .http_server import (
        HttpAnswer as HttpAnswer,
        HttpPort as HttpPort,
        HttpQuestion as HttpQuestion,
        Readiness as Readiness,
    )
    from .metrics import (
        ADMISSIONS as ADMISSIONS,
        CALL_FAILURES as CALL_FAILURES,
        CALL_SECONDS as CALL_SECONDS,
        CHECKPOINTS as CHECKPOINTS,
        FOREIGN_ACTS as FOREIGN_ACTS,
        LOOKS_FAILED as LOOKS_FAILED,
        PUBLICATIONS_REFUSED as PUBLICATIONS_REFUSED,
        PUBLISH_SECONDS as PUBLISH_SECONDS,
        PUBLISHED_VERSION as PUBLISHED_VERSION,
        SERVER_PAUSED as SERVER_PAUSED,
        SERVER_UP as SERVER_UP,
        SIDECAR_CONNECTED as SIDECAR_CONNECTED,
        SIDECAR_HEALTH as SIDECAR_HEALTH,
        SIDECAR_ORPHANED as SIDECAR_ORPHANED,
        SIDECAR_VERSION as SIDECAR_VERSION,
        SIDECAR_WEIGHTS as SIDECAR_WEIGHTS,
        STEP_FAILURES as STEP_FAILURES,
        STEP_SECONDS as STEP_SECONDS,
        Metrics as Metrics,
        MetricSource as MetricSource,
        configure_logging as configure_logging,
    )
    from .settings import (
        CoordinatorSettings as CoordinatorSettings,
        LogFormat as LogFormat,
        LogLevel as LogLevel,
        default_journal as default_journal,
    )
    from .transport_plan import (
        ChannelPlan as ChannelPlan,
        EnginePlan as EnginePlan,
        PlanView as PlanView,
        TrainerPlan as TrainerPlan,
        encode_plan as encode_plan,
        parse_plan as parse_plan,
        plan_engines as plan_engines,
        trainer_plan as trainer_plan,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
