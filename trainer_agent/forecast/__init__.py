"""Predicts a round of a fleet from its description: bytes by the planner's own rules, seconds by calibrated constants.

fleet         the question: a trainer's layout, groups of engines, links; impossible fleets are refused
traffic       what ranks hold and workers need of a model, and the bytes between them, by the reshard plan's rule
cost_model    constants, each with its source; bytes and constants to steps of a round and the busiest links
forecast      the rounds of one model, what would help, and the report

Pure, but for commands: no torch, socket or clock. Left out: congestion between hosts, a first round.
"""
