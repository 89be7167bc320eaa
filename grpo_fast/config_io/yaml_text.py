"""YAML text, safely: plain data only, duplicate keys refused, `1e-6` is a number."""

from __future__ import annotations

import re
from typing import Any

import yaml

from grpo_fast.config_io.errors import ConfigError, Problem

# PyYAML follows YAML 1.1, whose floats need a point; YAML 1.2, and everybody who writes 1e-6, does not.
_EXPONENT = re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # what is merged in may be overridden
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key}` is given twice; keep one", key_node.start_mark
                )
            seen.add(str(key))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):  # both, so that the string "1e-6" is written with its quotes
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def parse_yaml(text: str, source: str) -> Any:
    """The one document of a YAML text as plain data.

    Raises:
        ConfigError: it is not YAML, or gives a key twice; with the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = source if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
        message = getattr(error, "problem", None) or "a character that YAML does not allow"
        raise ConfigError(source, [Problem(place, message)]) from None


def dump_yaml(data: Any) -> str:
    """Plain data as YAML, keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
