"""YAML as all readers of files take it: safe, and a field that is written twice is refused, not taken as its last value."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """PyYAML's safe one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is written twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load(text: str) -> Any:
    """What a YAML text holds; nothing in it is run. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)
