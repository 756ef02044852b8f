"""The command `weightbus`: its subcommands, and the loading of settings. Top of the package."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import settings_loader as settings_loader
    from .deployment_keys import AgentKeys as AgentKeys, make_deployment_keys as make_deployment_keys
    from .entry_point import main as main
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
