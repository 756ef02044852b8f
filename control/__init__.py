"""weightbus.control: who may change which weights when, and how everybody hears of it. No tensors, no torch.

messages  codec  errors             the protocol, its frames, and what can be wrong with it (PROTOCOL.md)
    from_agents  from_coordinator       who says what
    fragments  terms  ids               what it is made of
states                              legal moves, as tables
events  effects                     what may happen to the coordinator, what it asks of the world
coordinator                         the machine: handle(event, now) -> effects, made of
    membership  admission               who is there, who may say what
    channel  lease  tenure  fleet       one channel: who may publish, who does, its engines outside a round
    round  cohort  member               one round, its engines, one of them
    orders  routing  duties             what a round tells them, by which transport, unanswered commands
    receipts                            acknowledgements that are owed, and those that a command makes needless
    engines  blobs  answers  status     one engine, manifests, how rounds ended, what may be known
    publisher  plan_document  story     who published, who takes versions by what and why, what was said lately
    limits                              every wait and bound
journal  server  service            SQLite and the loop: the machine's hands; the process around them
reporter  telemetry  http           what becomes of its observations: log, metrics, status
bus  links  memory_bus  keys        sockets, their seam, their stand-in, CURVE key files
    throttle                            how much one agent may say
client  session                     an agent's end, and the machine in it
settings  settings_fields           where a process's settings come from, and one of them
coordinator_settings                those of the coordinator
cli  commands  status_view          the command `weightbus`, and the status for people
plan_command  plan_view             the same for the plan
"""
