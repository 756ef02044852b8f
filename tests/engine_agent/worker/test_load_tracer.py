"""What a loader does, recorded: toy loaders, one for each thing that a loader may do with a tensor."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Thread

import numpy as np
import pytest
import torch

from weightbus.dataplane.errors import NotTraceable
from weightbus.dataplane.reshard.load_trace import LoadTrace, NotCopiedCause
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.engine_agent.worker.load_tracer import NamedTensors, trace_load
from weightbus.engine_agent.worker.model_tensors import ModelTensors

Load = Callable[["Model", dict[str, torch.Tensor]], None]


class Model(torch.nn.Module):
    """A few parameters, a buffer, an attribute, and somebody's loader."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(12, 8, dtype=torch.bfloat16), requires_grad=False)
        self.wide = torch.nn.Parameter(torch.zeros(8, 6), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.derived = torch.zeros(6, 8, dtype=torch.bfloat16)
        self.factor = 0.0
        self.kept = [torch.zeros(1)]
        self.named: dict[str, object] = {}
        self.register_buffer("table", torch.zeros(4, 4))
        self._load = load

    def load_weights(self, weights: NamedTensors) -> None:
        """Like SGLang's."""
        self._load(self, dict(weights))


SPECS = (
    TensorSpec("a", "bfloat16", (6, 8)),
    TensorSpec("b", "bfloat16", (6, 8)),
    TensorSpec("c", "bfloat16", (1,)),
    TensorSpec("d", "float32", (6, 8)),
)


def both_halves(model: Model, weights: dict[str, torch.Tensor]) -> None:
    """Two tensors make one parameter."""
    for at, name in enumerate(("a", "b")):
        if name in weights:
            model.fused.data.narrow(0, 6 * at, 6).copy_(weights[name])


def check(load: Load) -> tuple[LoadTrace, Model]:
    """Record, and prove: nothing was written, and a replay gives what the loader gives."""
    model = Model(load)
    held = ModelTensors(model)
    before = [tensor.clone() for tensor in held.tensors]
    recording = trace_load(model, model.load_weights, SPECS, rank=0)
    assert all(torch.equal(a, b) for a, b in zip(before, ModelTensors(model).tensors, strict=True))
    torch.manual_seed(0)
    fresh = {spec.name: torch.randn(spec.shape).to(getattr(torch, spec.dtype)) for spec in SPECS}
    replay(recording, fresh, model)
    replayed = [tensor.clone() for tensor in ModelTensors(model).tensors]
    oracle = Model(load)
    oracle.load_weights(iter(fresh.items()))
    assert all(torch.equal(a, b) for a, b in zip(replayed, ModelTensors(oracle).tensors, strict=True))
    return recording, model


def replay(recording: LoadTrace, tensors: dict[str, torch.Tensor], model: Model) -> None:
    live = ModelTensors(model).tensors
    for row in range(len(recording.copies)):
        piece = recording.copies.at(row)
        cut = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
        target = live[piece.view.storage]
        place = target.storage_offset() + piece.view.offset
        torch.as_strided(target, piece.box.shape, piece.view.strides, place).copy_(tensors[piece.tensor][cut])
    for each in recording.constants:
        cut = tuple(slice(a, b) for a, b in zip(each.box.start, each.box.stop, strict=True))
        live[each.target][cut].fill_(each.value)
    names = [recording.tensors[each.tensor].name for each in recording.loaded]
    if names:
        model.load_weights(iter([(name, tensors[name].clone()) for name in names]))


def loaded(recording: LoadTrace) -> dict[str, NotCopiedCause]:
    return {recording.tensors[each.tensor].name: each.cause for each in recording.loaded}


def test_slices_of_a_fused_parameter_are_copies() -> None:
    """The usual thing: boxes of tensors, boxes of parameters, and lists of what was not asked for or not written."""
    recording, _ = check(both_halves)

    assert len(recording.copies) == 2
    assert recording.loaded == ()
    assert [SPECS[index].name for index in recording.unread] == ["c", "d"]
    assert {recording.targets[patch.target].name for patch in recording.unwritten} == {"wide", "scale"}


def test_chains_of_movements_are_composed() -> None:
    """Kept aside, joined, split, transposed, packed, and copied on into an attribute: still copies of the source."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        joined = torch.cat([weights["a"].t(), weights["b"].t()], dim=1)
        model.fused.data.copy_(joined.clone().t())
        heads = model.fused.view(3, 4, 8)[:, 1:3]
        model.derived.copy_(heads.transpose(1, 2).contiguous().transpose(1, 2).reshape(6, 8))

    recording, _ = check(load)

    assert recording.loaded == ()
    assert {recording.targets[index].name for index in recording.copies.storage.tolist()} == {"fused", "derived"}


@pytest.mark.parametrize(
    "moved",
    [
        lambda a, _: a.index_select(0, torch.tensor([4, 5, 0, 0, 2, 1])),
        lambda a, _: a.index_select(-1, torch.tensor([1, 3, 5, 7, 0, 2, 4, 6])),
        lambda a, _: a[torch.tensor([-1, 0, -2, 1, 2, 3])],
        lambda a, _: a[:, torch.tensor([7, 1, 2, 3, 0, 0, 5, 4])],
        lambda a, _: a.flip(1),
        lambda a, b: torch.stack([a[:3], b[:3]], dim=1).reshape(6, 8),
        lambda a, b: torch.stack([a[:, :4], b[:, 4:]], dim=-1).reshape(6, 8),
        lambda a, _: a[1:3].repeat(3, 1),
        lambda a, _: a[:, :4].repeat(1, 2),
        lambda a, _: a[2:3].expand(6, 8),
        lambda a, _: torch.nn.functional.pad(a[:4, :5], (1, 2, 2, 0), value=2.0),
        lambda a, b: torch.cat((a[:, :3], b[:, 2:7]), -1),
    ],
)
def test_every_movement_is_copies(moved: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Reordered, doubled, interleaved, padded: each element still has one place to come from, or one value."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        model.fused.data[6:].copy_(moved(weights["a"], weights["b"]))

    recording, _ = check(load)

    assert recording.loaded == ()
    assert int(recording.copies.boxes.sizes.sum()) + sum(each.box.size for each in recording.constants) == 48


def cast_once(model: Model, weights: dict[str, torch.Tensor]) -> None:
    """A transposed float32 tensor is stored as bfloat16, and the other way round."""
    model.fused.data[:6].copy_(weights["d"])
    model.wide.data.copy_(weights["a"].to(torch.float32).t())


def cast_there_and_back(model: Model, weights: dict[str, torch.Tensor]) -> None:
    """bfloat16 loses nothing in float32."""
    model.fused.data[:6].copy_(weights["a"].float())
    model.derived.copy_(weights["b"].to(torch.float32).contiguous().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("load", "dtypes"), [(cast_once, {"bfloat16", "float32"}), (cast_there_and_back, {"bfloat16"})]
)
def test_casts_are_copies(load: Load, dtypes: set[str]) -> None:
    """The piece says of which type its source is, and its strides say how that lies."""
    recording, _ = check(load)

    assert recording.loaded == ()
    assert {recording.copies.at(row).dtype for row in range(len(recording.copies))} == dtypes


@pytest.mark.parametrize("filled", [False, True])
def test_memory_that_is_read_in_elements_of_another_size_is_a_calculation(filled: bool) -> None:
    """The halves of a float32 are no elements of its tensor, nor the value that it was filled with."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        both_halves(model, {name: weights[name] for name in ("b",) if name in weights})
        if "d" in weights:
            own = weights["d"].clone()
            if filled:
                own.fill_(1.1)
            model.fused.data[:6].copy_(own.view(torch.bfloat16)[:, 1::2])

    assert loaded(check(load)[0]) == {"d": NotCopiedCause.COMPUTED}


def test_a_cast_by_way_of_a_narrower_type_is_a_calculation() -> None:
    """float32 stored as float32 after a stop at bfloat16 has lost bits: no cast says that."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        model.wide.data.copy_(weights["d"].to(torch.bfloat16).float().t())

    assert loaded(check(load)[0]) == {"d": NotCopiedCause.COMPUTED}


def test_arithmetic_sends_all_its_tensors_through_the_loader() -> None:
    """A derived attribute takes the tensor that it was derived from along, and its plain copies with it."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        both_halves(model, weights)
        if "a" in weights:
            model.derived.copy_(weights["a"] * 2)

    recording, _ = check(load)

    assert loaded(recording) == {"a": NotCopiedCause.COMPUTED}
    assert [recording.copies.at(row).tensor for row in range(len(recording.copies))] == ["b"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_source_that_is_changed_in_place_is_calculated(whole: bool) -> None:
    """Gemma's loader adds one to its norms where they are: what is stored then is not the tensor that was served."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        both_halves(model, {name: weights[name] for name in ("b",) if name in weights})
        if "a" in weights:
            part = weights["a"] if whole else weights["a"][2:4]
            part += 1.0
            model.fused.data[:6].copy_(weights["a"])

    recording, _ = check(load)

    assert loaded(recording) == {"a": NotCopiedCause.COMPUTED}
    assert {recording.copies.at(row).tensor for row in range(len(recording.copies))} == {"b"}


def test_a_source_that_is_written_over_is_not_copied_there() -> None:
    """gpt-oss's loader zeroes a bias on all ranks but one, in place; the rest of the tensor is copied as it is."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        weights["a"].t()[2:5].zero_()
        weights["a"][5].copy_(weights["b"][0])
        model.fused.data[:6].copy_(weights["a"])
        weights["d"].zero_()
        model.wide.data.copy_(weights["d"].t())

    recording, _ = check(load)

    assert recording.loaded == ()
    assert {recording.targets[each.target].name for each in recording.constants} == {"fused", "wide"}
    assert [SPECS[index].name for index in recording.dropped] == ["d"]


def test_what_is_filled_by_another_shape_is_a_constant() -> None:
    """Rows that the parameter does not have, over what was copied before: the later write counts there as anywhere."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        model.fused.data[:6].copy_(weights["a"])
        model.fused.data.view(-1)[:36].view(3, 12).zero_()

    recording, _ = check(load)

    assert recording.loaded == ()
    assert sum(each.box.size for each in recording.constants) == 36
    assert int(recording.copies.boxes.sizes.sum()) == 12


def test_a_constant_in_places_that_are_no_boxes_takes_along_what_it_may_have_written_over() -> None:
    """Every fifth element of rows of eight: what was copied there before goes through the loader, as the constant."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        if "a" in weights:
            model.fused.data[:6].copy_(weights["a"])
            model.fused.data.as_strided((19,), (5,)).zero_()
        model.wide.data.copy_(weights["d"].t() if "d" in weights else model.wide.data)

    assert loaded(check(load)[0]) == {"a": NotCopiedCause.SCATTERED}


def test_values_that_decide_are_read() -> None:
    """Whatever the loader does with a number that it read, it does with real tensors."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        both_halves(model, {name: weights[name] for name in ("b",) if name in weights})
        if "a" in weights and weights["a"].abs().max() > 1:
            model.fused.data[:6].copy_(weights["a"])

    assert loaded(check(load)[0]) == {"a": NotCopiedCause.READ}


@pytest.mark.parametrize("way", ["numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "__cuda_array_interface__"])
def test_ways_out_of_torch_are_reads(way: str) -> None:
    """A loader could do anything with an address. Afterwards the ways are what they were."""
    before = getattr(torch.Tensor, way)

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        if "d" in weights:
            taken = getattr(weights["d"], way, None)
            _ = taken() if callable(taken) else taken
            model.wide.data.copy_(weights["d"].t())

    assert loaded(check(load)[0]) == {"d": NotCopiedCause.READ}
    assert getattr(torch.Tensor, way) is before


def test_an_array_of_a_tensor_is_a_read() -> None:
    """``np.asarray`` asks the tensor, not torch."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        if "d" in weights and np.asarray(weights["d"].float()).size:
            model.wide.data.copy_(weights["d"].t())

    assert loaded(check(load)[0]) == {"d": NotCopiedCause.READ}


def test_other_threads_may_take_addresses() -> None:
    """Only what the loader's thread does is followed; a server has more of them."""
    asked: Queue[torch.Tensor | None] = Queue()
    answered: Queue[int] = Queue()

    def answer() -> None:
        while (tensor := asked.get()) is not None:
            answered.put(tensor.data_ptr())

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        if "d" in weights:
            asked.put(model.wide)
            assert answered.get(timeout=30)
            model.wide.data.copy_(weights["d"].t())

    other = Thread(target=answer)
    other.start()
    found = loaded(check(load)[0])
    asked.put(None)
    other.join(30)

    assert found == {}


def test_a_number_that_is_stored_as_it_is_is_a_copy() -> None:
    """``fill_(x.item())`` is how loaders copy scales of one element."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        model.scale.data[1:].fill_(weights["c"].item())

    recording, _ = check(load)

    assert recording.loaded == ()
    assert len(recording.copies) == 2


@pytest.mark.parametrize(
    "put",
    [
        lambda scale, c: scale.fill_(c.mul_(2).item()),
        lambda scale, c: scale.fill_(c.item() * 2),
        lambda scale, c: scale.fill_(c.item() if c.item() < 1 else c.item() / 2),
        lambda scale, c: scale.fill_(max(c.item(), 0.25)),
        lambda scale, c: scale.fill_(c.item() or 1.0),
        lambda scale, c: scale.fill_(c.item() if round(c.item(), 6) else 0.0),
        lambda scale, c: scale.fill_(c.item() if int(c.item()) == 0 else 1.0),
        lambda scale, c: scale.fill_(c.item() if c.item() == 1.0 else 0.0),
        lambda scale, c: scale.copy_(torch.full((3,), c.item())),
        lambda scale, c: scale.fill_(float(c)),
        lambda scale, c: scale.fill_(bool(c)),
        lambda scale, c: scale.fill_(int(c)),
    ],
)
def test_a_number_that_is_not_stored_as_it_is_is_a_read(put: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """Changed, compared, made a tensor or a number of Python's own: other values may give another one."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        if "c" in weights:
            put(model.scale.data, weights["c"])

    assert loaded(check(load)[0]) == {"c": NotCopiedCause.READ}


@pytest.mark.parametrize(
    "use",
    [
        lambda wide, number: wide.fill_(math.exp(number)),
        lambda wide, number: wide.fill_(float(str(number)) * 2),
        lambda wide, number: wide.copy_(torch.full((8, 6), number)),
        lambda wide, number: wide.fill_(1.0).mul_(number),
    ],
)
def test_a_number_that_is_stored_and_used_otherwise_too_is_loaded(use: Callable[[torch.Tensor, float], object]) -> None:
    """What is made of it unseen would be put into the model in every round, as a constant that nothing proves."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        if "c" in weights:
            number = weights["c"].item()
            model.scale.data.fill_(number)
            use(model.wide.data, number)

    assert set(loaded(check(load)[0])) == {"c"}


@pytest.mark.parametrize("read", [lambda tensor: tensor.item() * 2, lambda tensor: float(tensor.max())])
def test_what_every_layer_reads_is_found_in_a_few_runs(read: Callable[[torch.Tensor], float]) -> None:
    """A run for each of a hundred layers would keep a server standing for minutes."""
    specs = [TensorSpec(f"layers.{at}.scale", "float32", (1,)) for at in range(100)]
    specs += [TensorSpec(f"layers.{at}.weight", "bfloat16", (2, 4)) for at in range(100)]
    runs = [0]

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(100), requires_grad=False)
            self.weight = torch.nn.Parameter(torch.zeros(100, 2, 4, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: NamedTensors) -> None:
            runs[0] += 1
            for name, tensor in weights:
                at, kind = int(name.split(".")[1]), name.split(".")[2]
                if kind == "scale":
                    self.scale.data[at].fill_(read(tensor))
                else:
                    self.weight.data[at].copy_(tensor)

    model = Layers()

    recording = trace_load(model, model.load_weights, specs, rank=0)

    assert {each.tensor for each in recording.loaded} == set(range(100))
    assert {each.cause for each in recording.loaded} == {NotCopiedCause.READ}
    assert len(recording.copies) == 100
    assert runs[0] <= 16


def test_a_number_that_the_model_keeps_is_not_kept_of_a_recording() -> None:
    """Scales are stored twice, in a parameter and as a number for kernels: both are the real ones after a round."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        if "c" in weights:
            value = weights["c"].item()
            model.scale.data.fill_(value)
            model.factor = value

    recording, model = check(load)

    assert loaded(recording) == {"c": NotCopiedCause.REBOUND}
    assert type(model.factor) is float
    assert model.factor == model.scale[0].item()


def test_padding_is_a_constant() -> None:
    """Zeros that the loader writes are part of the recording."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        model.fused.data[:6].copy_(weights["a"])
        model.fused.data[6:].zero_()
        model.wide.data.copy_(torch.nn.functional.pad(weights["d"].t()[:, :4], (0, 2), value=1.0))

    recording, _ = check(load)

    assert {(recording.targets[each.target].name, each.value) for each in recording.constants} == {
        ("fused", 0.0),
        ("wide", 1.0),
    }
    assert [recording.targets[patch.target].name for patch in recording.unwritten] == ["scale"]


def test_a_rank_beyond_the_end_writes_nothing() -> None:
    """What is cut into parts of a fixed size may leave the last rank with none: SGLang copies no rows there."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        both_halves(model, weights)
        model.wide.data[8:].copy_(weights["d"].t()[8:])
        model.wide.data[8:].fill_(1.0)

    recording, _ = check(load)

    assert [SPECS[index].name for index in recording.unread] == ["c"]
    assert [SPECS[index].name for index in recording.dropped] == ["d"]


def test_what_is_written_last_counts() -> None:
    """Two tensors in one place: the later one is the copy, and the place is named."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        model.fused.data[:6].copy_(weights["a"])
        model.fused.data[4:10].copy_(weights["b"])

    recording, _ = check(load)

    assert [patch.box.start for patch in recording.rewritten] == [(4, 0)]
    assert int(recording.copies.boxes.sizes.sum()) == 80


def replace_the_attribute(model: Model, tensor: torch.Tensor) -> None:
    model.derived = tensor.to(torch.bfloat16).clone()


def replace_the_memory(model: Model, tensor: torch.Tensor) -> None:
    model.scale.data = tensor[0, :3].clone()


@pytest.mark.parametrize("rebind", [replace_the_attribute, replace_the_memory])
def test_a_tensor_that_replaces_another_is_put_back(rebind: Callable[[Model, torch.Tensor], None]) -> None:
    """The model keeps its tensors and memory, for which kernels were captured; the source goes through the loader."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        both_halves(model, weights)
        if "d" in weights:
            rebind(model, weights["d"])

    model = Model(load)
    kept, place = model.derived, model.scale.data_ptr()

    recording = trace_load(model, model.load_weights, SPECS, rank=0)

    assert model.derived is kept
    assert model.scale.data_ptr() == place
    assert loaded(recording) == {"d": NotCopiedCause.REBOUND}


@pytest.mark.parametrize("way", ["list", "dictionary", "deep", "new", "clone"])
def test_a_tensor_that_the_model_keeps_in_a_container_goes_through_the_loader(way: str) -> None:
    """No copy brings it there; and nothing without contents stays in the model."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        both_halves(model, weights)
        if "d" not in weights:
            return
        match way:
            case "list":
                model.kept[0] = weights["d"]
            case "dictionary":
                model.named["d"] = weights["d"].t()
            case "deep":
                model.named["more"] = [{"d": weights["d"]}]
            case "clone":
                model.kept.append(weights["d"].to(torch.bfloat16).clone())
            case _:
                model.__dict__["fresh"] = [weights["d"]]

    model = Model(load)

    recording = trace_load(model, model.load_weights, SPECS, rank=0)

    assert loaded(recording) == {"d": NotCopiedCause.REBOUND}
    assert ([each.tolist() for each in model.kept], model.named, hasattr(model, "fresh")) == ([[0.0]], {}, False)


def test_a_list_of_the_models_own_tensors_is_nothing_of_a_source() -> None:
    """Loaders write down what they have loaded."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        both_halves(model, weights)
        model.kept.append(model.fused)

    assert loaded(check(load)[0]) == {}


def test_a_partner_goes_along() -> None:
    """A tensor that is kept aside until one comes that was left out is loaded together with it."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        kept = weights["a"].clone() if "a" in weights else None
        if "b" in weights and weights["b"].sum() is not None and kept is not None:
            weights["b"].tolist()
            model.fused.data.copy_(torch.cat([kept, weights["b"]]))

    recording, _ = check(load)

    assert loaded(recording) == {"a": NotCopiedCause.PARTNER, "b": NotCopiedCause.READ}
    assert recording.dropped == ()


def test_a_tensor_of_which_nothing_is_kept_is_named() -> None:
    """Read, and then forgotten: the stock path forgets it too."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        both_halves(model, weights)
        weights["d"].clone()

    recording, _ = check(load)

    assert [SPECS[index].name for index in recording.dropped] == ["d"]


def test_memory_without_an_owner_is_no_target() -> None:
    """What is written to memory outside of the model cannot be followed there."""
    elsewhere = torch.zeros(6, 8)

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        both_halves(model, weights)
        if "d" in weights:
            elsewhere.copy_(weights["d"])

    model = Model(load)

    assert loaded(trace_load(model, model.load_weights, SPECS, rank=0)) == {"d": NotCopiedCause.UNKNOWN_TARGET}


def test_tied_parameters_are_one_target() -> None:
    """Two names of one memory: one target, with an alias."""
    model = Model(both_halves)
    model.tied = model.fused

    recording = trace_load(model, model.load_weights, SPECS, rank=0)

    assert [target.aliases for target in recording.targets if target.name == "fused"] == [("tied",)]


def test_pools_of_threads_are_followed() -> None:
    """DeepSeek's loader hands its copies to threads, where torch's modes do not reach."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        with ThreadPoolExecutor() as pool:
            pool.submit(both_halves, model, weights).result()

    assert len(check(load)[0].copies) == 2


def test_threads_of_its_own_are_refused() -> None:
    """They would write to the live model unseen."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        Thread(target=both_halves, args=(model, weights)).start()

    model = Model(load)

    with pytest.raises(NotTraceable, match="starts a thread"):
        trace_load(model, model.load_weights, SPECS, rank=0)


def test_a_calculation_after_the_last_tensor_names_its_sources() -> None:
    """A post-load step works on parameters: what it makes of them comes from their tensors."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        both_halves(model, weights)
        if "a" in weights and "b" in weights:
            model.derived.copy_(model.fused[3:9].float().exp())

    assert loaded(check(load)[0]) == {"a": NotCopiedCause.COMPUTED, "b": NotCopiedCause.COMPUTED}


def test_a_loader_that_reads_what_no_tensor_is_in_is_refused() -> None:
    """Its run ends there: what it would have done afterwards is not known, and no tensor can be left out for it."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        model.fused.data[:6].copy_(weights["a"])
        if model.table.sum().item() == 0:
            model.fused.data[6:].copy_(weights["b"])

    model = Model(load)

    with pytest.raises(NotTraceable, match="_local_scalar_dense"):
        trace_load(model, model.load_weights, SPECS, rank=0)


def test_what_is_calculated_of_nothing_is_left_as_it_is() -> None:
    """It is in a list: no round writes it."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        both_halves(model, weights)
        model.scale.data.copy_(torch.arange(3))

    model = Model(load)

    recording = trace_load(model, model.load_weights, SPECS, rank=0)

    assert [recording.targets[patch.target].name for patch in recording.unwritten] == ["wide", "scale"]


def pickled(tensor: torch.Tensor) -> torch.Tensor:
    """By way of a file."""
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    found: torch.Tensor = torch.load(file)
    return found


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_that_torch_does_not_tell_of_goes_through_the_loader(
    copied: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A hollow tensor's contents would be taken for what the loader always writes there."""
    specs = (TensorSpec("a", "bfloat16", (6, 8)),)

    class Copying(Model):
        def load_weights(self, weights: NamedTensors) -> None:
            for _, tensor in weights:
                self.fused.data[:6].copy_(copied(tensor))

    model = Copying(both_halves)

    recording = trace_load(model, model.load_weights, specs, rank=0)

    assert [each.tensor for each in recording.loaded] == [0]
    assert recording.constants == ()


def test_a_recording_says_what_is_no_copy() -> None:
    """Operators have to see why rounds are slow, and what no round writes."""

    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        if "a" in weights:
            model.fused.data[:6].copy_(weights["a"])
        if "d" in weights:
            model.wide.data.copy_(weights["d"].t() + 1)

    told = check(load)[0].account

    assert told == (
        "4 tensors, 1 of them copies; through the engine's own loader: d (computed: aten.add.Tensor);"
        " not asked for: b, c; parts that are left as they are: fused[6..12, 0..8], scale[0..3]"
    )


def test_a_recording_survives_the_wire() -> None:
    """Encoded and decoded it is the same; of other tensors it is refused."""
    recording, _ = check(both_halves)

    assert LoadTrace.decode(recording.encode(), SPECS).digest() == recording.digest()
    with pytest.raises(Exception, match="other tensors"):
        LoadTrace.decode(recording.encode(), SPECS[1:])


def test_hollow_tensors_take_no_memory() -> None:
    """A terabyte of sources is recorded on this machine."""
    specs = tuple(TensorSpec(f"t{index}", "bfloat16", (2**20, 2**14)) for index in range(32))

    def load(model: Model, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            model.fused.data.copy_(tensor[:12, :8])

    model = Model(both_halves)

    recording = trace_load(model, lambda weights: load(model, iter(weights)), specs, rank=0)

    assert [recording.copies.at(row).tensor for row in range(len(recording.copies))] == ["t31"]
