"""Key files, the allow-list, signed publications, and the security settings of every process."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .allow_list import RELOAD_S as RELOAD_S, AllowList as AllowList
    from .keys import (
        AGENT_KEYS_FOLDER as AGENT_KEYS_FOLDER,
        COORDINATOR_KEYS as COORDINATOR_KEYS,
        CurveFiles as CurveFiles,
        InsecureLoopback as InsecureLoopback,
        KeyPair as KeyPair,
        KeysFolder as KeysFolder,
        agent_key_files as agent_key_files,
        allow_list_path as allow_list_path,
        check_endpoint as check_endpoint,
        check_endpoints as check_endpoints,
        check_key_settings as check_key_settings,
        check_public_key as check_public_key,
        check_url as check_url,
        fingerprint as fingerprint,
        keys_folder as keys_folder,
        read_public_key as read_public_key,
        read_secret_key as read_secret_key,
        read_signing_key as read_signing_key,
        state_folder as state_folder,
        write_key_pair as write_key_pair,
    )
    from .trust import (
        ALLOW_LIST_FILE as ALLOW_LIST_FILE,
        AllowListEntry as AllowListEntry,
        VerificationFailure as VerificationFailure,
        allow_list_rows as allow_list_rows,
        edit_allow_list as edit_allow_list,
        explain_invalid_entry as explain_invalid_entry,
        read_allow_list as read_allow_list,
        sign_digest_table as sign_digest_table,
        sign_endpoint as sign_endpoint,
        sign_publication as sign_publication,
        verify_digest_table as verify_digest_table,
        verify_endpoint as verify_endpoint,
        verify_publication as verify_publication,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
