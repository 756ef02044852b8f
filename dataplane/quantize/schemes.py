"""How weights are quantized, and which weights of a checkpoint are, by its ``quantization_config``. Pure, no torch.

A `Scheme` is a row of a table: which tensors one weight becomes, and which of its elements go into which. Its
arithmetic is elsewhere (quantize_tasks.py, quantize_triton.py). A weight of (rows, columns) becomes *parts*, each with
a cell: the elements of the weight behind one element of the part.

    scheme          parts                                             cell of the scale       defined by
    fp8-block       weight e4m3, weight_scale_inv float32             128 x 128, as set       DeepSeek-V3
    fp8-block-ue8m0 the same, every scale a power of two              128 x 128               DeepGEMM
    fp8-tensor      weight e4m3, weight_scale float32                 everything              compressed-tensors
    fp8-channel     weight e4m3, weight_scale                         a row                   compressed-tensors
    mxfp8           weight e4m3, weight_scale_inv uint8 exponents     1 x 32                  OCP MX, as SGLang rounds
    mxfp8-ct        weight e4m3, weight_scale uint8 exponents         1 x 32                  compressed-tensors
    int4            weight_packed int32, weight_scale, weight_shape   1 x group               compressed-tensors
    int4-asymmetric the same and weight_zero_point int32              1 x group               compressed-tensors

Values are quantized in the dtype in which the weight would be served otherwise: bfloat16 for a master in float32. So
the result does not depend on the rank that quantizes.

Where a NaN or an infinity is among the elements that share a scale, that scale is NaN (255 as an exponent), and an
engine makes NaN of all of them: lost weights are served as lost, as unquantized ones would be, and never as numbers.
Their elements are NaN where the format has one, and zero, with a zero point of zero, in four bits.

Of configs ``fp8`` and ``mxfp8`` (DeepSeek-V3, Qwen3-FP8) and ``compressed-tensors`` are understood. A config that
changes the meaning of the served numbers in an unknown way is refused with `UnknownScheme`: weights never pass
unquantized because a word was not known. A checkpoint's own files, where they are at hand, say which modules are
quantized; without them names decide, and a name that could be either is refused too.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta

from ..errors import DataplaneError
from ..tensors import Box, TensorSpec

PACKED: Final = 8
"""Elements of four bits in an int32, the first in the lowest bits."""


class UnknownScheme(DataplaneError):
    """The served checkpoint asks for an unsupported quantization: says what was found, what is known, what to do."""


class Element(enum.Enum):
    """The type of a quantized element."""

    E4M3 = "float8_e4m3fn"
    INT4 = "int4"


class Scaling(enum.Enum):
    """How a scale follows from the largest magnitude of its elements."""

    EXACT = "exact"
    """That magnitude becomes the largest number of the format, but for rounding."""
    UP = "power of two, rounded up"
    """The smallest power of two with which nothing saturates."""
    NEAREST = "power of two, as compressed-tensors rounds"
    """The same but where the magnitude is 1.75 times a power of two: there one more."""


class QuantizedPart(msgspec.Struct, frozen=True):
    """One of the tensors that a weight becomes."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    cell: tuple[int, int]
    """(rows, columns) of the weight behind one element; (0, 0) where no element of the weight matters."""

    def box(self, box: Box) -> Box:
        """The elements of this part that follow from `box` of the weight, which lies on the scheme's grain."""
        if not self.cell[0]:
            return Box.whole(self.shape)
        start = tuple(at // step for at, step in zip(box.start, self.cell, strict=True))
        stop = tuple(-(-at // step) for at, step in zip(box.stop, self.cell, strict=True))
        return Box(start, stop) if len(self.shape) == len(start) else Box.whole(self.shape)


class Scheme(msgspec.Struct, frozen=True):
    """A row of the module's table."""

    name: str
    element: Element
    weight: str
    """Suffix of the quantized elements; so `scale`."""
    scale: str
    block: tuple[int, int]
    """(rows, columns) that share a scale; 0 stands for all of them."""
    scale_dtype: str = ""
    """Empty for that of the weight."""
    scaling: Scaling = Scaling.EXACT
    symmetric: bool = True
    """False: with a zero point for each scale."""
    flat: tuple[int, ...] | None = None
    """The shape of the one scale, (1,) or (), of a scheme that has no more."""

    def objection(self, shape: Sequence[int]) -> str:
        """Why a weight of `shape` cannot be quantized so; empty if it can."""
        if len(shape) != 2:
            return f"it has {len(shape)} axes, a matrix is expected"
        if not all(shape):
            return "it is empty"
        columns = self._block(shape)[1]
        if self.element is Element.INT4 and columns % PACKED:
            return f"its groups of {columns} columns do not fill words of {PACKED}"
        if self._divides and shape[1] % columns:
            return f"its {shape[1]} columns are not a multiple of the group of {columns}"
        if not self.symmetric and shape[0] % PACKED:
            return f"its {shape[0]} rows do not fill words of {PACKED} zero points"
        return ""

    def parts(self, spec: TensorSpec) -> tuple[QuantizedPart, ...]:
        """What the weight `spec` becomes, in the order in which `quantize` gives it: elements, scales, the rest."""
        rows, columns = self._block(spec.shape)
        grid = (-(-spec.shape[0] // rows), -(-spec.shape[1] // columns))
        scale = QuantizedPart(
            self.scale, self.scale_dtype or spec.dtype, grid if self.flat is None else self.flat, (rows, columns)
        )
        if self.element is Element.E4M3:
            return (QuantizedPart(self.weight, Element.E4M3.value, spec.shape, (1, 1)), scale)
        packed = QuantizedPart(self.weight, "int32", (spec.shape[0], spec.shape[1] // PACKED), (1, PACKED))
        shape = QuantizedPart("weight_shape", "int64", (2,), (0, 0))
        if self.symmetric:
            return (packed, scale, shape)
        zero = QuantizedPart("weight_zero_point", "int32", (grid[0] // PACKED, grid[1]), (PACKED * rows, columns))
        return (packed, scale, zero, shape)

    def grain(self, shape: Sequence[int]) -> tuple[int, int]:
        """(rows, columns) whose multiples can be quantized independently: no part crosses such a border."""
        rows, columns = self._block(shape)
        if self.element is Element.INT4:
            return rows if self.symmetric else rows * PACKED, lcm(columns, PACKED)
        return rows, columns

    def alone(self, box: Box, shape: Sequence[int]) -> bool:
        """True when the rank that holds `box` of a weight can quantize it without other ranks' values."""
        return all(
            start % step == 0 and (stop % step == 0 or stop == extent)
            for start, stop, step, extent in zip(box.start, box.stop, self.grain(shape), shape, strict=True)
        )

    @property
    def _divides(self) -> bool:
        """The format knows no last group that is shorter."""
        return self.element is Element.INT4 or self.scaling is Scaling.NEAREST or self.scale_dtype == "uint8"

    def _block(self, shape: Sequence[int]) -> tuple[int, int]:
        return (self.block[0] or shape[0], self.block[1] or shape[1])


def fp8_block(block: tuple[int, int], *, power_of_two: bool = False, scale: str = "weight_scale_inv") -> Scheme:
    """FP8 in blocks, as DeepSeek-V3 and Qwen3 are stored; `power_of_two` for ``scale_fmt: ue8m0``."""
    return Scheme(
        "fp8-block-ue8m0" if power_of_two else "fp8-block",
        Element.E4M3,
        "weight",
        scale,
        block,
        "float32",
        Scaling.UP if power_of_two else Scaling.EXACT,
    )


def fp8_tensor() -> Scheme:
    """FP8 with one scale."""
    return Scheme("fp8-tensor", Element.E4M3, "weight", "weight_scale", (0, 0), "float32", flat=(1,))


def fp8_channel() -> Scheme:
    """FP8 with a scale for each row."""
    return Scheme("fp8-channel", Element.E4M3, "weight", "weight_scale", (1, 0), "float32")


def mxfp8(*, compressed: bool = False) -> Scheme:
    """FP8 by 32 columns with exponents as scales; `compressed` as compressed-tensors names and rounds them."""
    if compressed:
        return Scheme("mxfp8-ct", Element.E4M3, "weight", "weight_scale", (1, 32), "uint8", Scaling.NEAREST)
    return Scheme("mxfp8", Element.E4M3, "weight", "weight_scale_inv", (1, 32), "uint8", Scaling.UP)


def int4(group: int, *, symmetric: bool) -> Scheme:
    """Packed integers of four bits; `group` columns share a scale, 0 for a row."""
    name = "int4" if symmetric else "int4-asymmetric"
    return Scheme(name, Element.INT4, "weight_packed", "weight_scale", (1, group), symmetric=symmetric)


SCHEMES: Final[tuple[Scheme, ...]] = (
    fp8_block((128, 128)),
    fp8_block((128, 128), power_of_two=True),
    fp8_tensor(),
    fp8_channel(),
    mxfp8(),
    mxfp8(compressed=True),
    int4(128, symmetric=True),
    int4(128, symmetric=False),
)
"""One of each kind: what tests go through, and messages name."""


_KNOWN: Final = (
    "known are fp8 (e4m3, in blocks or with one scale, dynamic activations), mxfp8, and compressed-tensors with fp8 by"
    " tensor, channel or block, mxfp8, or int4 packed"
)
_ADVICE: Final = "serve a checkpoint that is quantized so, or the plain one"

_LINEAR: Final = re.compile(
    r"(?!eh_proj$)(.*_proj|.*_proj_with_mqa|in_proj_(?:qkvz?|z)|[qkvo]|qkv|proj|wq_a|wq_b|wkv_a|wkv_b|wk|wq|wv|wo|w[123]|fc[123]?|linear\w*|dense\w*)"
)
"""Last part of the names of modules that are linear layers, and that SGLang quantizes unless it is told not to.

``eh_proj``, of prediction layers, is quantized in some models and not in others, DeepSeek's among them.
"""
_OTHER: Final = re.compile(
    r"(.*embed\w*|wte|wpe|.*norm\w*|ln_\w+|gate|router|shared_expert_gate|weights_proj|.*conv\w*|in_proj_ba|in_proj_[ab])"
)
"""... and of modules that it never quantizes: tables, norms, routers, small projections."""
_HEAD: Final = re.compile(r"(lm_head|head|output)")
"""An output layer: linear to compressed-tensors, never quantized by ``fp8``."""

_CLASS: Final = re.compile(r"(?!(?i:linear)$)[A-Z]\w*")
"""A class of modules as a target. Names do not tell which modules are of another one than ``Linear``."""
_WITH_ALL: Final = frozenset({(), (1,)})
"""Shapes of the one scale that a tensor has: new checkpoints and old ones."""
_PLAIN: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
_SCALES: Final = {"torch.float32": "float32", "torch.bfloat16": "bfloat16", "torch.float16": "float16"}
"""``scale_dtype`` of compressed-tensors, in the words of manifests."""

Block = tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=1)]]


class _Fp8(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    quant_method: str
    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    activation_scheme: Literal["dynamic"] = "dynamic"
    weight_block_size: Block | None = None
    scale_fmt: Literal["ue8m0", "float"] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    dequantize: bool = False
    weight_per_tensor: bool | None = None
    """transformers writes these; they say nothing about what is stored."""
    act_per_tensor: bool | None = None
    packed_modules_mapping: dict[str, list[str]] | None = None


class _Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """compressed-tensors' QuantizationArgs."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    block_structure: Block | None = None
    dynamic: bool | str = False
    actorder: str | bool | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    """Says nothing of zero points that are packed."""
    observer: str | None = None
    """This and the next say how scales were found once."""
    observer_kwargs: dict[str, Any] | None = None


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    targets: list[str]
    weights: _Weights | None = None
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class _Compressed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    quant_method: str = "compressed-tensors"
    format: str = ""
    config_groups: dict[str, _Group] = {}
    ignore: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    quantization_status: str | None = None
    global_compression_ratio: float | None = None
    version: str | None = None
    packed_modules_mapping: dict[str, list[str]] | None = None


class QuantizationRule(msgspec.Struct, frozen=True):
    """A scheme, and the modules that it is for: names, ``re:`` patterns, or a class of modules."""

    targets: tuple[str, ...]
    scheme: Scheme


class Quantization(msgspec.Struct, frozen=True):
    """A parsed ``quantization_config``."""

    method: str
    rules: tuple[QuantizationRule, ...]
    ignored: tuple[str, ...]
    """Modules that stay unquantized."""

    def scheme_of(self, weight: TensorSpec, stored: Mapping[str, TensorSpec] | None = None) -> Scheme | None:
        """The scheme of `weight`; None when it stays unquantized.

        `stored` are the tensors of the served checkpoint, where its files are at hand: a weight that is quantized there
        is quantized here, in the same dtypes. Raises `UnknownScheme` when it cannot be told, or cannot be done.
        """
        module, _, kind = weight.name.rpartition(".")
        scheme = None
        if kind == "weight":
            scheme = self._from_files(weight, module, stored) if stored else self._from_names(weight, module)
        elif self._are_experts(weight, module, stored):
            raise UnknownScheme(f"{weight.name!r} holds several experts in one tensor: publish them one by one")
        if scheme is None:
            _check_plain(weight, module, stored or {})
            return None
        objection = scheme.objection(weight.shape)
        if objection:
            raise UnknownScheme(
                f"{weight.name!r} {weight.shape} cannot be quantized as {scheme.name}: {objection}; add {module!r} to"
                " the modules that the served checkpoint leaves as they are"
            )
        return scheme

    def _are_experts(self, weight: TensorSpec, module: str, stored: Mapping[str, TensorSpec] | None) -> bool:
        known = weight.name in (stored or ()) or self._ignores(module)
        return len(weight.shape) == 3 and "experts" in module and not known

    def _from_names(self, weight: TensorSpec, module: str) -> Scheme | None:
        last = module.rpartition(".")[2]
        if len(weight.shape) != 2 or self._ignores(module) or _OTHER.fullmatch(last):
            return None
        if _HEAD.fullmatch(last) and self.method != "compressed-tensors":
            return None
        scheme = self._meant(module)
        told = not any(_CLASS.fullmatch(target) for rule in self.rules for target in rule.targets)
        if (scheme is None and told) or (scheme and (_LINEAR.fullmatch(last) or _HEAD.fullmatch(last))):
            return scheme
        raise UnknownScheme(
            f"nothing says whether {weight.name!r} {weight.shape} is quantized: give the folder of the served"
            " checkpoint with its safetensors files, or name the module in its quantization_config"
        )

    def _from_files(self, weight: TensorSpec, module: str, stored: Mapping[str, TensorSpec]) -> Scheme | None:
        """The scheme of a weight that has a scale in the files, with scales in the dtype of the file.

        None without one.
        """
        if not self._is_there(weight, module, stored):
            raise UnknownScheme(
                f"the served checkpoint's files have no {weight.name!r} {weight.shape}, which is trained; they have"
                f" {_alike(module, stored)}: give the folder of the checkpoint that engines serve, with the names that"
                " the source serves"
            )
        for rule in self.rules:
            scale = stored.get(f"{module}.{rule.scheme.scale}")
            if scale is not None:
                break
        else:
            return None
        scheme = self._meant(module) or self.rules[0].scheme
        scale = stored.get(f"{module}.{scheme.scale}")
        if scale is None:
            raise UnknownScheme(
                f"{weight.name!r} should be quantized as {scheme.name}, its checkpoint has no such scale"
            )
        allowed = ("float32", "bfloat16", "float16") if scheme.scale_dtype != "uint8" else ("uint8",)
        if scale.dtype not in allowed:
            raise UnknownScheme(
                f"{scale.name!r} is stored as {scale.dtype}, expected is {' or '.join(allowed)}: {_ADVICE}"
            )
        flat = scale.shape if scheme.flat is not None and scale.shape in _WITH_ALL else scheme.flat
        scheme = msgspec.structs.replace(scheme, scale_dtype=scale.dtype, flat=flat)
        self._compare(weight, module, scheme, stored)
        return scheme

    @staticmethod
    def _is_there(weight: TensorSpec, module: str, stored: Mapping[str, TensorSpec]) -> bool:
        """True when the files have it, or need not: an output layer that is tied to the table is stored once."""
        tied = _HEAD.fullmatch(module.rpartition(".")[2])
        return weight.name in stored or f"{module}.weight_packed" in stored or tied is not None

    @staticmethod
    def _compare(weight: TensorSpec, module: str, scheme: Scheme, stored: Mapping[str, TensorSpec]) -> None:
        if scheme.objection(weight.shape):
            return  # said by the caller
        for part in scheme.parts(weight):
            found = stored.get(f"{module}.{part.suffix}")
            if found is None or (found.dtype, found.shape) != (part.dtype, part.shape):
                there = f"{found.dtype} {found.shape}" if found else "nothing"
                raise UnknownScheme(
                    f"the served checkpoint has {there} as {module}.{part.suffix}, expected by its quantization_config"
                    f" ({scheme.name}) is {part.dtype} {part.shape}: give the checkpoint that engines serve"
                )

    def _meant(self, module: str) -> Scheme | None:
        """By name before pattern before class, as compressed-tensors orders them."""
        for matches in (_is_named, _is_matched, _is_linear):
            for rule in self.rules:
                if any(matches(module, target) for target in rule.targets):
                    return rule.scheme
        return None

    def _ignores(self, module: str) -> bool:
        if self.method == "compressed-tensors":
            rules = (_is_named, _is_matched, _is_linear)
            return any(matches(module, each) for matches in rules for each in self.ignored)
        return any(_on_path(module, each) for each in self.ignored)


_KEYS: Final = ("quantization_config", "compression_config")


def read_quantization_config(config: Mapping[str, Any]) -> Quantization | None:
    """The quantization of a ``config.json``; None for a checkpoint that is not quantized.

    Raises `UnknownScheme` for a config that is not understood.
    """
    inner: object = config.get("text_config")
    inner = {} if inner is None else inner
    if not isinstance(inner, Mapping):
        raise UnknownScheme(f"config.json has a {type(inner).__name__} as text_config, expected a JSON object")
    for place in (config, cast("Mapping[str, Any]", inner)):
        for key in _KEYS:
            found: object = place.get(key)
            if found not in (None, {}):
                return _parse(found)
    for path in _elsewhere(config, ""):
        raise UnknownScheme(
            f"config.json says at {path} how a part of the model is quantized, and nothing of the language model:"
            f" {_ADVICE}"
        )
    return None


def _elsewhere(place: Mapping[str, Any], path: str) -> Iterator[str]:
    """Other places in a config that mention quantization."""
    for key, value in place.items():
        at = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and value:
            found = cast("Mapping[str, Any]", value)
            yield from [at] if key in _KEYS else _elsewhere(found, at)


def quantized_tensors(weight: TensorSpec, scheme: Scheme) -> tuple[TensorSpec, ...]:
    """The tensors that `weight` becomes."""
    module = weight.name.rpartition(".")[0]
    return tuple(TensorSpec(f"{module}.{part.suffix}", part.dtype, part.shape) for part in scheme.parts(weight))


def _parse(found: object) -> Quantization:
    if not isinstance(found, Mapping):
        raise UnknownScheme(f"quantization_config is a {type(found).__name__}, expected a JSON object")
    method = str(found.get("quant_method", "compressed-tensors" if "config_groups" in found else ""))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    try:
        if method in ("fp8", "mxfp8"):
            return _fp8(msgspec.convert(found, _Fp8))
        if method == "compressed-tensors":
            return _compressed(msgspec.convert(found, _Compressed))
    except msgspec.ValidationError as error:
        raise UnknownScheme(
            f"the quantization_config ({method}) is not understood: {error}; {_KNOWN}: {_ADVICE}"
        ) from error
    raise UnknownScheme(f"the served checkpoint is quantized as {method!r}; {_KNOWN}: {_ADVICE}")


def _fp8(config: _Fp8) -> Quantization:
    blocks = config.weight_block_size
    if config.quant_method == "mxfp8":
        scheme = mxfp8()
        if blocks is not None and blocks != scheme.block:
            raise UnknownScheme(
                f"mxfp8 has blocks of {list(scheme.block)}, found a weight_block_size of {list(blocks)}: {_ADVICE}"
            )
    elif blocks is None:
        if config.scale_fmt == "ue8m0":
            raise UnknownScheme(f"scale_fmt ue8m0 is of blocks, found no weight_block_size: {_ADVICE}")
        scheme = fp8_tensor()
    else:
        scheme = fp8_block(blocks, power_of_two=config.scale_fmt == "ue8m0")
    ignored = (*(config.modules_to_not_convert or ()), *(config.ignored_layers or ()))
    return Quantization(config.quant_method, (QuantizationRule(("Linear",), scheme),), ignored)


def _compressed(config: _Compressed) -> Quantization:
    for name, value in (("kv_cache_scheme", config.kv_cache_scheme), ("transform_config", config.transform_config)):
        if value:
            raise UnknownScheme(
                f"{name} asks for calibrated or transformed values, which training does not have: {_ADVICE}"
            )
    if config.sparsity_config and config.sparsity_config.get("format", "dense") != "dense":
        raise UnknownScheme(f"the served checkpoint is sparse ({config.sparsity_config.get('format')}): {_ADVICE}")
    if not config.config_groups:
        raise UnknownScheme(f"compressed-tensors without config_groups says nothing of its weights: {_ADVICE}")
    rules = tuple(
        QuantizationRule(tuple(group.targets), _scheme(name, group, group.format or config.format))
        for name, group in config.config_groups.items()
    )
    for pattern in (*(config.ignore or ()), *(target for rule in rules for target in rule.targets)):
        _check_pattern(pattern)
    for name, group in config.config_groups.items():
        if not group.targets or not all(group.targets):
            raise UnknownScheme(f"{name} has targets {group.targets}, expected is which modules it is of: {_ADVICE}")
    return Quantization("compressed-tensors", rules, tuple(config.ignore or ()))


def _check_pattern(target: str) -> None:
    try:
        re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
    except re.error as error:
        raise UnknownScheme(f"{target!r} in the quantization_config is no pattern: {error}") from error


def _scheme(name: str, group: _Group, form: str) -> Scheme:
    """The scheme of one config group, with scales in the dtype that it names, if it does."""
    scheme = _form(name, group, form)
    wanted = group.weights.scale_dtype if group.weights else None
    if wanted is None or (wanted, scheme.scale_dtype) == ("torch.uint8", "uint8"):
        return scheme
    if scheme.scale_dtype == "uint8" or wanted not in _SCALES:
        raise UnknownScheme(f"{name} stores scales of {scheme.name} as {wanted}: {_ADVICE}")
    return msgspec.structs.replace(scheme, scale_dtype=_SCALES[wanted])


def _form(name: str, group: _Group, form: str) -> Scheme:
    weights = group.weights
    if weights is None or weights.dynamic:
        raise UnknownScheme(f"{name} has no stored weights: {_ADVICE}")
    if group.output_activations or (group.input_activations or {}).get("dynamic", True) is not True:
        raise UnknownScheme(f"{name} asks for calibrated activation scales, which training does not have: {_ADVICE}")
    if weights.actorder not in (None, False, "weight", "static"):
        raise UnknownScheme(f"{name} orders columns by activations ({weights.actorder}): {_ADVICE}")
    strategy = weights.strategy or {None: "tensor", -1: "channel"}.get(weights.group_size, "group")
    match (weights.type, weights.num_bits, strategy, form):
        case ("float", 8, "tensor", "float-quantized" | "naive-quantized") if weights.symmetric:
            return fp8_tensor()
        case ("float", 8, "channel", "float-quantized" | "naive-quantized") if weights.symmetric:
            return fp8_channel()
        case ("float", 8, "block", "float-quantized" | "naive-quantized") if (
            weights.symmetric and weights.block_structure
        ):
            return fp8_block(weights.block_structure, scale="weight_scale")
        case ("float", 8, "group", "mxfp8-quantized") if weights.symmetric and weights.group_size == 32:
            return mxfp8(compressed=True)
        case ("int", 4, "group", "pack-quantized") if (weights.group_size or 0) > 0:
            return int4(weights.group_size or 0, symmetric=weights.symmetric)
        case ("int", 4, "channel", "pack-quantized"):
            return int4(0, symmetric=weights.symmetric)
        case _:
            kind = (
                f"{weights.type}{weights.num_bits} by {strategy}, {'' if weights.symmetric else 'a'}symmetric, {form!r}"
            )
            raise UnknownScheme(f"{name} stores its weights as {kind}; {_KNOWN}: {_ADVICE}")


def _check_plain(weight: TensorSpec, module: str, stored: Mapping[str, TensorSpec]) -> None:
    """Raise `UnknownScheme` where the served checkpoint's files hold something else than plain numbers."""
    there = stored.get(weight.name) or stored.get(f"{module}.weight_packed")
    if there is not None and weight.dtype in _PLAIN and there.dtype not in _PLAIN:
        raise UnknownScheme(
            f"the served checkpoint stores {there.name!r} as {there.dtype}, without a scale of the kind that its"
            f" quantization_config asks for: {_ADVICE}"
        )


def _alike(module: str, stored: Mapping[str, TensorSpec]) -> str:
    """The tensor there whose name is closest to that of `module`, for a message."""
    wanted = module.split(".")

    def likeness(name: str) -> int:
        parts = name.split(".")[:-1]
        return sum(one == other for one, other in zip(reversed(wanted), reversed(parts), strict=False))

    return repr(max(sorted(stored), key=likeness))


def _is_named(module: str, target: str) -> bool:
    return not target.startswith("re:") and (target == module or module.endswith(f".{target}"))


def _is_matched(module: str, target: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], module) is not None


def _is_linear(module: str, target: str) -> bool:
    del module  # every module that gets here is one
    return target.casefold() == "linear"  # as SGLang finds classes


def _on_path(module: str, ignored: str) -> bool:
    """SGLang's rule: parts of the path that follow each other, with or without the first ``model.``."""
    path = f".{module.removeprefix('model.')}."
    return f".{ignored.rstrip('.').removeprefix('model.')}." in path
