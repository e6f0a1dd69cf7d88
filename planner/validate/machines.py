"""The cluster that a row ran on: a packaged chip under the links that the row states."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from hardware_profiles import Cluster, Level, profile_names, resolve_cluster
from planner.validate.rows import Row, plain_name

SITES = {("Jean Zay", "A100-SXM-80GB"): "jean-zay-a100"}
"""Profiles of machines whose links are not those of a vendor's node, by a word of the hardware and the chip."""

CAPPED = "-capped"
"""Ends the name of a chip whose power is limited."""


class Unpredictable(Exception):
    """A row that cannot be predicted; the message says why."""


def cluster_of(row: Row) -> Cluster:
    """The row's cluster. Where the row does not say how large the fast domain is or how fast its network, the profile's
    own numbers hold. Raises Unpredictable for a chip without a profile."""
    assert row.devices is not None
    chip = plain_name(_known_chip(row))
    for (word, part), site in SITES.items():
        if word in row.hardware and chip == plain_name(part):
            return _cluster(site, row.devices, None, None)
    profile = _profile_of_chip().get(chip)
    if profile is None:
        raise Unpredictable(f"no hardware profile has the chip {row.chip or row.hardware!r}")
    return _cluster(profile, row.devices, row.domain, row.network_bytes_s)


def chip_cautions(row: Row) -> tuple[str, ...]:
    """In words, the chip that stands for one without a profile."""
    stands, capped = _known_chip(row), f"{row.chip}{CAPPED}"
    named = f"the chip {row.chip}" if row.chip else f"the chip that the row does not say ({row.hardware})"
    return () if plain_name(stands) in (plain_name(row.chip), plain_name(capped)) else (f"{stands} stands for {named}",)


def _known_chip(row: Row) -> str:
    """The chip itself where a profile has it; else, of those of its generation, the one whose name shares most words with it
    (``A100-PCIe-80GB`` is an ``A100-SXM-80GB``). A row that names no chip may name it among its hardware."""
    known, asked = _chip_names(), row.chip or row.hardware
    if "power limited" in row.hardware and plain_name(f"{asked}{CAPPED}") in known:
        return f"{asked}{CAPPED}"
    if plain_name(asked) in known:
        return asked
    words = _words(asked)
    generations = {_generation(word) for word in (plain_name(asked), *words)} - {""}
    alike = sorted(
        name for name in known.values() if _generation(plain_name(name)) in generations and not name.endswith(CAPPED)
    )
    return max(alike, key=lambda name: len(words & _words(name)), default=asked)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _generation(chip: str) -> str:
    """``h100``, ``mi300``, ``tpu5p`` of a chip's plain name; a Hopper behind an Arm processor is a Hopper, v5litepod a v5e."""
    name = chip.removeprefix("nvidia").removeprefix("amd").removeprefix("google")
    found = re.match(r"tpu\d+[a-z]?|[a-z]+\d+", name.replace("gh200", "h200").replace("tpuv", "tpu").replace("5lite", "5e"))
    return found[0] if found else ""


def forget_profiles() -> None:
    """Read the profiles again at the next row: a fit has rewritten them."""
    _cluster.cache_clear()


@lru_cache(maxsize=1024)
def _cluster(profile: str, devices: int, domain: int | None, network: float | None) -> Cluster:
    node = resolve_cluster(f"{profile}:1").devices_per_node
    cluster = resolve_cluster(f"{profile}:{-(-devices // node)}x{_share(devices, node)}")
    levels, beyond = list(cluster.levels), cluster.beyond
    if domain is not None and domain < devices and len(levels) == 1 and not levels[0].link.torus:
        # A node of the profile holds all of these devices, the row's does not: what joins nodes joins its domains.
        levels, beyond = [*levels, *(replace(level, size=devices) for level in beyond[:1])], beyond[1:]
    if domain is not None and len(levels) > 1 and not levels[0].link.torus:
        size = _share(devices, domain)
        levels[0] = replace(levels[0], size=size, limit=size)
        levels = [level for at, level in enumerate(levels) if at == 0 or level.size > levels[0].size]
    if network is not None and len(levels) > 1:
        levels[1:] = [level if level.link.torus else _at_speed(level, network) for level in levels[1:]]
    return replace(cluster, levels=tuple(levels), beyond=beyond)


def _share(devices: int, domain: int) -> int:
    """Devices that a job has of each domain. Of parts of domains it has as much of each, where it can: schedulers place jobs so
    that groups of ranks stay inside (of racks of 72, 64 each: Slurm's topology/block plugin, ``--segment``)."""
    domains = -(-devices // domain)
    return devices // domains if devices % domains == 0 else domain


def _at_speed(level: Level, bandwidth: float) -> Level:
    return replace(level, link=replace(level.link, bandwidth_bytes_s=bandwidth, peer_bytes_s=bandwidth))


@lru_cache(maxsize=1)
def _chip_names() -> dict[str, str]:
    """Chips as their profiles write them."""
    names = (resolve_cluster(f"{name}:1").chip.name for name in profile_names())
    return {plain_name(name): name for name in names}


@lru_cache(maxsize=1)
def _profile_of_chip() -> dict[str, str]:
    """By the chip's name; of several profiles with one chip the first by name."""
    found: dict[str, str] = {}
    for name in profile_names():
        found.setdefault(plain_name(resolve_cluster(f"{name}:1").chip.name), name)
    return found
