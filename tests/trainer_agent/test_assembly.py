"""Buckets assembled from the parts of many ranks, in one process: every byte where the manifest says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbus.dataplane.manifest import Manifest, TensorSpec
from weightbus.trainer_agent.assembly import DTYPES, Assembler, check_coverage, check_manifest, plan
from weightbus.trainer_agent.naming import Dense, served_tensors
from weightbus.trainer_agent.pieces import Piece
from weightbus.trainer_agent.roster import Roster, Shard, holdings
from weightbus.trainer_agent.source import LayoutMismatch, RanksDisagree

CPU = torch.device("cpu")
MODEL = Dense.parse(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 13,
        "rms_norm_eps": 1e-6,
    }
)
TENSORS = served_tensors(MODEL, "float32")


class Post:
    """Carries parcels between assemblers of one process: senders run first."""

    def __init__(self, rank: int, letters: dict[int, torch.Tensor]) -> None:
        self.rank = rank
        self.letters = letters

    def send(self, parcel: torch.Tensor) -> None:
        self.letters[self.rank] = parcel.clone()

    def receive(self, parcels: dict[int, torch.Tensor]) -> None:
        for rank, parcel in parcels.items():
            parcel.copy_(self.letters.pop(rank))


def trained(ranks: int, stages: int) -> tuple[list[Roster], list[list[torch.Tensor]], dict[str, torch.Tensor]]:
    """Rosters and local parameters of every rank, cut from known served tensors, and those tensors."""
    generator = torch.Generator().manual_seed(0)
    full = {spec.name: torch.randn(spec.shape, generator=generator) for spec in TENSORS}
    rosters: list[Roster] = []
    local: list[list[torch.Tensor]] = []
    for stage in range(stages):
        for rank in range(ranks):
            parts = dict(_parts(full, rank, ranks, stage, stages))
            shards = tuple(Shard(name, tuple(tensor.shape)) for name, tensor in parts.items())
            rosters.append(Roster(MODEL, "float32", rank, ranks, shards))
            local.append(list(parts.values()))
    return rosters, local, full


def _parts(full: dict[str, torch.Tensor], rank: int, ranks: int, stage: int, stages: int):
    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(ranks)[rank].clone()

    if stage == 0:
        padded = torch.cat([full["model.embed_tokens.weight"], torch.full((3, 8), 99.0)])
        yield "embedding.word_embeddings.weight", rows(padded)
    for layer in range(2):
        if layer * stages // 2 != stage:
            continue
        source = {key.removeprefix(f"model.layers.{layer}."): value for key, value in full.items()}
        q, k, v = (source[f"self_attn.{part}_proj.weight"].view(2, -1, 8) for part in "qkv")
        prefix = f"decoder.layers.{layer}."
        yield prefix + "self_attention.linear_qkv.weight", rows(torch.cat([q, k, v], 1).view(-1, 8))
        yield (
            prefix + "self_attention.linear_proj.weight",
            source["self_attn.o_proj.weight"].chunk(ranks, 1)[rank].clone(),
        )
        yield prefix + "self_attention.q_layernorm.weight", source["self_attn.q_norm.weight"]
        yield prefix + "self_attention.k_layernorm.weight", source["self_attn.k_norm.weight"]
        yield prefix + "input_layernorm.weight", source["input_layernorm.weight"]
        yield prefix + "pre_mlp_layernorm.weight", source["post_attention_layernorm.weight"]
        gate, up = source["mlp.gate_proj.weight"], source["mlp.up_proj.weight"]
        yield prefix + "mlp.linear_fc1.weight", torch.cat([rows(gate), rows(up)])
        yield prefix + "mlp.linear_fc2.weight", source["mlp.down_proj.weight"].chunk(ranks, 1)[rank].clone()
    if stage == stages - 1:
        yield "decoder.final_layernorm.weight", full["model.norm.weight"]
        yield "output_layer.weight", rows(torch.cat([full["lm_head.weight"], torch.full((3, 8), 99.0)]))


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 4000), st.sampled_from(["float32", "bfloat16"])
)
def test_any_layout_and_any_buckets_give_the_same_bytes(ranks: int, stages: int, bucket_bytes: int, dtype: str) -> None:
    """However the model is spread and the manifest cut, buckets hold the served tensors, and nothing beyond them."""
    rosters, local, full = trained(ranks, stages)
    tensors = served_tensors(MODEL, dtype)
    held = holdings(rosters, tensors)
    manifest = Manifest.of("Qwen3ForCausalLM", tensors, bucket_bytes)
    buckets = plan(manifest, held)
    letters: dict[int, torch.Tensor] = {}
    assemblers = [Assembler(buckets, local[rank], rank, 0, Post(rank, letters)) for rank in range(len(rosters))]
    for index, bucket in enumerate(manifest.buckets):
        out = torch.full((bucket.nbytes + 8,), 0xA5, dtype=torch.uint8)
        for rank in reversed(range(len(rosters))):
            assemblers[rank].run(index, out if rank == 0 else None, CPU)
        assert not letters, "somebody sent what nobody asked for"
        assert (out[bucket.nbytes :] == 0xA5).all()
        for spec, at in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False):
            found = out[at : at + spec.nbytes].view(DTYPES[dtype]).view(spec.shape)
            assert torch.equal(found, full[spec.name].to(DTYPES[dtype])), spec.name


def test_parameters_are_read_at_the_moment_of_the_call() -> None:
    """An optimizer that puts new storage under a parameter, as offloading does, is followed."""
    parameter = torch.zeros(4)
    spec = TensorSpec("a", "float32", (4,))
    manifest = Manifest.of("M", [spec])
    assembler = Assembler(plan(manifest, {0: [(0, Piece("a", 0, 0, 4, 1))]}), [parameter], 0, 0, None)
    out = torch.empty(16, dtype=torch.uint8)
    for value in (1.0, 2.0):
        parameter.data = torch.full((4,), value)
        assembler.run(0, out, CPU)
        assert (out.view(torch.float32) == value).all()


def test_memory_is_given_back_after_the_last_bucket() -> None:
    """Between rounds the parcels' memory is the trainer's."""
    rosters, local, _ = trained(2, 1)
    manifest = Manifest.of("M", TENSORS, 500)
    letters: dict[int, torch.Tensor] = {}
    buckets = plan(manifest, holdings(rosters, TENSORS))
    sender = Assembler(buckets, local[1], 1, 0, Post(1, letters))
    for index in range(len(manifest.buckets)):
        sender.run(index, None, CPU)
        assert (sender._scratch is None) == (index == len(manifest.buckets) - 1)


def test_nobody_holds_more_than_a_bucket() -> None:
    """All parcels of a bucket together take the bucket's bytes, and a little to lie side by side."""
    rosters, _, _ = trained(4, 2)
    manifest = Manifest.of("M", TENSORS, 700)
    for bucket, spec in zip(plan(manifest, holdings(rosters, TENSORS)), manifest.buckets, strict=True):
        assert spec.nbytes <= sum(bucket.parcel_bytes.values()) <= spec.nbytes + 16 * len(bucket.parcel_bytes)


