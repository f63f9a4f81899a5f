"""Which requests keys and rates apply to."""

from __future__ import annotations

from starlette._utils import get_route_path
from starlette.types import Scope

_GUARDED_ROOTS = ("/v1", "/v2", "/inference", "/pooling", "/classify", "/score", "/rerank")

PAGE_DATA = "/playground/state"

CONTROL_PATHS = (
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/reset_prefix_cache",
    "/pause",
    "/resume",
    "/start_profile",
    "/stop_profile",
    "/server_info",
)


def is_guarded(scope: Scope) -> bool:
    """Whether a request needs a key: the API proper, and what controls the engine. Decided by the path that routes are
    matched with, so that no other spelling of it leads past."""
    path = get_route_path(scope)
    return path.startswith(tuple(f"{root}/" for root in _GUARDED_ROOTS)) or path in (
        *_GUARDED_ROOTS,
        *CONTROL_PATHS,
        PAGE_DATA,
    )
