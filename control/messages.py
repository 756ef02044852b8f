"""Every message of the control plane: who sends it, what its fields mean, in which units.

A message is one frame: a header of four bytes, then msgpack, a map tagged by ``type``; a blob (a page of a manifest or
of a digest table) is a second frame. Unknown tags, unknown fields and values out of bounds are refused by the codec.

Within one `PROTOCOL` fields are only added, each with a default that means "as before", and a default never changes. A
field that has its default is not sent. So an older reader understands everything that it could be asked before, and
refuses what it is asked in a field that it does not know, rather than do the rest of it. Anything else raises
`PROTOCOL`.

This is the door: they stand in from_agents.py and from_coordinator.py, the structures inside them in fragments.py, the
words in terms.py, and are imported from here.

The exchange of one round::

    trainer                     coordinator                      engine agents
      Acquire  ----------------->
      <-----------------  Granted(epoch, engines)
      PutBlob (manifest, digests; only what is not cached) ->
      Publish(epoch, version) -->   PREPARING   Prepare  -------->
                                                <-----  Prepared / Failed
      <-------------------  Send    OFFERING    (who takes part, by which transport)
      Offered  ----------------->   PAUSING     Pause, Transfer(offer) ->
                                                <-----  Paused / Failed
                                    TRANSFERRING
         ... tensors travel on the data plane, never here ...
      <---------------  Withdraw   (only if an engine drops out: who is not to be waited for)
      Sent     ----------------->               <-----  Transferred / Failed
                                    VERIFYING   <-----  Verified / Failed
                                    COMMITTING  (journal, fsync)
                                    RESUMING    Commit   -------->
                                                <-----  Serving
      <--------------  RoundDone

**Open tables.** Where every engine takes the ranks' memory by itself (``direct``), a trainer may announce a version
before it has digested it: `Publish`, `Prepare` and `Transfer` leave their table open (empty), and the table follows, to
the engines over the transport, to the coordinator (`PutBlob`) at the same time, and `Sent` names it. Nothing is proven
and nothing committed without it.
"""

from __future__ import annotations

from .fragments import (
    EngineInfo,
    EngineReport,
    Fragment,
    Held,
    Lack,
    Message,
    Nic,
    Offer,
    Place,
    Policy,
    Receiver,
    Seal,
    TrainerInfo,
)
from .from_agents import (
    Abandon,
    Acquire,
    Bye,
    Failed,
    GetBlob,
    GetStatus,
    Heartbeat,
    Hello,
    Offered,
    Paused,
    Prepared,
    Publish,
    PutBlob,
    Release,
    Sent,
    Serving,
    Topology,
    Transferred,
    Verified,
)
from .from_coordinator import (
    Abort,
    Ack,
    Alive,
    BlobPage,
    Commit,
    Granted,
    Pause,
    Prepare,
    Refused,
    RoundDone,
    Send,
    Status,
    Transfer,
    Welcome,
    Withdraw,
)
from .terms import (
    MAX_PAGE_BYTES,
    MAX_PAGES,
    PROTOCOL,
    Code,
    EngineHealth,
    Outcome,
    PauseMode,
    Reach,
    Role,
    SlowEngines,
    Step,
    TransportKind,
)

__all__ = [
    "MAX_PAGES",
    "MAX_PAGE_BYTES",
    "PROTOCOL",
    "Abandon",
    "Abort",
    "Ack",
    "Acquire",
    "Alive",
    "AnyAgentMessage",
    "BlobPage",
    "Bye",
    "Code",
    "Commit",
    "EngineHealth",
    "EngineInfo",
    "EngineMessage",
    "EngineReport",
    "Failed",
    "Fragment",
    "GetBlob",
    "GetStatus",
    "Granted",
    "Heartbeat",
    "Held",
    "Hello",
    "Lack",
    "Message",
    "Nic",
    "Offer",
    "Offered",
    "Outcome",
    "Pause",
    "PauseMode",
    "Paused",
    "Place",
    "Policy",
    "Prepare",
    "Prepared",
    "Publish",
    "PutBlob",
    "Reach",
    "Receiver",
    "Refused",
    "Release",
    "Request",
    "Role",
    "RoundDone",
    "Seal",
    "Send",
    "Sent",
    "Serving",
    "SlowEngines",
    "Status",
    "Step",
    "ToAgent",
    "ToAnyAgent",
    "ToCoordinator",
    "ToEngine",
    "ToTrainer",
    "Topology",
    "TrainerInfo",
    "TrainerMessage",
    "Transfer",
    "Transferred",
    "TransportKind",
    "Verified",
    "Welcome",
    "Withdraw",
]

AnyAgentMessage = Hello | Heartbeat | Topology | Bye | GetBlob | GetStatus
TrainerMessage = Acquire | Release | PutBlob | Publish | Offered | Sent | Abandon
EngineMessage = Prepared | Paused | Transferred | Verified | Serving | Failed
ToCoordinator = AnyAgentMessage | TrainerMessage | EngineMessage
Request = Hello | Topology | GetBlob | GetStatus | TrainerMessage | EngineMessage
"""What is answered, or acknowledged, under its key."""

ToAnyAgent = Welcome | Alive | Ack | Refused | BlobPage | Status
ToTrainer = Granted | Send | Withdraw | RoundDone
ToEngine = Prepare | Pause | Transfer | Commit | Abort
ToAgent = ToAnyAgent | ToTrainer | ToEngine
