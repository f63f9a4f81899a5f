"""A front door that imports torch."""

import torch  # noqa: F401
from bad_plugins import Table


class Heavy(Table):
    pass
