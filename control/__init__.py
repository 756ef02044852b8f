"""weightbus.control: who may change which weights when, and how everybody hears of it. No tensors, no torch.

messages  ids  codec  errors        the protocol, and what can be wrong with it (PROTOCOL.md)
states                              legal moves, as tables
events  effects                     what may happen to the coordinator, what it asks of the world
coordinator                         the machine: handle(event, now) -> effects, made of
    membership  lease  channel          who is there, who may, one channel
    round  member  orders  routing  duties   one round, its engines, their transports, unanswered commands
    engines  blobs  status              engines between rounds, manifests, what may be known
journal  server                     SQLite and the loop: the machine's hands
bus  links  memory_bus  client      sockets, their seam, their stand-in, an agent's end
settings  cli  commands  http  telemetry
"""
