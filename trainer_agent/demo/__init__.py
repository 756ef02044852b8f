"""The demo: a round trip on one machine without a GPU, as a user's first contact and as a test of the whole system.

`demo_run.py` starts, follows, judges and stops everything; `training_rank.py` is the training program that runs on each
rank, and the code to read first: build, connect, then generate, learn, publish.

    commands                           the ``weightbus demo`` command and its flags
    demo_run, child_processes          processes: start, addresses, logs, end (process_guard when the demo is killed)
    training_rank, rollouts            training loops, synchronous or overlapped; rollouts and their versions
    megatron_learner, fsdp_learner     one policy-gradient step in each framework
    toy_task                           the policy before training; prompts, rewards, advantages
    round_records                      records and verdict of the rounds; progress and table
"""
