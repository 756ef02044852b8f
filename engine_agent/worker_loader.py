"""The name under which SGLang's ``--custom-weight-loader`` knows our loader: it stands in users' launch flags.

The loader itself is in the room `worker`.
"""

from .worker import load

__all__ = ("load",)
