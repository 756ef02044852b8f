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
    EngineInfo as EngineInfo,
    EngineReport as EngineReport,
    Fragment as Fragment,
    Held as Held,
    Lack as Lack,
    Message as Message,
    Nic as Nic,
    Offer as Offer,
    Place as Place,
    Policy as Policy,
    Receiver as Receiver,
    Seal as Seal,
    TrainerInfo as TrainerInfo,
)
from .from_agents import (
    Abandon as Abandon,
    Acquire as Acquire,
    Bye as Bye,
    Failed as Failed,
    GetBlob as GetBlob,
    GetStatus as GetStatus,
    Heartbeat as Heartbeat,
    Hello as Hello,
    Offered as Offered,
    Paused as Paused,
    Prepared as Prepared,
    Publish as Publish,
    PutBlob as PutBlob,
    Release as Release,
    Sent as Sent,
    Serving as Serving,
    Topology as Topology,
    Transferred as Transferred,
    Verified as Verified,
)
from .from_coordinator import (
    Abort as Abort,
    Ack as Ack,
    Alive as Alive,
    BlobPage as BlobPage,
    Commit as Commit,
    Granted as Granted,
    Pause as Pause,
    Prepare as Prepare,
    Refused as Refused,
    RoundDone as RoundDone,
    Send as Send,
    Status as Status,
    Transfer as Transfer,
    Welcome as Welcome,
    Withdraw as Withdraw,
)
from .terms import (
    MAX_PAGE_BYTES as MAX_PAGE_BYTES,
    MAX_PAGES as MAX_PAGES,
    PROTOCOL as PROTOCOL,
    Code as Code,
    EngineHealth as EngineHealth,
    Outcome as Outcome,
    PauseMode as PauseMode,
    Reach as Reach,
    Role as Role,
    SlowEngines as SlowEngines,
    Step as Step,
    TransportKind as TransportKind,
)

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
