"""Plans as text: JSON with one line per site or other exchange, so that people and `diff` can read it.

Tests: tests/unit/test_plan.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import json
import types
import typing
from typing import Any

from tf_poseidon.errors import PlanError
from tf_poseidon.errors import shown
from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.decision import Decision
from tf_poseidon.planning.exchange import Exchange
from tf_poseidon.planning.partition_facts import DividedWeight
from tf_poseidon.planning.partition_facts import WholeOp
from tf_poseidon.planning.site import Site

VERSION = 1

# Numbers in a plan are smaller, so that no sum or product of them is too large for a float.
_BELOW = {int: 2**63, float: 1e30}

# The keys of fields that have another name.
_KEYS = {(Exchange, "kind"): "scheme"}

# The lists of a plan besides its sites; each value is a line.
_LISTS = {"divided": DividedWeight, "exchanges": Exchange, "whole": WholeOp}


def to_text(head: Mapping[str, Any], sites: Sequence[Site], decisions: Sequence[Decision],
            others: Mapping[str, Sequence[DividedWeight | Exchange | WholeOp]]) -> str:
    """Returns a plan as text; `head` has its fields that occur once, `others` its other lists."""
    head = {"tf_poseidon_plan": VERSION, **head}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    entries = [json.dumps({"site": _filled(site), "decision": _filled(decision)})
               for site, decision in zip(sites, decisions, strict=True)]
    lists = []
    for key, values in others.items():
        if values:
            lists += [" ],", f' "{key}": [', ",\n".join(f"  {json.dumps(_filled(value))}" for value in values)]
    return "\n".join(["{", *lines, ' "sites": [', ",\n".join(f"  {s}" for s in entries), *lists, " ]", "}", ""])


def from_text(text: str) -> dict[str, Any]:
    """Returns the fields of a plan, by name; and its "digest", None if it has none.

    Raises:
        PoseidonError: If the text is not a plan, or has another version.
        KeyError, TypeError, ValueError, RecursionError: If it is damaged.
    """
    try:
        fields = json.loads(text, object_pairs_hook=_distinct)
        version = fields["tf_poseidon_plan"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise PlanError("This is not a plan of tf_poseidon; make one with plan.save(...) or "
                        "tf-poseidon explain --plan.") from error
    if version != VERSION or isinstance(version, bool):
        raise PlanError(f"The plan has version {shown(version)}, but this tf_poseidon reads {VERSION}; "
                        "make a new plan.")
    lists = {name: _value(list, fields.get(name, []), name) for name in ("sites", *_LISTS)}
    entries = [_value(dict, entry, "sites") for entry in lists["sites"]]
    return {"policy": _value(str, fields["policy"], "policy"),
            "cluster": Cluster(**_value(dict, fields["cluster"], "cluster")),
            "sites": tuple(_made(Site, entry["site"]) for entry in entries),
            "decisions": tuple(_decision(_value(dict, entry["decision"], "decision")) for entry in entries),
            "operations": _value(float | None, fields["operations"], "operations"),
            **{name: tuple(_made(kind, value) for value in lists[name]) for name, kind in _LISTS.items()},
            "row_shares": _value(tuple[int, ...], fields.get("row_shares", []), "row_shares"),
            "steps": _value(int, fields.get("steps", 1), "steps"),
            "threads": _value(int, fields.get("threads", 0), "threads"),
            "digest": _value(str | None, fields.get("digest"), "digest")}


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON; refuses one that says two things under one name."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(name for name in names if names.count(name) > 1))} occurs twice in an object")
    return fields


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _made(kind: Any, fields: Any) -> Any:
    """Returns a value of a dataclass, whose fields must have the types that it says.

    Raises:
        TypeError, ValueError: If they have not.
    """
    types, names = _types(kind), {key: name for (owner, name), key in _KEYS.items() if owner is kind}
    fields = _value(dict, fields, kind.__name__.lower())
    if renamed := fields.keys() & names.values():  # these have another key
        raise TypeError(f"{kind.__name__}.__init__() got an unexpected keyword argument '{min(renamed)}'")
    return kind(**{(name := names.get(key, key)): _value(types.get(name), value, key) for key, value in fields.items()})


def _value(kind: Any, value: Any, name: str) -> Any:
    """Returns a value of JSON as one of a type; `name` is that of its field."""
    if isinstance(kind, types.UnionType):  # "X | None"
        if value is None:
            return None
        kind = typing.get_args(kind)[0]
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _made(kind, value)
    if typing.get_origin(kind) is tuple:
        return tuple(_value(typing.get_args(kind)[0], part, name) for part in _value(list, value, name))
    if kind in _BELOW:
        is_right = (isinstance(value, int | kind) and not isinstance(value, bool) and 0 <= value < _BELOW[kind])
    elif kind is str:
        is_right = isinstance(value, str) and value.encode(errors="replace").decode() == value
    else:
        is_right = kind is None or isinstance(value, kind)
    if not is_right:
        raise ValueError(f"its '{name}' is {shown(value)}")
    return value


def _filled(value: Any) -> dict[str, Any]:
    """Returns the attributes that differ from their defaults, by name; for a decision, including what it carries."""
    filled: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if field.name == "carried":
            filled |= dataclasses.asdict(part) if part else {}
        elif part != field.default:
            is_value = dataclasses.is_dataclass(part) and not isinstance(part, type)
            filled[_KEYS.get((type(value), field.name), field.name)] = _filled(part) if is_value else part
    return filled


def _decision(fields: dict[str, Any]) -> Decision:
    names = {field.name for field in dataclasses.fields(Decision)} - {"carried"}
    decision = _made(Decision, {name: value for name, value in fields.items() if name in names})
    carried = {name: value for name, value in fields.items() if name not in names}
    if not carried:
        return decision
    kind = decision.by.carried
    if kind is None:
        raise ValueError(f"'{decision.scheme}' has no {', '.join(sorted(carried))}")
    return dataclasses.replace(decision, carried=_made(kind, carried))
