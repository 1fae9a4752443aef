"""Our settings on vLLM's command line: `kv_connector_extra_config`, shared with the NIXL connector's own keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving_plugin.core.config import InstanceSettings
from serving_plugin.core.errors import ConfigurationError

# Keys that vLLM 0.32's NIXL connector reads from the same dict (`get_from_extra_config` in its folder).
NIXL_KEYS = frozenset(
    {
        "backends",
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
        "enforce_handshake_compat",
        "engine_ttl",
        "kv_lease_duration",
        "kv_recompute_threshold",
        "num_threads",
        "push_registration_timeout",
    }
)


def settings_of(vllm_config: Any) -> InstanceSettings:
    """The instance's settings.

    Raises:
        ConfigurationError: there are none, or a key is unknown, missing or wrong.
    """
    config = vllm_config.kv_transfer_config
    raw: Mapping[str, Any] = (config.kv_connector_extra_config if config else None) or {}
    ours = {key: value for key, value in raw.items() if key not in NIXL_KEYS}
    if not ours:
        raise ConfigurationError(
            "VLLM_PLUGINS names tetri, but --kv-transfer-config has no kv_connector_extra_config; "
            "`tetri instance MODEL --role prefill --print` shows a complete command line"
        )
    return InstanceSettings.from_dict(ours)
