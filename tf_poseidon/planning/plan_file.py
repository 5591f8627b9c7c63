"""Plans as text: JSON with one line per site or other exchange, so that people and `diff` can read it."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
from typing import Any

from tf_poseidon.errors import PlanError
from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.decision import Decision
from tf_poseidon.planning.exchange import Exchange
from tf_poseidon.planning.schemes import SCHEMES
from tf_poseidon.planning.site import Factors
from tf_poseidon.planning.site import Site
from tf_poseidon.planning.site import Slices
from tf_poseidon.planning.whole_op import WholeOp

VERSION = 1

# The lists of a plan besides its sites; each value is a line.
_LISTS = ("exchanges", "whole")


def to_text(head: Mapping[str, Any], sites: Sequence[Site], decisions: Sequence[Decision],
            exchanges: Sequence[Exchange], whole: Sequence[WholeOp]) -> str:
    """Returns a plan as text; `head` has its fields that occur once."""
    head = {"tf_poseidon_plan": VERSION, **head}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    entries = [json.dumps({"site": _filled(site), "decision": _filled(decision)})
               for site, decision in zip(sites, decisions, strict=True)]
    others = []
    for key, values in zip(_LISTS, (exchanges, whole)):
        if values:
            others += [" ],", f' "{key}": [', ",\n".join(f"  {json.dumps(_filled(value))}" for value in values)]
    return "\n".join(["{", *lines, ' "sites": [', ",\n".join(f"  {s}" for s in entries), *others, " ]", "}", ""])


def from_text(text: str) -> dict[str, Any]:
    """Returns the fields of a plan, by name; and its "digest", None if it has none.

    Raises:
        PoseidonError: If the text is not a plan, or has another version.
        KeyError, TypeError, ValueError, AttributeError: If it is damaged.
    """
    try:
        fields = json.loads(text)
        version = fields["tf_poseidon_plan"]
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError("This is not a plan of tf_poseidon; make one with plan.save(...) or "
                        "tf-poseidon explain --plan.") from error
    if version != VERSION:
        raise PlanError(f"The plan has version {version}, but this tf_poseidon reads {VERSION}; "
                        "make a new plan.")
    return {"policy": fields["policy"], "cluster": Cluster(**fields["cluster"]),
            "sites": tuple(_site(dict(entry["site"])) for entry in fields["sites"]),
            "decisions": tuple(_decision(dict(entry["decision"])) for entry in fields["sites"]),
            "operations": fields["operations"],
            "exchanges": tuple(_exchange(dict(e)) for e in fields.get("exchanges", ())),
            "whole": tuple(WholeOp(**op) for op in fields.get("whole", ())),
            "digest": fields.get("digest")}


def _filled(value: Any) -> dict[str, Any]:
    """Returns the attributes that differ from their defaults, by name; for a decision, including what it carries."""
    filled: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if field.name == "carried":
            filled |= dataclasses.asdict(part) if part else {}
        elif part != field.default:
            filled[field.name] = (
                dataclasses.asdict(part) if dataclasses.is_dataclass(part) and not isinstance(part, type) else part)
    return filled


def _site(fields: dict[str, Any]) -> Site:
    shape = fields.get("shape")
    fields["shape"] = None if shape is None else tuple(shape)
    for name, kind in (("factors", Factors), ("slices", Slices)):
        if fields.get(name) is not None:
            fields[name] = kind(**fields[name])
    return Site(**fields)


def _exchange(fields: dict[str, Any]) -> Exchange:
    shape = fields.get("shape")
    return Exchange(**fields | {"shape": None if shape is None else tuple(shape)})


def _decision(fields: dict[str, Any]) -> Decision:
    for name in ("cost", "runner_up_cost"):
        if fields.get(name) is not None:
            fields[name] = Cost(**fields[name])
    known = {field.name for field in dataclasses.fields(Decision)} - {"carried"}
    carried = {name: fields.pop(name) for name in set(fields) - known}
    if carried:
        kind = SCHEMES[fields["scheme"]].carried
        if kind is None:
            raise ValueError(f"'{fields['scheme']}' has no {', '.join(sorted(carried))}")
        fields["carried"] = kind(**carried)
    return Decision(**fields)
