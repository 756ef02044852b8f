"""The demo: a round trip on one machine without a GPU, as a user's first contact and as a test of the whole system.

`demo_run.py` starts, follows, judges and stops everything; `training_rank.py` is the training program that runs on each
rank, and the code to read first: build, connect, then generate, learn, publish.

    commands, settings                 the ``weightbus demo`` command and its flags
    demo_run, child_processes          processes: start, logs, end (process_guard when the demo is killed)
    ports, network_namespace           their addresses, and a second host for one engine
    training_rank, actor               training loops, synchronous or overlapped; rollouts and their versions
    megatron_learner, fsdp_learner     one policy-gradient step in each framework
    initial_checkpoint, toy_task       the policy before training; prompts, rewards, advantages
    rollout_client                     the ready list and the rollouts, over HTTP
    round_records, progress_view       records and verdict of the rounds; progress and table
"""
