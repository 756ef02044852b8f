"""The engine agent: a sidecar that answers for one SGLang server and takes new weights into it.

sglang_server.py       the server over HTTP; api_versions.py says how its versions differ, pickle_payload.py writes its
pickles compatibility.py     does a manifest fit the server? Asked before the first call, because SGLang exits on a bad
one engine_machine.py  pure machine: what to do on each message of the coordinator and each thing seen on the server
recorded_state.py       what of it is on disk, and what is written there ahead of time; pause_lease.py: what it may do
unasked load_tracer.py     what a model's own loader would copy, written down (tracing, provenance, origins, findings)
loader.py  the part that SGLang calls inside its workers, for direct transfers; worker_state.py is what it keeps
driver.py       the driver: bus, worker thread, clock, server watch; reply_sender.py says the answers cpu_server.py   a
real SGLang server without a GPU, for demos and tests
"""
