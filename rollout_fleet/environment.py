"""The environment of reward processes and inference servers: that of the rollout worker without its secrets.

A reward runs code on text that a model wrote, and may print its environment. Neither it nor a server needs the keys of
trackers, hubs and clouds that the user has set. This guards against accidents: a process of the same user can still
read the environment of another one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

_SECRET = re.compile(
    r"AWS_.*|SSH_AUTH_SOCK|(.*_)?(TOKENS?|KEYS?|APIKEY|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_(ID|FILE|PATH))?",
    re.IGNORECASE,
)
_SETTING = re.compile(r"-?\d{0,9}|true|false|yes|no|on|off", re.IGNORECASE)


def is_secret(name: str, value: str = "...") -> bool:
    """Whether a variable holds a secret, by its name. Example: ``HF_TOKEN``, ``AWS_PROFILE``, ``JUDGE_API_KEY``.

    A ``*_TOKEN`` or ``*_TOKENS`` whose value is a number or a switch is a setting. Example:
    ``SGLANG_TWO_STREAM_MAX_TOKENS=1024``.
    """
    is_setting = name.upper().endswith(("TOKEN", "TOKENS")) and _SETTING.fullmatch(value) is not None
    return _SECRET.fullmatch(name) is not None and not is_setting


def without_secrets(passed: Collection[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A copy of an environment without the variables that hold secrets, except those whose names are ``passed``."""
    return {name: value for name, value in environment.items() if name in passed or not is_secret(name, value)}
