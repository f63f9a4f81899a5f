"""Kernel tables."""