def test_parcels_of_odd_sizes_lie_side_by_side() -> None:
    """One rank's lone half-precision number does not push the next rank's floats off their boundary."""
    specs = [
        TensorSpec("half", "bfloat16", (1,)),
        TensorSpec("one", "float32", (1,)),
        TensorSpec("two", "float32", (2,)),
    ]
    manifest = Manifest.of("M", specs)
    held = {1: [(0, Piece("half", 0, 0, 1, 1)), (1, Piece("one", 0, 0, 1, 1))], 2: [(0, Piece("two", 0, 0, 2, 1))]}
    buckets = plan(manifest, held)
    letters: dict[int, torch.Tensor] = {}
    for rank, tensors in ((1, [torch.tensor([0.5]), torch.tensor([1.0])]), (2, [torch.tensor([2.0, 3.0])])):
        Assembler(buckets, tensors, rank, 0, Post(rank, letters)).run(0, None, CPU)
    out = torch.zeros(14, dtype=torch.uint8)
    Assembler(buckets, [], 0, 0, Post(0, letters)).run(0, out, CPU)
    assert out[:12].view(torch.float32).tolist() == [1.0, 2.0, 3.0]
    assert out[12:].view(torch.bfloat16).tolist() == [0.5]


def test_a_missing_shard_is_noticed() -> None:
    """A stage or tensor rank that did not take part shows as a tensor that is not covered."""
    rosters, _, _ = trained(2, 2)
    with pytest.raises(RanksDisagree, match=r"'model\.embed_tokens\.weight', 104 are served"):
        check_coverage(TENSORS, holdings(rosters[2:], TENSORS))
    with pytest.raises(RanksDisagree, match="build the source on every rank"):
        plan(Manifest.of("M", TENSORS), holdings(rosters[:1], TENSORS))


@pytest.mark.parametrize(
    "tensors",
    [
        TENSORS[1:],
        (*TENSORS, TensorSpec("more", "float32", (1,))),
        (*TENSORS[:-1], TensorSpec("lm_head.weight", "bfloat16", (13, 8))),
    ],
)
def test_a_manifest_of_other_tensors_is_refused(tensors: tuple[TensorSpec, ...]) -> None:
    """A manifest that leaves something out, adds something or names another dtype would serve a mixture."""
    with pytest.raises(LayoutMismatch, match="differ in"):
        check_manifest(Manifest.of("M", tensors), TENSORS)


def test_the_order_of_a_manifest_is_its_own() -> None:
    """Buckets may order tensors as they like."""
    check_manifest(Manifest.of("M", tuple(reversed(TENSORS))), TENSORS)
