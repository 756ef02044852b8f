"""Quantization at the trainer: a source whose weights are quantized before they leave."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .quantized_source import as_served as as_served, served_folder as served_folder
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
