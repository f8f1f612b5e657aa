"""URLs as others may read them: without user, password and query, which is where signatures are. Imports no torch."""

from __future__ import annotations

import re
from typing import Any

# abfs://CONTAINER@ACCOUNT is no secret
_USER = re.compile(r"(?<!abfs)(?<!abfss)://[^/\s?]*@")
# A query has a =, a ? alone is of a pattern. What stands behind the URL, as the line of a file, stays.
_QUERY = re.compile(r"(://[^\s?'\"]*\?)[^\s'\"]*=[^\s'\"]*?(?=(?::\d+)?[:,;.)\]]*(?:['\"\s]|$))")


def without_credentials(value: Any) -> Any:
    """A text, or texts of a list, with ``***`` for the user, the password and the query of each URL in it. What a run
    prints and records is read by others."""
    if isinstance(value, list | tuple):
        return type(value)(map(without_credentials, value))
    if not isinstance(value, str) or "://" not in value:
        return value
    return _QUERY.sub(r"\1***", _USER.sub("://***@", value))
