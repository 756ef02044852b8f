"""weightbus.control: the coordinator, and what agents need to speak to it. No tensors, no torch.

Rooms, in the order of reading: protocol (messages, PROTOCOL.md), machine (the coordinator's decisions, pure), journal
(the durable record), bus (ZeroMQ), security (keys, allow-list, signed publications), server (the process around the
machine), cli (the command `weightbus`), front_door (packaged as `weightbus`). README.md follows a version through them.
"""
