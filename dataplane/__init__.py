"""The data plane: what a version consists of, and how its bytes get from a trainer into engines. Knows no policy.

manifest      layouts, buckets, digest tables: pure data
boxes, pieces, cover, dealing   which part of which tensor lies where in whose memory: pure data
integrity     digests of tensors, on CPU and GPU
staging       the buffers in which buckets are packed; segments, handles: how they are named to other processes
transport     the seam: Sender, Receiver, EngineServer
local, distributed, disk     the three transports; transports picks one by name
direct        the fourth, which DIRECT.md explains: recording, plan, copy_table and proof are its data; copy_engine
              carries copies out; exports, shared_memory and importer share memory; worker_wire leads the workers
frames, lines   messages between two processes; a sender's connections, none of which waits for another
errors        what can go wrong, by what the caller can do
"""
