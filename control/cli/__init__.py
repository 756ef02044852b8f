"""The command `weightbus`: its subcommands, and the loading of settings. Top of the package."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .entry_point import main as main
    from .key_commands import AgentKeys as AgentKeys, make_deployment_keys as make_deployment_keys
    from .settings import (
        SettingsCommand as SettingsCommand,
        add_settings_flags as add_settings_flags,
        load_settings as load_settings,
        settings_from_args as settings_from_args,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
