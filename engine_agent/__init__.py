"""The engine agent: a sidecar that answers for one SGLang server and takes new weights into it.

sglang.py       the server over HTTP; dialects.py says how its versions differ, payload.py writes its pickles
validate.py     does a manifest fit the server? Asked before the first call, because SGLang exits on a bad one
application.py  pure machine: what to do on each message of the coordinator and each thing seen on the server
ledger.py       what of it is on disk, and what is written there ahead of time; mandate.py: what it may do unasked
recorder.py     what a model's own loader would copy, written down (tracing, provenance, origins, findings)
worker_loader.py  the part that SGLang calls inside its workers, for direct transfers; worker_state.py is what it keeps
runner.py       the driver: bus, worker thread, clock, server watch; speaker.py says the answers
cpu_server.py   a real SGLang server without a GPU, for demos and tests
"""
