"""Scheduling policies."""
