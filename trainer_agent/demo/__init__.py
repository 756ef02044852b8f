"""The demo: a real round trip on one machine without a GPU, as a stranger's first contact and as a whole-system test.

`demo_run.py` starts and stops everything; `training_rank.py` is the training program that runs on each Megatron rank,
and reads like one: build, connect, then generate, learn, publish. The rest serves these two.

    commands.py    the ``weightbus demo`` command
    settings.py    its flags
    demo_run.py         start, follow, judge, stop
    child_processes.py   process groups, their logs and their end
    progress_view.py        progress and the table
    round_records.py     what a rank reports of each round, and the verdict over all of them
    training_rank.py        the training loops, one step after another or overlapped
    program_arguments.py     what it is told
    actor.py       rollouts, judged by the versions that wrote them
    learner.py     one policy-gradient step on Megatron ranks
    megatron_model.py       the policy as Megatron builds it
    initial_checkpoint.py  the policy before training, as a Hugging Face folder
    toy_task.py        prompts, rewards, advantages
    rollout_client.py     the ready list and the rollouts, over HTTP
"""
