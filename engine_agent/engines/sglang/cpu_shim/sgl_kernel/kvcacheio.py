"""Names that SGLang 0.5.11 imports from here; as in the package, each raises when it is called."""

from . import __getattr__  # noqa: F401 - it is what makes the names
