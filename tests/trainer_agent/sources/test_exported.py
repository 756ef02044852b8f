"""Whole tensors from somebody else's exporter, through buckets; one rank, which is a group like any other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.trainer_agent.source import (
    AssemblyFailed,
    LayoutMismatch,
    SourceError,
    UnknownParameter,
    UnsupportedModel,
)
from weightbus.trainer_agent.sources.exported import ExportedSource, Exporter, bridge_exporter

from ...kit.exporting import tensors_in

SHAPES = {"a": (3, 4), "b": (2,), "count": (1,), "c": (5, 2), "d": (4,)}


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A world of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Trained:
    """Weights that change, and an exporter of them that counts its passes."""

    def __init__(self) -> None:
        self.tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        self.tensors["count"] = torch.tensor([7])
        self.passes = 0

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        yield from self.tensors.items()


def assembled(source: ExportedSource, manifest: Manifest, indexes: list[int]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for index in indexes:
        out = torch.zeros(manifest.buckets[index].nbytes, dtype=torch.uint8)
        source.assemble(manifest, index, out)
        found |= tensors_in(manifest, index, out)
    return found


@pytest.mark.parametrize("bucket_bytes", [1, 60, 1 << 20])
def test_buckets_hold_what_is_exported(bucket_bytes: int) -> None:
    """One pass to learn what is served and one for each version, whatever the buckets; the newest weights each time."""
    trained = Trained()
    source = ExportedSource(trained.export, model="New", dtype=torch.bfloat16)
    assert source.model == "New"
    assert {spec.name: spec.dtype for spec in source.tensors()} == dict.fromkeys(SHAPES, "bfloat16") | {
        "count": "int64"
    }
    manifest = Manifest.of("New", source.tensors(), bucket_bytes)
    for version in range(2):
        trained.tensors["a"] += 1
        found = assembled(source, manifest, list(range(len(manifest.buckets))))
        assert trained.passes == version + 2
        assert found.keys() == SHAPES.keys()
        for name, tensor in trained.tensors.items():
            assert torch.equal(found[name], tensor.to(found[name].dtype)), name
    source.close()


def test_a_bucket_can_be_read_again() -> None:
    """Any order of buckets gives the same bytes; it costs another pass."""
    trained = Trained()
    source = ExportedSource(trained.export, model="New")
    manifest = Manifest.of("New", source.tensors(), 1)
    found = assembled(source, manifest, [2, 0, 3, 3])
    assert all(torch.equal(tensor, trained.tensors[name]) for name, tensor in found.items())
    source.close()


def test_an_exporter_that_changes_its_mind_is_refused() -> None:
    """Other names or shapes than before would be served under the old ones' places."""
    trained = Trained()
    source = ExportedSource(trained.export, model="New")
    manifest = Manifest.of("New", source.tensors())
    trained.tensors["b"] = torch.zeros(3)
    with pytest.raises(LayoutMismatch, match=r"'b' was exported with shape \(2,\)"):
        assembled(source, manifest, [0])
    del trained.tensors["b"]
    with pytest.raises(LayoutMismatch, match="ended without"):
        assembled(source, manifest, [0])
    source.close()


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": torch.zeros(3, 4, dtype=torch.int64)}, "'a' was exported as torch.float32, and now as torch.int64"),
        ({"count": torch.tensor([7.9])}, "'count' was exported as torch.int64, and now as torch.float32"),
        ({"e": torch.zeros(1)}, "'e' was not exported before"),
    ],
)
def test_no_pass_casts_or_drops_what_the_first_did_not(
    change: dict[str, torch.Tensor], words: str, bucket_bytes: int
) -> None:
    """Also what comes after the last tensor that is waited for."""
    trained = Trained()
    source = ExportedSource(trained.export, model="New", dtype=torch.bfloat16)
    manifest = Manifest.of("New", source.tensors(), bucket_bytes)
    trained.tensors |= change
    with pytest.raises(LayoutMismatch, match=words):
        assembled(source, manifest, list(range(len(manifest.buckets))))
    source.close()


def test_a_tensor_that_comes_twice_is_refused() -> None:
    """Neither of the two is the right one, in the first pass or a later."""
    trained = Trained()
    source = ExportedSource(trained.export, model="New")

    def twice() -> Iterator[tuple[str, torch.Tensor]]:
        yield from trained.export()
        yield "a", torch.zeros(3, 4)

    source._export = twice
    with pytest.raises(LayoutMismatch, match="'a' was exported twice"):
        assembled(source, Manifest.of("New", source.tensors()), [0])
    source.close()
    with pytest.raises(LayoutMismatch, match="'a' was exported twice"):
        ExportedSource(twice, model="New")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_eight_bits_without_their_scale_are_refused(dtype: torch.dtype | None) -> None:
    """Cast or not: the values are not the weights."""
    trained = Trained()
    trained.tensors["b"] = torch.ones(2).to(torch.float8_e4m3fn)
    with pytest.raises(UnknownParameter, match=r"'b' \(2,\) \(float8_e4m3fn\): its scale"):
        ExportedSource(trained.export, model="New", dtype=dtype)


