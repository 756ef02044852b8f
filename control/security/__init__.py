"""Keys on disk, the allow list, signed publications, and the settings by which a process is told of them."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import security_settings as security_settings
    from .allow_list import (
        RELOAD_S as RELOAD_S,
        TRUST_FILE as TRUST_FILE,
        TrustEntry as TrustEntry,
        TrustList as TrustList,
        describe as describe,
        edited as edited,
        explained as explained,
        read_trust as read_trust,
    )
    from .curve_keys import (
        AGENTS as AGENTS,
        COORDINATOR as COORDINATOR,
        CurveFiles as CurveFiles,
        KeyPair as KeyPair,
        check_public as check_public,
        read_public as read_public,
        read_secret as read_secret,
        read_signing_key as read_signing_key,
        write_pair as write_pair,
    )
    from .security_settings import (
        InsecureLoopback as InsecureLoopback,
        KeysFolder as KeysFolder,
        check as check,
        check_endpoints as check_endpoints,
        check_url as check_url,
        curve_files as curve_files,
        keys_folder as keys_folder,
        state_folder as state_folder,
        trust_file as trust_file,
    )
    from .signed_publications import (
        Doubt as Doubt,
        doubt as doubt,
        doubt_offer as doubt_offer,
        doubt_table as doubt_table,
        seal_offer as seal_offer,
        seal_publication as seal_publication,
        seal_table as seal_table,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
