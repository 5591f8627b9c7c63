"""Plans as files: JSON with one site, or other exchange, to a line, so that people and `diff` can read it."""

import dataclasses
import json
import pathlib

from tf_poseidon.errors import PoseidonError
from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.exchange import Exchange
from tf_poseidon.planning.plan import Decision
from tf_poseidon.planning.plan import Plan
from tf_poseidon.planning.policies import POLICIES
from tf_poseidon.planning.site import Factors
from tf_poseidon.planning.site import Site
from tf_poseidon.planning.site import Slices
from tf_poseidon.planning.whole_op import WholeOp

VERSION = 1


def save(plan, path):
    """Writes a plan.

    Args:
        plan: The `Plan`.
        path: Where to; a file that is there is replaced.

    Raises:
        PoseidonError: If the plan is that of a graph that was not rewritten.
    """
    if plan.refusal:
        raise PoseidonError(f"There is no plan to save, since the graph was not rewritten: "
                            f"{plan.refusal}")
    pathlib.Path(path).write_text(to_text(plan))


def load(path):
    """Returns the plan that `save` has written.

    Raises:
        PoseidonError: If the file is no plan, one of another version, or was changed.
    """
    try:
        text = pathlib.Path(path).read_text()
    except (OSError, TypeError, UnicodeDecodeError) as error:
        raise PoseidonError(f"The plan '{path}' cannot be read: {error}.") from error
    try:
        return from_text(text)
    except PoseidonError as error:
        raise PoseidonError(f"'{path}': {error}") from error


def to_text(plan):
    """Returns a plan as text."""
    head = {"tf_poseidon_plan": VERSION, "digest": plan.digest, "policy": plan.policy,
            "cluster": dataclasses.asdict(plan.cluster), "operations": plan.operations}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    sites = [json.dumps({"site": _filled(site), "decision": _filled(decision)})
             for site, decision in zip(plan.sites, plan.decisions, strict=True)]
    others = []
    for key in ("exchanges", "whole"):
        values = [f"  {json.dumps(_filled(value))}" for value in getattr(plan, key)]
        others += [" ],", f' "{key}": [', ",\n".join(values)] if values else []
    return "\n".join(["{", *lines, ' "sites": [', ",\n".join(f"  {s}" for s in sites), *others, " ]", "}", ""])


def from_text(text):
    """Returns the plan that `to_text` has made text of.

    Raises:
        PoseidonError: If it is no plan, one of another version, or was changed.
    """
    try:
        fields = json.loads(text)
        version = fields["tf_poseidon_plan"]
    except (ValueError, KeyError, TypeError) as error:
        raise PoseidonError("This is not a plan of tf_poseidon; make one with plan.save(...) or "
                            "tf-poseidon explain --plan.") from error
    if version != VERSION:
        raise PoseidonError(f"The plan has version {version}, but this tf_poseidon reads {VERSION}; "
                            "make the plan anew.")
    try:
        sites = tuple(_site(dict(entry["site"])) for entry in fields["sites"])
        plan = Plan(fields["policy"], Cluster(**fields["cluster"]), sites,
                    tuple(_decision(dict(entry["decision"])) for entry in fields["sites"]),
                    fields["operations"], exchanges=tuple(_exchange(dict(e)) for e in fields.get("exchanges", ())),
                    whole=tuple(WholeOp(**op) for op in fields.get("whole", ())))
        digest = fields.get("digest", plan.digest)
        if digest == plan.digest:
            _check(plan)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PoseidonError(f"The plan is damaged ({error!r}); make it anew.") from error
    if digest != plan.digest:
        raise PoseidonError(f"The plan was changed after it was saved: its digest says {digest}, but "
                            f"it is {plan.digest}; if that was on purpose, remove its line \"digest\".")
    return plan


def _check(plan):
    """Refuses what a person could have written, but nobody could follow.

    Raises:
        PoseidonError: With the first thing that is wrong.
        ValueError: If a value has another type.
    """
    decisions = {d.site: d for d in plan.decisions}
    if len(decisions) < len(plan.sites) or plan.policy not in POLICIES:
        raise ValueError("its sites are not distinct" if plan.policy in POLICIES else plan.policy)
    str(plan)  # numbers have to be numbers
    for site, decision in zip(plan.sites, plan.decisions, strict=True):
        leader = decisions.get(decision.rides_on)
        is_possible = {
            "ps": decision.rides_on is None,
            "sparse": site.slices is not None and decision.rides_on is None,
            "sfb": site.factors is not None and decision.rides_on is None
                   or leader is not None and leader.scheme == "sfb" and leader.rides_on is None
                   and site.bias_of == leader.site,
        }.get(decision.scheme, False)
        if decision.site != site.name or not is_possible:
            with_ = f" with '{decision.rides_on}'" if decision.rides_on else ""
            raise PoseidonError(f"The plan lets '{site.name}' travel by '{decision.scheme}'{with_}, "
                                "which is not possible; make it 'ps'.")


def _filled(value):
    """Returns the attributes that are not at their defaults, by name."""
    return {field.name: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v
            for field in dataclasses.fields(value)
            if (v := getattr(value, field.name)) != field.default}


def _site(fields):
    shape = fields.get("shape")
    fields["shape"] = None if shape is None else tuple(shape)
    for name, kind in (("factors", Factors), ("slices", Slices)):
        if fields.get(name) is not None:
            fields[name] = kind(**fields[name])
    return Site(**fields)


def _exchange(fields):
    shape = fields.get("shape")
    return Exchange(**fields | {"shape": None if shape is None else tuple(shape)})


def _decision(fields):
    for name in ("cost", "runner_up_cost"):
        if fields.get(name) is not None:
            fields[name] = Cost(**fields[name])
    return Decision(**fields)