def test_nothing_is_served_in_a_dtype_that_loses_it() -> None:
    """Fractions would be gone."""
    with pytest.raises(UnsupportedModel, match=r"'int8': .* bfloat16, float16, float32, float64"):
        ExportedSource(Trained().export, model="New", dtype=torch.int8)


def test_whatever_an_exporter_raises_is_a_sources_error() -> None:
    """At the start and in a later pass; its own error is the cause."""
    trained = Trained()

    def unmapped() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()
        raise KeyError("linear_qkv")

    with pytest.raises(SourceError, match="KeyError: 'linear_qkv'") as told:
        ExportedSource(unmapped, model="New")
    assert isinstance(told.value.__cause__, KeyError)
    source = ExportedSource(trained.export, model="New")
    source._export = unmapped
    with pytest.raises(AssemblyFailed, match="KeyError: 'linear_qkv'"):
        assembled(source, Manifest.of("New", source.tensors()), [0])
    source.close()


def nothing() -> Iterator[tuple[str, torch.Tensor]]:
    yield from ()


def complex_numbers() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.zeros(1, dtype=torch.complex64)


@pytest.mark.parametrize(("export", "part"), [(nothing, "no tensors"), (complex_numbers, "complex64")])
def test_what_cannot_be_served_is_refused_at_the_start(export: Exporter, part: str) -> None:
    """Before any engine hears of it."""
    with pytest.raises(UnsupportedModel, match=part):
        ExportedSource(export, model="New")


def test_an_exporter_that_breaks_off_ends_the_assembly() -> None:
    """What torch raises for a lost peer inside the exporter is the source's own error."""
    trained = Trained()
    source = ExportedSource(trained.export, model="New")

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", trained.tensors["a"]
        raise RuntimeError("connection closed by peer")

    source._export = broken
    with pytest.raises(AssemblyFailed, match="connection closed by peer"):
        assembled(source, Manifest.of("New", source.tensors()), [0])
    source.close()


def test_megatron_bridge_is_asked_for_tensors_where_they_are() -> None:
    """No copy to the CPU, and no progress bar of its own."""

    class FakeBridge:
        def export_hf_weights(
            self, model: object, *, cpu: bool, show_progress: bool
        ) -> Iterator[tuple[str, torch.Tensor]]:
            assert (cpu, show_progress) == (False, False)
            yield "weight", next(model[0].parameters())  # type: ignore[index]

    model = torch.nn.Linear(2, 2, bias=False)
    source = ExportedSource(bridge_exporter(FakeBridge(), [model]), model="New")
    found = assembled(source, Manifest.of("New", source.tensors()), [0])
    assert torch.equal(found["weight"], model.weight)
    source.close()


def padded_vocabulary(rows: int = 10) -> dict[str, torch.Tensor]:
    """An embedding and an output layer with rows for tokens that no tokenizer has."""
    weights = {"model.embed_tokens.weight": (rows, 2), "model.norm.weight": (2,), "lm_head.weight": (10, 2)}
    return {name: torch.rand(shape) for name, shape in weights.items()}


def test_the_padding_of_a_vocabulary_is_cut_off() -> None:
    """Of the embedding and the output layer, in every pass; everything else is served as it is exported."""
    weights = padded_vocabulary()
    source = ExportedSource(lambda: iter(weights.items()), model="New", vocab_size=7)
    shapes = {spec.name: spec.shape for spec in source.tensors()}
    assert shapes == {"model.embed_tokens.weight": (7, 2), "model.norm.weight": (2,), "lm_head.weight": (7, 2)}
    manifest = Manifest.of("New", source.tensors(), 1 << 20)
    found = assembled(source, manifest, [0])
    assert all(torch.equal(found[name], weights[name][: shapes[name][0]]) for name in weights)
    source.close()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"model.norm.weight": torch.rand(20, 2)}, "yields no embedding: cut it in the exporter"),
        (padded_vocabulary(6), r"'model\.embed_tokens\.weight' has 6 rows, fewer than vocab_size=7"),
        (padded_vocabulary(12), r"'model\.embed_tokens\.weight' of 12 rows, 'lm_head\.weight' of 10 rows"),
    ],
)
def test_a_vocabulary_that_cannot_be_cut_is_refused(weights: dict[str, torch.Tensor], words: str) -> None:
    """Nothing to cut, too few rows, or two tensors that were padded differently."""
    with pytest.raises(LayoutMismatch, match=words):
        ExportedSource(lambda: iter(weights.items()), model="New", vocab_size=7)
