"""Lay a measured machine over the packaged profile `local-cpu`.

    shardwright profile --device cpu -o machine.yaml && python benchmarks/local_cpu.py machine.yaml

Rates, launch, functions and the link are the measured ones; memory, the number of devices and the network stay as they are,
because they describe no single machine. Run it on a quiet machine: collectives wait for ranks that are not running.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from hardware_profiles import resolve_cluster

PROFILE = Path(__file__).parent.parent / "hardware_profiles" / "profiles" / "local-cpu.yaml"
KEPT = ("name", "memory")


def main(measured: Path) -> None:
    """Rewrite the packaged profile from the YAML that `shardwright profile` wrote."""
    resolve_cluster(str(measured))
    text = PROFILE.read_text(encoding="utf-8")
    content, machine = yaml.safe_load(text), yaml.safe_load(measured.read_text(encoding="utf-8"))
    node = content["links"]["node"]
    content["chip"] = {**machine["chip"], **{name: content["chip"][name] for name in KEPT}}
    content["links"]["node"] = {**machine["links"]["node"], "technology": node["technology"], "size": node["size"]}
    heading = text[: text.index("name:")]
    body = yaml.safe_dump(content, sort_keys=False, width=1000, default_flow_style=None, allow_unicode=True)
    PROFILE.write_text(heading + body, encoding="utf-8")
    print(f"wrote {PROFILE}: {resolve_cluster('local-cpu:1x2').fingerprint}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
