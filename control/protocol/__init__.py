"""What travels between agents and coordinator: messages, their encoding, ids, errors, Ed25519 signatures."""

from .codec import (
    CARRIES_BLOB as CARRIES_BLOB,
)
from .codec import (
    MAGIC as MAGIC,
)
from .codec import (
    MAX_ANSWER_BYTES as MAX_ANSWER_BYTES,
)
from .codec import (
    MAX_FRAME_BYTES as MAX_FRAME_BYTES,
)
from .codec import (
    MAX_PROSE as MAX_PROSE,
)
from .codec import (
    MAX_REASONS_BYTES as MAX_REASONS_BYTES,
)
from .codec import (
    TO_AGENT as TO_AGENT,
)
from .codec import (
    TO_COORDINATOR as TO_COORDINATOR,
)
from .codec import (
    Frames as Frames,
)
from .codec import (
    M as M,
)
from .codec import (
    Wire as Wire,
)
from .codec import (
    brief as brief,
)
from .codec import (
    clip as clip,
)
from .codec import (
    pack as pack,
)
from .codec import (
    unpack as unpack,
)
from .enums import (
    MAX_PAGE_BYTES as MAX_PAGE_BYTES,
)
from .enums import (
    MAX_PAGES as MAX_PAGES,
)
from .enums import (
    PROTOCOL as PROTOCOL,
)
from .enums import (
    Code as Code,
)
from .enums import (
    EngineHealth as EngineHealth,
)
from .enums import (
    Outcome as Outcome,
)
from .enums import (
    PauseMode as PauseMode,
)
from .enums import (
    Reach as Reach,
)
from .enums import (
    Role as Role,
)
from .enums import (
    SlowEngines as SlowEngines,
)
from .enums import (
    Step as Step,
)
from .enums import (
    TransportKind as TransportKind,
)
from .errors import (
    BlobMismatch as BlobMismatch,
)
from .errors import (
    ClientClosed as ClientClosed,
)
from .errors import (
    ConfigurationError as ConfigurationError,
)
from .errors import (
    CoordinatorUnreachable as CoordinatorUnreachable,
)
from .errors import (
    IllegalMove as IllegalMove,
)
from .errors import (
    InvariantBroken as InvariantBroken,
)
from .errors import (
    JournalCorrupt as JournalCorrupt,
)
from .errors import (
    JournalError as JournalError,
)
from .errors import (
    JournalUnwritable as JournalUnwritable,
)
from .errors import (
    Malformed as Malformed,
)
from .errors import (
    NotNewer as NotNewer,
)
from .errors import (
    NoTrainer as NoTrainer,
)
from .errors import (
    NotWanted as NotWanted,
)
from .errors import (
    Oversize as Oversize,
)
from .errors import (
    PeerKeyError as PeerKeyError,
)
from .errors import (
    ProtocolError as ProtocolError,
)
from .errors import (
    RequestRefused as RequestRefused,
)
from .errors import (
    StandsBy as StandsBy,
)
from .errors import (
    UnknownMessage as UnknownMessage,
)
from .errors import (
    WeightbusError as WeightbusError,
)
from .errors import (
    WrongProtocol as WrongProtocol,
)
from .ids import (
    MAX_VERSION as MAX_VERSION,
)
from .ids import (
    NAME_PATTERN as NAME_PATTERN,
)
from .ids import (
    AgentId as AgentId,
)
from .ids import (
    AgentName as AgentName,
)
from .ids import (
    BlobDigest as BlobDigest,
)
from .ids import (
    Channel as Channel,
)
from .ids import (
    ChannelName as ChannelName,
)
from .ids import (
    Count as Count,
)
from .ids import (
    Digest as Digest,
)
from .ids import (
    Epoch as Epoch,
)
from .ids import (
    EpochNumber as EpochNumber,
)
from .ids import (
    Incarnation as Incarnation,
)
from .ids import (
    IncarnationId as IncarnationId,
)
from .ids import (
    JoinedChannel as JoinedChannel,
)
from .ids import (
    ParallelSize as ParallelSize,
)
from .ids import (
    RequestId as RequestId,
)
from .ids import (
    RequestKey as RequestKey,
)
from .ids import (
    Seconds as Seconds,
)
from .ids import (
    TableDigest as TableDigest,
)
from .ids import (
    Text as Text,
)
from .ids import (
    Version as Version,
)
from .ids import (
    VersionNumber as VersionNumber,
)
from .message_fields import (
    EngineInfo as EngineInfo,
)
from .message_fields import (
    EngineReport as EngineReport,
)
from .message_fields import (
    Fragment as Fragment,
)
from .message_fields import (
    Held as Held,
)
from .message_fields import (
    Lack as Lack,
)
from .message_fields import (
    Message as Message,
)
from .message_fields import (
    Nic as Nic,
)
from .message_fields import (
    Offer as Offer,
)
from .message_fields import (
    Place as Place,
)
from .message_fields import (
    Policy as Policy,
)
from .message_fields import (
    Receiver as Receiver,
)
from .message_fields import (
    Seal as Seal,
)
from .message_fields import (
    TrainerInfo as TrainerInfo,
)
from .messages import (
    Abandon as Abandon,
)
from .messages import (
    Abort as Abort,
)
from .messages import (
    Ack as Ack,
)
from .messages import (
    Acquire as Acquire,
)
from .messages import (
    Alive as Alive,
)
from .messages import (
    AnyAgentMessage as AnyAgentMessage,
)
from .messages import (
    BlobPage as BlobPage,
)
from .messages import (
    Bye as Bye,
)
from .messages import (
    Commit as Commit,
)
from .messages import (
    EngineMessage as EngineMessage,
)
from .messages import (
    Failed as Failed,
)
from .messages import (
    GetBlob as GetBlob,
)
from .messages import (
    GetStatus as GetStatus,
)
from .messages import (
    Granted as Granted,
)
from .messages import (
    Heartbeat as Heartbeat,
)
from .messages import (
    Hello as Hello,
)
from .messages import (
    Offered as Offered,
)
from .messages import (
    Pause as Pause,
)
from .messages import (
    Paused as Paused,
)
from .messages import (
    Prepare as Prepare,
)
from .messages import (
    Prepared as Prepared,
)
from .messages import (
    Publish as Publish,
)
from .messages import (
    PutBlob as PutBlob,
)
from .messages import (
    Refused as Refused,
)
from .messages import (
    Release as Release,
)
from .messages import (
    Request as Request,
)
from .messages import (
    RoundDone as RoundDone,
)
from .messages import (
    Send as Send,
)
from .messages import (
    Sent as Sent,
)
from .messages import (
    Serving as Serving,
)
from .messages import (
    Status as Status,
)
from .messages import (
    ToAgent as ToAgent,
)
from .messages import (
    ToAnyAgent as ToAnyAgent,
)
from .messages import (
    ToCoordinator as ToCoordinator,
)
from .messages import (
    ToEngine as ToEngine,
)
from .messages import (
    Topology as Topology,
)
from .messages import (
    ToTrainer as ToTrainer,
)
from .messages import (
    TrainerMessage as TrainerMessage,
)
from .messages import (
    Transfer as Transfer,
)
from .messages import (
    Transferred as Transferred,
)
from .messages import (
    Verified as Verified,
)
from .messages import (
    Welcome as Welcome,
)
from .messages import (
    Withdraw as Withdraw,
)
from .signatures import (
    PUBLIC_PATTERN as PUBLIC_PATTERN,
)
from .signatures import (
    Signature as Signature,
)
from .signatures import (
    SigningKey as SigningKey,
)
from .signatures import (
    sign as sign,
)
from .signatures import (
    signed_by as signed_by,
)
from .signatures import (
    signing_key_of as signing_key_of,
)
