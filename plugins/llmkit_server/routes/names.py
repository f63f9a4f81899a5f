"""Names in paths, whatever characters they have."""

from __future__ import annotations

from starlette.convertors import PathConvertor, register_url_convertor


class NameConvertor(PathConvertor):
    """The rest of the path, lines and all. Starlette's own `path` ends at a newline, and a request whose name has one
    would not reach its route, which knows what to say of it."""

    regex = "(?s:.*)"


NAME = "name"
"""For routes: `/things/{thing:name}`."""

register_url_convertor(NAME, NameConvertor())
