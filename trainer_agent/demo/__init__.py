"""The demo: a real round trip on one machine without a GPU, as a stranger's first contact and as a whole-system test.

`run.py` starts and stops everything; `rank.py` is the training program that runs on each Megatron rank, and reads like
one: build, connect, then generate, learn, publish. The rest serves these two.

    commands.py    the ``weightbus demo`` command
    settings.py    its flags
    run.py         start, follow, judge, stop
    processes.py   process groups, their logs and their end
    view.py        progress and the table
    records.py     what a rank reports of each round, and the verdict over all of them
    rank.py        the training loops, one step after another or overlapped
    program.py     what it is told
    actor.py       rollouts, judged by the versions that wrote them
    learner.py     one policy-gradient step on Megatron ranks
    model.py       the policy as Megatron builds it
    checkpoint.py  the policy before training, as a Hugging Face folder
    task.py        prompts, rewards, advantages
    engines.py     the ready list and the rollouts, over HTTP
"""
