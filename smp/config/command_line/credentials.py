"""URLs without user, password and query, where signatures are: safe to print. Imports no torch."""

from __future__ import annotations

import re
from typing import Any

# abfs://CONTAINER@ACCOUNT names a container, no user.
# abfs://CONTAINER@ACCOUNT is no secret
_USER = re.compile(r"(?<!abfs)(?<!abfss)://[^/\s?]*@")
# A query has a =, a ? alone is of a pattern. What stands after the URL, as the line of a file, stays.
_QUERY = re.compile(r"(://[^\s?'\"]*\?)[^\s'\"]*=[^\s'\"]*?(?=(?::\d+)?[:,;.)\]]*(?:['\"\s]|$))")


def without_credentials(value: Any) -> Any:
    """The text (or the texts of a list) with ``***`` instead of user, password and query of each URL. What a run
    prints and records is read by others."""
    if isinstance(value, list | tuple):
        return type(value)(map(without_credentials, value))
    if not isinstance(value, str) or "://" not in value:
        return value
    return _QUERY.sub(r"\1***", _USER.sub("://***@", value))
