"""Predicts a round of a fleet that nobody has to own: bytes by the planners' own rules, seconds by measured figures.

fleet      what is asked: a trainer's layout, groups of engines, links; what cannot be is refused
tensors    the served model as runs of equal blocks; holdings and needs: what ranks hold of it and workers need
traffic    who gives what to whom: the rule of dataplane/reshard/reshard_plan.py for all readers at once
figures    every constant, with where it was measured
seconds    bytes and figures become the steps of a round and the busiest link
changes    the same fleet with one thing changed, calculated again
report     what is said of it, and its picture

Pure, but for commands: no torch, socket or clock. What is left out: congestion between hosts, a first round.
"""
