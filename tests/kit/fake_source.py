"""A training group of threads: ranks that agree and assemble like the real ones, and fail when they are told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.trainer_agent.source import AssemblyFailed


class FakeGroup:
    """What the ranks share: one barrier, and the root's last word."""

    def __init__(self, size: int, timeout_s: float = 5.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._word = b""
        self._words: dict[int, bytes] = {}

    def meet(self) -> None:
        """Wait for all ranks; a group that broke once stays broken, like a real one."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise AssemblyFailed("a rank did not come") from error

    def speak(self, blob: bytes | None) -> bytes:
        """The root's `blob` on every rank."""
        if blob is not None:
            self._word = blob
        self.meet()
        heard = self._word
        self.meet()
        return heard

    def gather(self, rank: int, blob: bytes) -> list[bytes]:
        """What every rank passed."""
        self._words[rank] = blob
        self.meet()
        heard = [self._words[each] for each in range(self.size)]
        self.meet()
        return heard

    def break_up(self) -> None:
        """As if a rank had died."""
        self._barrier.abort()


class FakeSource:
    """One rank of a group whose root holds all tensors. Satisfies `Source`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], group: FakeGroup | None = None, rank: int = 0) -> None:
        self.weights = dict(tensors)
        self.group = group or FakeGroup(1)
        self.rank = rank
        self.model = "Qwen3ForCausalLM"
        self.device = torch.device("cpu")
        self.assembled: list[int] = []
        self.agreed = 0
        self.before_assembly: Callable[[int], None] = lambda _index: None
        """Called with the number of buckets assembled so far; may raise."""

    @property
    def root(self) -> bool:
        return self.rank == 0

    def tensors(self) -> Sequence[TensorSpec]:
        return [
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self.weights.items()
        ]

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        assert (out is not None) == self.root
        try:
            self.before_assembly(len(self.assembled))
        except Exception:
            self.group.break_up()
            raise
        self.assembled.append(index)
        if out is not None:
            packed = pack(manifest, index, self.weights)
            out[: packed.numel()].copy_(packed)
        self.group.meet()

    def agree(self, blob: bytes | None) -> bytes:
        assert (blob is not None) == self.root
        self.agreed += 1
        return self.group.speak(blob)


class StagedSource(FakeSource):
    """One rank of a pipeline: the layers are divided among the ranks in order. Satisfies `PipelineSource`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], group: FakeGroup | None = None, rank: int = 0) -> None:
        super().__init__(tensors, group, rank)
        self.gathered = 0
        """Buckets that were assembled of all ranks' tensors."""

    def stage_of(self, name: str) -> int:
        layers = 1 + max(int(each.split(".")[2]) for each in self.weights if ".layers." in each)
        if ".layers." in name:
            return int(name.split(".")[2]) * self.group.size // layers
        return 0 if "embed" in name else self.group.size - 1

    def roots(self) -> Sequence[int]:
        return [self.stage_of(spec.name) for spec in self.tensors()]

    def collect(self, blob: bytes) -> Sequence[bytes]:
        return self.group.gather(self.rank, blob)

    def assemble(
        self, manifest: Manifest, index: int, out: torch.Tensor | None, roots: Sequence[int] | None = None
    ) -> None:
        if roots is None:
            self.gathered += 1
            super().assemble(manifest, index, out)
            return
        assert (out is not None) == (roots[index] == self.rank)
        assert {self.stage_of(spec.name) for spec in manifest.tensors_of(index)} == {roots[index]}
        if out is not None:
            self.before_assembly(len(self.assembled))
            self.assembled.append(index)
            packed = pack(manifest, index, self.weights)
            out[: packed.numel()].copy_(packed)


def pipeline_of(tensors: Mapping[str, torch.Tensor], size: int, timeout_s: float = 5.0) -> list[FakeSource]:
    """Sources of one group, a stage each."""
    group = FakeGroup(size, timeout_s)
    return [StagedSource(tensors, group, rank) for rank in range(size)]


def group_of(tensors: Mapping[str, torch.Tensor], size: int, timeout_s: float = 5.0) -> list[FakeSource]:
    """Sources of one group, the root first."""
    group = FakeGroup(size, timeout_s)
    return [FakeSource(tensors, group, rank) for rank in range(size)]


def pack(manifest: Manifest, index: int, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Bucket `index` as it travels."""
    parts = [weights[spec.name].contiguous().reshape(-1).view(torch.uint8) for spec in manifest.tensors_of(index)]
    return torch.cat(parts)


def tiny_qwen3(seed: int = 0, layers: int = 2) -> dict[str, torch.Tensor]:
    """Tensors named and shaped like a small untied Qwen3, in bfloat16."""
    hidden, ffn, heads, kv, head_dim, vocabulary = 16, 24, 4, 2, 8, 100
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (heads * head_dim, hidden),
            at + "self_attn.k_proj.weight": (kv * head_dim, hidden),
            at + "self_attn.v_proj.weight": (kv * head_dim, hidden),
            at + "self_attn.o_proj.weight": (hidden, heads * head_dim),
            at + "self_attn.q_norm.weight": (head_dim,),
            at + "self_attn.k_norm.weight": (head_dim,),
            at + "mlp.gate_proj.weight": (ffn, hidden),
            at + "mlp.up_proj.weight": (ffn, hidden),
            at + "mlp.down_proj.weight": (hidden, ffn),
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
