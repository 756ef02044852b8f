"""Whether the live weights of a quantized server can be loaded again. Pure.

A server loads every update through the loader that its launch used. That works as long as the live parameters still
have the checkpoint's layout, or SGLang can give it back (begin_weight_update). Read from SGLang 0.5.11 to 0.5.23:

    fp8 in blocks           stays as it was loaded on Hopper; scales are packed anew at the end of a session elsewhere
    fp8 by tensor, channel  transposed, and put into new parameters without a loader
    mxfp8                   scales are swizzled, and not given back
    int4, experts           repacked for Marlin; given back at the beginning of a session
    int4, other layers      repacked for Marlin, and not given back
    anything on a CPU       packed for AMX, and not given back
    Llama, fp8 in blocks    its loader calls ``weight_scale_inv`` ``weight_scale``, finds no such parameter, and goes on
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from weightbus.dataplane.quantize import Element, Quantization, Scheme

from .api_versions import Dialect
from .server_identity import ServerFacts

_EXPERT: Final = re.compile(r"\.experts\.\d+\.")
_LLAMA: Final = "LlamaForCausalLM"
_SERVE_BLOCKS: Final = (
    "serve a checkpoint in fp8 blocks (weight_block_size), or the plain one with no --quantization, which any transport"
    " updates"
)


def objections(
    quantization: Quantization | None, names: Iterable[str], facts: ServerFacts, dialect: Dialect
) -> Iterator[str]:
    """Objections to updating a server of such a checkpoint, whose tensors have these names."""
    asked = facts.quantization.replace("_", "-")
    if quantization is None:
        if asked:
            yield (
                f"the server quantizes a plain checkpoint while it loads (--quantization {facts.quantization}), which"
                " cannot be compared: launch it without the flag from a checkpoint that is quantized already, and name"
                " that to the trainer (served)"
            )
        return
    if asked and asked != quantization.method:
        yield (
            f"the server was launched with --quantization {facts.quantization}, its checkpoint is"
            f" {quantization.method}: launch it without the flag"
        )
    if facts.device == "cpu":
        yield "SGLang packs quantized weights for its CPU and cannot unpack them: serve the plain checkpoint there"
        return
    names = tuple(names)
    if _LLAMA in facts.architectures and any(name.endswith(".weight_scale_inv") for name in names):
        yield "SGLang's Llama drops scales called weight_scale_inv in silence: serve a compressed-tensors checkpoint"
    packed = [name for name in names if name.endswith(".weight_packed")]
    for rule in quantization.rules:
        reason = _reason(rule.scheme, packed, dialect)
        if reason:
            yield f"weights in {rule.scheme.name} cannot be loaded into a running server: {reason}"


def _reason(scheme: Scheme, packed: Iterable[str], dialect: Dialect) -> str:
    if scheme.element is Element.INT4:
        if any(not _EXPERT.search(name) for name in packed):
            return f"SGLang repacks them and unpacks experts only; {_SERVE_BLOCKS}, or quantize nothing but experts"
        if not dialect.sessions:
            return "SGLang unpacks experts from 0.5.21 on: launch a newer server"
        return ""
    if scheme.scale_dtype == "uint8":
        return f"SGLang swizzles their scales; {_SERVE_BLOCKS}"
    if not all(scheme.block):
        return f"SGLang transposes them; {_SERVE_BLOCKS}"
    return ""
