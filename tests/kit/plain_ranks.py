"""One of three ranks without Megatron: `python tests/kit/plain_ranks.py RANK RENDEZVOUS_FILE`.

Ranks 0 and 1, ranks 1 and 2, and all three speak to each other as the ranks of a source do, again and again.
"""

import datetime as dt
import sys

import torch.distributed as dist

from weightbus.trainer_agent.sources.collective_source import RankGroup


def converse(ranks: RankGroup, turn: int) -> None:
    """Every call of `RankGroup`, with sizes on both sides of a page."""
    me = ranks.rank
    said = [bytes([rank, turn]) * (700 * rank) for rank in range(len(ranks.global_ranks))]
    assert ranks.gather(said[me]) == said
    for size in (0, 1, 1016, 1017, 5000):
        blob = bytes([turn]) * size
        assert ranks.broadcast(blob if me == 0 else None) == blob
    try:
        ranks.broadcast(None if me == 0 else b"mine")
    except ValueError as error:
        assert "only the root" in str(error)  # noqa: PT017  # no pytest in this process


def main() -> None:
    """Build, use and close over each group, several times."""
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    minute = dt.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3, timeout=minute)
    parts = [dist.new_group(members, backend="gloo", timeout=minute) for members in ([0, 1], [1, 2])]
    for turn in range(3):
        for first, part in enumerate(parts):
            if rank in {first, first + 1}:
                ranks = RankGroup(part, 60.0)
                converse(ranks, turn)
                ranks.close()
        ranks = RankGroup(None, 60.0)
        converse(ranks, turn)
        ranks.close()
    try:
        RankGroup(parts[0], 60.0)
    except ValueError:
        assert rank == 2  # no pytest in this process
    print("spoke")  # noqa: T201  # what the test waits for


if __name__ == "__main__":
    main()
