"""Finds plugins by metadata, loads the chosen ones, checks them and builds their objects."""

from llmkit.registry.doctor import DoctorRow
from llmkit.registry.environment import detect_environment
from llmkit.registry.loading import LoadedPlugin
from llmkit.registry.manifest import Manifest, ManifestEntry
from llmkit.registry.observers import Observer
from llmkit.registry.registry import Registry
from llmkit.registry.rows import PluginRow
from llmkit.registry.selection import Selection
from llmkit.registry.timings import CallTiming, PluginTiming, Timings

__all__ = [
    "Registry",
    "PluginRow",
    "LoadedPlugin",
    "Selection",
    "DoctorRow",
    "Manifest",
    "ManifestEntry",
    "Observer",
    "Timings",
    "PluginTiming",
    "CallTiming",
    "detect_environment",
]
