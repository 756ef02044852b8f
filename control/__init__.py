"""weightbus.control: who may change which weights when, and how everybody hears of it. No tensors, no torch.

messages  codec  errors             the protocol, its frames, and what can be wrong with it (PROTOCOL.md)
    from_agents  from_coordinator       who says what
    fragments  terms  ids               what it is made of
states  limits                      legal moves, as tables; every wait and bound
events  effects                     what may happen to the coordinator, what it asks of the world
coordinator                         the machine: handle(event, now) -> effects, made of
    membership  admission               who is there, who may say what
    attendance                          who comes and goes, and what channels are told of it
    channel  standing                   one channel: what it decides, how it stands
    lease                               who may publish, who does
    fleet  engines                      its engines outside a round, one of them and how old its version may be
    round                               one round: how far it has come, what it decides
    cohort  member                      its engines, one of them
    contradictions                      what a round must never be
    orders  duties                      what a round tells them, unanswered commands
    turns                               in what order, where not all stand still at a time
    routes  routing                     by which transport; who chooses it
    outgoing  outbox                    what a channel wants out; what the coordinator does, and the pen
    answers  receipts                   how questions and rounds were answered; which acknowledgements are owed
    blobs  publisher  story             manifests, who published, what was said lately
    status                              what may be known
    deadlines  recent                   the earlier of two; the last of many
server  service                     the loop: the machine's hands; the process around them
    journal                             SQLite, and what any journal promises
    journal_file                        the file, before SQLite writes to it
    etcd_journal  etcd                  the same records in a store that several coordinators share
    election  candidate  standby        who of them leads, in turns, and what the others say
bus  dealer  sockets                the coordinator's sockets, an agent's, and what they have in common
    links  memory_bus                   their seam, and their stand-in
    throttle  rejection                 how much one agent may say, and what is answered to what is no message
keys  trust  security               CURVE key files, the allow-list, and the word that there are none
    signing  seals  provision           Ed25519, what trainers sign with it, all keys of a host in one call
plan_document  imagined_fleet       who takes versions by what transport, and why; of a fleet in a file
reporter  telemetry  log            what becomes of its observations: metrics and lines
    http  status_desk                   pages, and documents that the loop hands to other threads
client  session                     an agent's end, and the machine in it
cli  settings_command               the command `weightbus`, and what its subcommands share
    commands  key_commands              coordinator, status, version; keygen, trust
    forget_command                      channels that nobody needs any more
    plan_command  plan_view             the plan, and the plan for people
    status_view  page                   the status for people, read by a deadline
    plain                               text of agents, made fit for a terminal
    settings  settings_fields           where a process's settings come from, and one of them
    coordinator_settings                those of the coordinator
"""
