"""The values of JSON schema's `format` as regular expressions of the whole string.

Each allows only what the format's own standard allows; some allow less, which the comments say: an answer that is valid
everywhere is worth more than every spelling that is valid somewhere.
"""

from __future__ import annotations

from functools import lru_cache

from llmkit.grammars.schema_keywords import HARMLESS_FORMATS
from llmkit_structured.regex_syntax import whole
from llmkit_structured.regex_tree import Tree

# No year 0: RFC 3339 has one, many calendars do not.
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
# No leap seconds: whether :60 is right depends on the offset.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_HEX = r"[0-9A-Fa-f]"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_NUMBERED = r"[0-9]+"


def _ipv6() -> str:
    """Full addresses and those with one `::`; no embedded IPv4 address."""
    group = f"{_HEX}{{1,4}}"
    forms = [f"(?:{group}:){{7}}{group}", "::"]
    for before in range(8):
        head = f"{group}(?::{group}){{{before - 1}}}" if before else ""
        most = 7 - before
        if before:
            forms.append(f"{head}::")
        if most:
            forms.append(f"{head}::{group}(?::{group}){{0,{most - 1}}}")
    return "(?:" + "|".join(forms) + ")"


def _duration() -> str:
    """ISO 8601 as in RFC 3339, appendix A: P1Y2M3DT4H5M6S and P4W; units that follow one another, none left out."""
    time = "T(?:" + "|".join(f"{_NUMBERED}{unit}" for unit in ("H(?:[0-9]+M(?:[0-9]+S)?)?", "M(?:[0-9]+S)?", "S")) + ")"
    day = f"{_NUMBERED}D"
    month = f"{_NUMBERED}M(?:{day})?"
    date = f"(?:{day}|{month}|{_NUMBERED}Y(?:{month})?)"
    return f"P(?:{date}(?:{time})?|{time}|{_NUMBERED}W)"


_URI_CHARACTER = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"
_URI = (
    # With an authority of name or address without user, or with a path only.
    rf"[A-Za-z][A-Za-z0-9+\-.]*:(?://(?:[A-Za-z0-9\-._~]|%{_HEX}{{2}})+(?::[0-9]{{1,5}})?(?:/{_URI_CHARACTER}*)*"
    rf"|/?{_URI_CHARACTER}+(?:/{_URI_CHARACTER}*)*)(?:\?(?:{_URI_CHARACTER}|[/?])*)?(?:#(?:{_URI_CHARACTER}|[/?])*)?"
)
_ATOM = r"[A-Za-z0-9!#$%&'*+\-/=?^_`{|}~]+"

_SOURCES = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": _duration(),
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    # Addresses without quotes, comments and address literals.
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*",
    # Four labels at most, without two hyphens in a row: such labels are encoded, and may be encoded wrongly.
    "hostname": r"(?:[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}\.){0,3}[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}",
    "uri": _URI,
    "json-pointer": r"(?:/(?:[^/~]|~[01])*)*",
}

ANNOTATIONS = HARMLESS_FORMATS | {"float", "double"}
"""Formats that say nothing about the value."""

INTEGER_BOUNDS = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
"""Formats, of OpenAPI, that bound an integer."""

KNOWN = (*_SOURCES, *ANNOTATIONS, *INTEGER_BOUNDS)


@lru_cache(64)
def language(name: str) -> Tree | None:
    """The strings of the format `name`; None if it is unknown."""
    return whole(_SOURCES[name]) if name in _SOURCES else None
