"""Hardware profiles: one YAML a cluster and an engine, every number with unit, kind and source; SI past the reader."""

from hardware_profiles.chip import Chip, EfficiencyCurve
from hardware_profiles.cluster import Cluster, Level, Link
from hardware_profiles.engine import DEFAULT_ENGINE, Engine, engine, engine_names
from hardware_profiles.errors import ProfileFormatError
from hardware_profiles.reader import profile_names
from hardware_profiles.resolve import (
    PROFILE_SUFFIXES,
    ProfileRow,
    cluster_from_yaml,
    cluster_to_yaml,
    describe,
    resolve_cluster,
)

__all__ = [
    "DEFAULT_ENGINE",
    "PROFILE_SUFFIXES",
    "Chip",
    "Cluster",
    "EfficiencyCurve",
    "Engine",
    "Level",
    "Link",
    "ProfileFormatError",
    "ProfileRow",
    "cluster_from_yaml",
    "cluster_to_yaml",
    "describe",
    "engine",
    "engine_names",
    "profile_names",
    "resolve_cluster",
]
