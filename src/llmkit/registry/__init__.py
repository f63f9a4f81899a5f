"""Finds, checks and builds plugins."""
