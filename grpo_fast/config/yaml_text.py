"""YAML of configurations: plain data, exponents without a point, no duplicate keys, dates as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

LONGEST = 1_000_000  # values of a text, each alias counted
# PyYAML follows YAML 1.1, whose floats need a point; YAML 1.2, and everybody who writes 1e-6, does not.
EXPONENT = re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$")
AS_TEXT = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")


# Values that YAML 1.1 reads in unexpected ways: octal and sexagesimal numbers, `_` in numbers, switches.
_SURPRISES = {
    "changed": re.compile(r"[-+]?(0[0-7_]+|[\d_]+(:[0-5]?\d)+(\.\d*)?)"),
    "number": re.compile(r".*\d_.*"),
    "switch": re.compile(r"(?i)yes|no|on|off"),
}
_TYPED = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool")}


class Surprise(NamedTuple):
    """A plain value that YAML reads in an unexpected way."""

    place: str  # dotted
    line: int  # from 1
    text: str  # as written
    kind: str  # "comment": a value that a comment left empty, or one of `_SURPRISES`
    value: Any  # as read


class Loader(yaml.SafeLoader):
    """A loader of plain data; a duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            message = f"the key `{twice}` is given twice; keep one"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """A dumper without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        # Outside double quotes PyYAML folds Unicode's own line separators, which are then lost.
        quoted = any(separator in data for separator in "\x85\u2028\u2029")
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if quoted else None)


Dumper.add_representer(str, Dumper.represent_text)
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in AS_TEXT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (Loader, Dumper):  # both, so that the string "1e-6" is written with its quotes
    _class.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))


def parse_yaml(text: str) -> Any:
    """Return the plain data of a text; None for an empty one.

    Raises:
        ValueError: it is no YAML, has a duplicate key, or is not plain or not finite.
    """
    try:
        loader, document = _composed(text)
        if document is not None and _values(document, {}) > LONGEST:
            raise ValueError(f"makes more than {LONGEST:,} values by its aliases")
        return None if document is None else loader.construct_document(document)
    except RecursionError:
        raise ValueError("is nested too deeply, or in itself") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        message = getattr(error, "problem", None) or "holds a character that YAML does not allow"
        raise ValueError(f"{place}{message}") from None


def _composed(text: str) -> tuple[Loader, yaml.Node | None]:
    loader = Loader(text)
    return loader, loader.get_single_node()


def parse_value(text: str) -> Any:
    """Parse one value of a command line: `parse_yaml`, but `#` begins no comment in plain text."""
    value = parse_yaml(text)
    plain = value is None or (isinstance(value, str) and text.strip()[0] not in "'\"|>!&")
    return text.strip() if plain and "#" in text else value


def surprises(text: str) -> list[Surprise]:
    """Return the values of a valid text that YAML reads in unexpected ways."""
    loader, document = _composed(text)
    lines = text.splitlines()
    known: set[int] = set()

    def walk(node: yaml.Node, place: str) -> Iterator[Surprise]:
        if id(node) in known:
            return
        known.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                yield from walk(item, f"{place}.{index}".lstrip("."))
        elif isinstance(node, yaml.MappingNode):
            for key, item in node.value:
                name = f"{place}.{key.value}".lstrip(".") if isinstance(key, yaml.ScalarNode) else place
                yield from (found._replace(kind="changed") for found in walk(key, name))
                yield from walk(item, name)
        elif isinstance(node, yaml.ScalarNode) and node.style is None:
            written, mark = node.value, node.start_mark
            kinds = (kind for kind, pattern in _SURPRISES.items() if pattern.fullmatch(written))
            rest = lines[mark.line][mark.column :].strip() if not written and mark.line < len(lines) else ""
            if node.tag in _TYPED and (kind := next(kinds, None)):
                yield Surprise(place, mark.line + 1, written, kind, loader.construct_object(node))
            elif re.match(r"#(\S|$)", rest):  # `# ` begins a remark
                yield Surprise(place, mark.line + 1, rest, "comment", None)

    return [] if document is None else [*walk(document, "")]


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values of a node, with its aliases followed."""
    if id(node) not in known:
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = parts if isinstance(node, yaml.MappingNode) else [(part,) for part in parts]
        known[id(node)] = 1 + sum(_values(part, known) for pair in pairs for part in pair)
    return known[id(node)]


def dump_yaml(data: Any) -> str:
    """Return data as YAML, in the order of the keys."""
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
