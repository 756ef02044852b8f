"""The name under which SGLang's ``--custom-weight-loader`` knows our loader: it stands in users' launch flags.

The loader itself is engines/sglang/weight_loader.py.
"""

from .engines.sglang import load

__all__ = ("load",)
