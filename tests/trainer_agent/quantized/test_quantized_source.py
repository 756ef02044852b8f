"""Weights that are quantized on their way: whoever holds what, the buckets hold the quantized checkpoint."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from structlog.testing import capture_logs

from weightbus.dataplane.quantize.schemes import Scheme, UnknownScheme, fp8_block, int4, quantized_tensors
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Box
from weightbus.trainer_agent.assembly.assembler import DTYPES
from weightbus.trainer_agent.machine.errors import BadCheckpoint
from weightbus.trainer_agent.quantized.quantization_plan import QuantizedWeight, WeightDivision
from weightbus.trainer_agent.quantized.quantized_assembly import LocatedSource
from weightbus.trainer_agent.quantized.quantized_source import QuantizedSource, as_served, quantized
from weightbus.trainer_agent.settings import TrainerSettings
from weightbus.trainer_agent.source import Source, UnsupportedModel
from weightbus.trainer_agent.sources.collective_source import ShardedSource
from weightbus.trainer_agent.sources.hf_module import FSDPSource, HFModuleSource
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

from ...kit.quantized_world import RANKS, SHAPES, STORED, Opaque, Rank, World, cut, of, small, tensor_parallel


@settings(deadline=None, max_examples=20)
@given(st.data(), st.sampled_from(STORED), st.integers(1, 9000), st.sampled_from(["float32", "bfloat16"]))
def test_any_pieces_and_any_buckets(data: st.DataObject, scheme: Scheme, bucket_bytes: int, trained: str) -> None:
    """However weights are cut and spread, buckets hold the bytes of the quantized whole, in every pass anew."""
    world = World(trained)
    for name, shape in SHAPES.items():
        for box in cut(Box.whole(shape), data):
            for rank in data.draw(st.sets(st.integers(0, RANKS - 1), min_size=1)):
                world.give(
                    rank, name, box, shift=data.draw(st.sampled_from([0, 0, 0, 1])) if trained == "float32" else 0
                )
    world.full = {
        name: tensor.bfloat16().float() if trained == "bfloat16" else tensor for name, tensor in world.full.items()
    }
    shifted = any(shard.shift for rows in world.rows.values() for shard in rows)
    scheme = small(scheme)
    sources = [QuantizedSource(Rank(world, rank), of(scheme)) for rank in range(RANKS)]
    owners = data.draw(st.none() | st.fixed_dictionaries({name: st.integers(0, RANKS - 1) for name in SHAPES}))
    world.check(scheme, sources, bucket_bytes, passes=1 if shifted else 2, owners=owners)


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(STORED), st.integers(1, 9000))
def test_sources_that_say_nothing_are_gathered(scheme: Scheme, bucket_bytes: int) -> None:
    """The root quantizes alone what another source assembles, each raw bucket asked for once and in order."""
    world, scheme = World(), small(scheme)
    opaque = [Opaque(world, root=True), Opaque(world, root=False)]
    world.check(scheme, [QuantizedSource(each, of(scheme)) for each in opaque], bucket_bytes, passes=1)
    assert opaque[0].asked == opaque[1].asked == sorted(set(opaque[0].asked))


class Counted(Opaque):
    """Knows what of the memory that it assembled into is still there."""

    def __init__(self, world: World) -> None:
        super().__init__(world, root=True)
        self.given: list[weakref.ref[torch.Tensor]] = []

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        super().assemble(manifest, index, out)
        assert out is not None
        self.given.append(weakref.ref(out.untyped_storage()))  # type: ignore[arg-type]  # whose life is the memory's

    @property
    def there(self) -> int:
        return sum(each() is not None for each in self.given)


def test_what_was_gathered_is_kept_for_no_longer_than_it_is_needed() -> None:
    """A model would lie in memory a second time otherwise."""
    scheme = small(fp8_block((128, 128)))
    source = Counted(World())
    served = QuantizedSource(source, of(scheme))
    manifest = Manifest.of("M", served.tensors(), 5000)
    work = WeightDivision(manifest, served.weights, None).work(0)
    for index, bucket in enumerate(manifest.buckets):
        served.assemble(manifest, index, torch.empty(bucket.nbytes, dtype=torch.uint8))
        later = {number for each in work.buckets[index + 1 :] for number in each.raws}
        begun = {number for each in work.buckets[: index + 1] for number in each.raws}
        assert source.there == len(begun & later)
    assert len(source.given) > 2


def weights_of(world: World, scheme: Scheme) -> list[QuantizedWeight]:
    return [
        QuantizedWeight(spec, scheme, scheme.parts(spec), quantized_tensors(spec, scheme))
        for spec in world.tensors
        if spec.name.endswith("_proj.weight")
    ]


def test_whole_blocks_are_quantized_where_they_lie_and_once() -> None:
    """Experts at their owner, rows of a tensor-parallel weight by each rank; nothing is gathered."""
    world, scheme = tensor_parallel(48), small(fp8_block((128, 128)))
    source = QuantizedSource(Rank(world, 0), of(scheme))
    division = WeightDivision(Manifest.of("M", source.tensors()), source.weights, world.shards())
    assert division.raw is None
    jobs = [(rank, job.weight) for rank in range(RANKS) for work in division.work(rank).buckets for job in work.jobs]
    assert sorted(jobs) == [(0, 0), (0, 1), (1, 0), (1, 2), (2, 3)]
    traveling = division.traveling()
    elements = [spec for spec in traveling.tensors if spec.dtype == "float8_e4m3fn"]
    assert {str(traveling.at(row).dtype) for row in range(len(traveling)) if traveling.rank[row]} == {
        "float8_e4m3fn",
        "float32",
    }
    assert len(elements) == 4


def test_cut_blocks_are_gathered() -> None:
    """A weight whose blocks two ranks share goes to the root as it is, and only that one."""
    world, scheme = tensor_parallel(40), small(fp8_block((128, 128)))
    source = QuantizedSource(Rank(world, 0), of(scheme))
    division = WeightDivision(Manifest.of("M", source.tensors()), source.weights, world.shards())
    assert division.raw is not None
    assert [spec.name for spec in division.raw.tensors] == ["a.q_proj.weight"]
    world.check(scheme, [QuantizedSource(Rank(world, rank), of(scheme)) for rank in range(RANKS)], 1 << 20)


def test_a_border_between_buckets_costs_one_weight() -> None:
    """Elements and scales in different buckets: that weight is quantized for both, no other."""
    world, scheme = tensor_parallel(48), small(int4(128, symmetric=False))
    source = QuantizedSource(Rank(world, 0), of(scheme))
    manifest = Manifest.of("M", source.tensors(), 3 * 1024)
    division = WeightDivision(manifest, source.weights, world.shards())
    for weight in source.weights:
        homes = {division.places[spec.name][0] for _, spec in weight.computed}
        jobs = [
            job
            for rank in range(RANKS)
            for work in division.work(rank).buckets
            for job in work.jobs
            if source.weights[job.weight] == weight
        ]
        shards = len(division.rows[weight.spec.name])
        assert len(jobs) == shards * len(homes)


def test_memory_is_asked_for_once_a_pass() -> None:
    """Asking is collective: every rank does it at the first bucket, and at no other."""
    world, scheme = tensor_parallel(48), small(fp8_block((128, 128)))
    sources = [QuantizedSource(Rank(world, rank), of(scheme)) for rank in range(RANKS)]
    assert all(isinstance(Rank(world, rank), LocatedSource) for rank in range(RANKS))
    world.check(scheme, sources, 2048, passes=2)
    assert sorted(world.settled) == sorted(2 * list(range(RANKS)))


QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_the_served_checkpoint_chooses(tmp_path: Path) -> None:
    """A plain checkpoint leaves a source alone, a quantized one wraps it, an unknown one is refused."""
    source = Opaque(World(), root=True)
    assert quantized(source, None) is source
    assert quantized(source, {"architectures": ["M"]}) is source
    assert isinstance(quantized(source, {"quantization_config": QUANTIZATION}), QuantizedSource)
    with pytest.raises(UnsupportedModel, match="awq"):
        quantized(source, {"quantization_config": {"quant_method": "awq"}})
    (tmp_path / "config.json").write_text("{}")
    assert quantized(source, tmp_path) is source
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="hf_quant_config"):
        quantized(source, tmp_path)


def test_what_is_quantized_already_is_left_alone() -> None:
    """A quantized checkpoint that is published from its files is what it is."""
    world = World()
    world.tensors = (TensorSpec("a.q_proj.weight", "float8_e4m3fn", (96, 64)),)
    source = Opaque(world, root=True)
    assert quantized(source, {"quantization_config": QUANTIZATION}) is source
    world.tensors = (TensorSpec("a.q_proj.weight_packed", "int32", (96, 8)),)
    assert quantized(source, {"quantization_config": QUANTIZATION}) is source


def test_a_buffer_of_integers_is_no_quantized_weight() -> None:
    """A model that has one is quantized like any other, and does not pass in bfloat16."""
    world = World()
    world.tensors = (*world.tensors, TensorSpec("a.places", "int32", (8,)))
    found = quantized(Opaque(world, root=True), {"quantization_config": QUANTIZATION})
    assert isinstance(found, QuantizedSource)
    assert any(spec.dtype == "float8_e4m3fn" for spec in found.tensors())


def test_names_dtypes_and_shapes_are_those_of_the_files(tmp_path: Path) -> None:
    """Where the served checkpoint's files are at hand, what is served is exactly what they hold, or it is refused."""
    world = World()
    config = {"architectures": ["M"], "quantization_config": QUANTIZATION}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = world.expected(fp8_block((128, 128)))
    tensors["e.1.up_proj.weight"] = world.full["e.1.up_proj.weight"].bfloat16()  # an exception nobody wrote down
    del tensors["e.1.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    found = quantized(Opaque(world, root=True), tmp_path)
    assert {spec.name: (DTYPES[spec.dtype], spec.shape) for spec in found.tensors()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    tensors["a.o_proj.weight_scale_inv"] = torch.ones(3, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="o_proj") as caught:
        quantized(Opaque(world, root=True), tmp_path)
    assert isinstance(caught.value.__cause__, UnknownScheme)


def test_a_quantized_checkpoint_of_other_names_is_refused(tmp_path: Path) -> None:
    """Nothing passes as bfloat16 because no name was found, in the files or in the config."""
    world = World()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["M"], "quantization_config": QUANTIZATION}))
    tensors = {f"model.language_model.{name}": each for name, each in world.expected(fp8_block((128, 128))).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"have no 'model\.embed_tokens\.weight'.*they have"):
        quantized(Opaque(world, root=True), tmp_path)
    save_file({name: each.bfloat16() for name, each in world.full.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"none of 7 tensors.*files leave"):
        quantized(Opaque(world, root=True), tmp_path)
    without = {**QUANTIZATION, "modules_to_not_convert": ["a", "e"]}
    with pytest.raises(UnsupportedModel, match=r"none of 7 tensors.*means none"):
        quantized(Opaque(world, root=True), {"quantization_config": without})


@pytest.mark.parametrize("there", [["model.safetensors.index.json"], ["other.safetensors"], ["model.safetensors"]])
def test_files_that_are_not_whole_do_not_give_way_to_names(tmp_path: Path, there: list[str]) -> None:
    """An index whose shards are missing, shards without an index, a file that was cut off: the files say more."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["M"], "quantization_config": QUANTIZATION}))
    assert isinstance(quantized(Opaque(World(), root=True), tmp_path), QuantizedSource)
    for name in there:
        (tmp_path / name).write_text(json.dumps({"weight_map": {"a.q_proj.weight": "model-1.safetensors"}})[:80])
    if there == ["model.safetensors"]:
        (tmp_path / there[0]).write_bytes((1 << 16).to_bytes(8, "little") + b"{}")
    with pytest.raises(UnsupportedModel, match=r"not whole.*config\.json alone"):
        quantized(Opaque(World(), root=True), tmp_path)


@pytest.mark.parametrize(("block", "told"), [((128, 128), 0), ((256, 128), 1)])
def test_what_no_kernel_quantizes_is_said_once(block: tuple[int, int], told: int) -> None:
    """On a GPU it takes many times as long, and nothing else shows it."""
    source = Opaque(World(), root=True)
    source.device = torch.device("cuda")
    source.world.tensors = tuple(TensorSpec(f"{at}.up_proj.weight", "bfloat16", (512, 256)) for at in range(3))
    with capture_logs() as logs:
        QuantizedSource(source, of(fp8_block(block)))
    assert [line["weights"] for line in logs if line["event"] == "quantized_without_a_kernel"] == [3] * told


def test_settings_say_which_checkpoint_is_served(tmp_path: Path) -> None:
    """`served` before `hf_config_dir` before what the source was told; a folder without a config says nothing."""
    source = Opaque(World(), root=True)
    for name, content in (("fp8", {"quantization_config": QUANTIZATION}), ("plain", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer").mkdir()

    def chosen(given: Source = source, **named: str) -> bool:
        folders = {key: tmp_path / value for key, value in named.items()}
        settings = TrainerSettings(channel="c", insecure_loopback=True, **folders)
        return isinstance(as_served(given, settings), QuantizedSource)

    assert not chosen()
    assert chosen(served="fp8")
    assert chosen(hf_config_dir="fp8")
    assert not chosen(served="plain", hf_config_dir="fp8")
    assert not chosen(hf_config_dir="tokenizer")
    told = Opaque(World(), root=True)
    told.served = tmp_path / "fp8"  # type: ignore[attr-defined]  # as a source that was given a config has it
    assert chosen(told)
    assert not chosen(told, served="plain")
    with pytest.raises(BadCheckpoint):
        chosen(served="nowhere")


def test_sharded_sources_locate_their_shards() -> None:
    """Ranks of these quantize their shards; a source without one of these names would be gathered without a warning."""
    assert issubclass(MegatronSource, ShardedSource)
    assert issubclass(FSDPSource, ShardedSource)
    source = HFModuleSource(torch.nn.Linear(2, 2))
    assert isinstance(source, ShardedSource)
    assert all(hasattr(source, name) for name in ("rank", "shards", "exchange", "memory"))
