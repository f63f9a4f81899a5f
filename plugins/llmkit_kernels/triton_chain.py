"""`llmkit.jit.chain`, for the kernels of this package."""

from llmkit.jit.chain import INTERPRETED, follows_early, next_may_start, wait_for_last

__all__ = ["INTERPRETED", "follows_early", "next_may_start", "wait_for_last"]
