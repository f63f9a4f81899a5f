"""Counts and times."""
