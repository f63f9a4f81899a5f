"""A torch module without the call machinery."""

from __future__ import annotations

from typing import Any

from torch import nn


class Module(nn.Module):
    """`nn.Module` whose call goes straight to `forward`: no hooks, a tenth of the overhead.

    A decode step on a small model makes hundreds of module calls; nn.Module's dispatch would cost as much as the
    arithmetic of the small ones.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)
