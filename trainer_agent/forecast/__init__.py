"""Predicts a round of a fleet from its description: bytes by the planner's own rules, seconds by calibrated constants.

fleet             the question: a trainer's layout, groups of engines, links; impossible fleets are refused
tensor_blocks     the model as runs of equal blocks; trainer_shards and engine_shards are cut from it
traffic           bytes between pairs of GPUs, by the rule of dataplane/reshard/reshard_plan.py
calibration       every constant, with its source
cost_model        bytes and constants to steps of a round and the busiest links
forecast          the rounds of one model; what_if calculates a fleet again with one thing changed
forecast_report   the report, as text and as a document

Pure, but for commands: no torch, socket or clock. Left out: congestion between hosts, a first round.
"""
