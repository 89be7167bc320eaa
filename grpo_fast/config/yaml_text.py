"""YAML as configurations are written: plain data, exponents without a point, no key twice."""

from __future__ import annotations

import re
from typing import Any

import yaml

LONGEST = 1_000_000  # values of a text, those that aliases repeat counted each time


class YamlError(ValueError):
    """A text that cannot be read; `place` is its line and column, empty where the whole is meant."""

    def __init__(self, message: str, place: str = "") -> None:
        self.place = place
        super().__init__(message)


# PyYAML follows YAML 1.1, whose floats need a point; YAML 1.2, and everybody who writes 1e-6, does not.
EXPONENT = re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$")


class Loader(yaml.SafeLoader):
    """Plain data only; a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # merged keys may be overridden
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key}` is given twice; keep one", key_node.start_mark
                )
            seen.add(str(key))
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Writes a value that stands in two places twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        # Outside double quotes PyYAML folds Unicode's own line separators, which are then lost.
        quoted = any(separator in data for separator in "\x85\u2028\u2029")
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if quoted else None)


Dumper.add_representer(str, Dumper.represent_text)

for _class in (Loader, Dumper):  # both, so that the string "1e-6" is written with its quotes
    _class.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))


def parse_yaml(text: str) -> Any:
    """The plain data that a text holds; None where it holds nothing.

    Raises:
        YamlError: it is no YAML, gives a key twice, or stands for something that is not plain or has no end.
    """
    try:
        loader = Loader(text)
        document = loader.get_single_node()
        if document is not None and _values(document, {}) > LONGEST:
            raise YamlError(f"makes more than {LONGEST:,} values by its aliases")
        return None if document is None else loader.construct_document(document)
    except RecursionError:
        raise YamlError("is nested too deeply, or in itself") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
        message = getattr(error, "problem", None) or "holds a character that YAML does not allow"
        raise YamlError(message, place) from None


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for, its aliases followed."""
    if id(node) not in known:
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = parts if isinstance(node, yaml.MappingNode) else [(part,) for part in parts]
        known[id(node)] = 1 + sum(_values(part, known) for pair in pairs for part in pair)
    return known[id(node)]


def dump_yaml(data: Any) -> str:
    """As a file has it, in the order of the keys."""
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
