"""The report on all parts, paper.md, made only from their stored results."""

import json
import math

from evaluation.paper import claims
from evaluation.paper.claims import CLAIMS
from evaluation.paper.parts import ENGINES
from evaluation.paper.parts import LABELS
from evaluation.paper.parts import PARTS
from evaluation.paper.parts import point_of
from evaluation.paper.points import Point

_LITTLE = 0.15  # share of the bytes: factors that save less count as no saving


def load(path):
    """Returns the content of a JSON file.

    Raises:
        SystemExit: If it is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"The file '{path}' cannot be read ({error}), expected JSON: compute it again.") from error


def stored(out):
    """Returns the contents of all parts in a directory, by name."""
    return {name: load(out / "paper" / f"{name}.json") for name in PARTS}


def ours(claim, data):
    """Returns (emulated, simulated) of a claim, None where there is no such number."""
    if claim.unit == "nodes":
        return None, data["facts"]["largest"][f"{claim.model} {claim.nodes}"]
    row = data["rows"][point_of(claim).key]
    if claim.unit == "schemes":
        return None, row["schemes"]
    field = {"x": "speed_up", "s": "step_s", "Gb": "gb_mean", "Gb, worst": "gb_worst",
             "% waiting": "waiting"}[claim.unit]
    times = 100 if claim.unit == "% waiting" else 1
    emulated = row["emulated"] and row["emulated"].get(field)
    return emulated and times * emulated, times * row[field]


def compare(claim, data):
    """Returns (emulated, simulated, difference of the first of these that exists, text of the reason).

    Raises:
        SystemExit: If a checked claim differs by more than TOLERANCE without a reason, or a number is
            impossible.
    """
    emulated, simulated = ours(claim, data)
    value = simulated if emulated is None else emulated
    accelerators = claim.nodes * claim.gpus
    name = f"{claim.part}: {_name(claim)}, {_where(claim)}"
    most = accelerators * (1 + claims.TOLERANCE) if claim.unit == "x" else math.inf
    if not isinstance(value, str) and not (math.isfinite(value) and 0 <= value <= most):
        raise SystemExit(f"{name} has {value} {claim.unit}, expected a finite number, not negative, and a "
                         f"speed-up of at most {accelerators}: compute the part again.")
    difference, reason = claim.difference(value), ""
    if difference is not None and abs(difference) > claims.TOLERANCE:
        if claim.reason:
            reason = claims.REASONS[claim.reason].format(**data["facts"], efficiency=data["efficiency"])
        if emulated and abs(emulated / simulated - 1) > claims.TOLERANCE:
            reason += claims.EMULATION.format(value=abs(emulated / simulated - 1))
        if claim.is_checked and not reason:
            raise SystemExit(f"{name} has {value:.4g} {claim.unit}, expected the paper's {claim.number:g} "
                             f"within {claims.TOLERANCE:.0%}: give the claim a reason, or mend the "
                             "number.")
    return emulated, simulated, difference, reason.strip()


def _lines(header, rows):
    """Returns the lines of a Markdown table."""
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header),
            *("| " + " | ".join(row) + " |" for row in rows), ""]


def _show(value, unit):
    if value is None or isinstance(value, str):
        return value or ""
    text = {"s": f"{value:.3f} s", "x": f"{value:.2f}x", "% waiting": f"{value:.0f} %",
            "nodes": f"{value} nodes"}.get(unit)
    return text or f"{value:.2f} Gb"


def said(claim):
    """Returns the paper's number as the report prints it."""
    if claim.number is None:
        return claim.said
    text = "<= " * claim.is_at_most + _show(claim.number, claim.unit).replace(".00x", "x")
    return text + (f" ({claim.said})" if claim.said else "")


def _name(claim):
    return f"{LABELS.get(claim.model, claim.model)}, {LABELS[claim.system]}"


def _where(claim):
    if claim.unit == "nodes":
        return f"K = {claim.nodes}"
    return f"{claim.nodes}" + (f" x {claim.gpus}" if claim.gpus > 1 else "") + f" at {claim.gbps:g}"


def claims_table(name, data):
    """Returns the lines of the claims of a part, and the reasons below."""
    reasons, rows = [], []
    for claim in CLAIMS:
        if claim.part != name:
            continue
        emulated, simulated, difference, reason = compare(claim, data)
        if reason and reason not in reasons:
            reasons.append(reason)
        rows.append([_name(claim), _where(claim), said(claim),
                     f"{claim.grade}, {claim.source}" if claim.number is not None else claim.grade,
                     _show(emulated, claim.unit), _show(simulated, claim.unit),
                     "" if difference is None else f"{difference:+.1%}",
                     f"{reasons.index(reason) + 1}" if reason else ""])
    header = ["what", "nodes at Gbit/s", "paper", "grade", "emulated", "simulated", "differs", "why"]
    return [*_lines(header, rows), *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1)),
            *([""] if reasons else [])]


def curves_table(name, data):
    """Returns the lines of the table of a part's points: a row per cluster, a column per system."""
    part, groups = PARTS[name], {}
    for point in part.points:
        groups.setdefault((point.gbps, point.model, point.nodes, point.gpus), {})[point.system] = (
            data["rows"][point.key])
    systems, tables, saved = list(dict.fromkeys(p.system for p in part.points)), {}, {}
    for (gbps, model, nodes, gpus), found in groups.items():
        dense, hybrid = (found[s]["gb_mean"] for s in ("wfbp", "poseidon-paper"))
        share = 1 - hybrid / dense if nodes > 1 else 0.0  # within a node there is no network
        if nodes > 1:
            saved[model] = max(share, saved.get(model, 0.0))
        others = _best_other(found)
        tables.setdefault(gbps, []).append([
            LABELS[model], f"{nodes}" + (f" x {gpus}" if gpus > 1 else ""),
            *(part.cell(found[s]) for s in systems), f"{share:.0%}",
            f"{others / found['poseidon']['step_s']:.2f}"
        ])
    none = [f"{LABELS[model]} ({share:.0%})" for model, share in saved.items() if share < _LITTLE]
    lines = [
        f"{part.legend} *Saved*: bytes that factors save against WFBP. *Gain*: the shortest step of all systems "
        "but this project's, divided by ours." + (f" No gain is expected for {', '.join(none)}: factors save at "
                                                  "most this share of the bytes." if none else ""), ""
    ]
    for gbps, rows in sorted(tables.items()):
        lines += [f"Links of {gbps:g} Gbit/s:", ""] if len(tables) > 1 else []
        lines += _lines(["model", "nodes", *(LABELS[s] for s in systems), "saved", "gain"], rows)
    return lines


def _best_other(found):
    """Returns the shortest step of the systems other than this project; rows are by system."""
    return min(row["step_s"] for system, row in found.items() if not system.startswith("poseidon"))


def _worst_gain(parts):
    """Returns (step divided by that of the best other system, row) where ours gains least."""
    groups = {}
    for part in parts.values():
        for row in part["rows"].values():
            where = tuple(row[key] for key in ("model", "profile", "nodes", "gbps", "gpus"))
            groups.setdefault(where, {})[row["system"]] = row
    compared = [(found["poseidon"]["step_s"] / _best_other(found), found["poseidon"])
                for found in groups.values() if "poseidon" in found]
    return max(compared, key=lambda pair: pair[0])


def rates_table(facts):
    """Returns the lines on what a single rate of all links would explain."""
    rows = []
    for row in facts["explained"]:
        claim = CLAIMS[row["claim"]]
        rows.append([f"{_name(claim)}, {ENGINES[point_of(claim).profile]}", _where(claim),
                     f"{row['paper']:.2f}", claim.grade, f"{row['nominal']:.2f}",
                     f"{row['gbps']:.1f}" if row["gbps"] else "", f"{row['one_rate']:.2f}"])
    header = ["what", "nodes at Gbit/s", "paper", "grade", "ours", "rate it needs", "ours at one rate"]
    text = claims.RATES.format(**facts)
    return ["### Which single rate explains WFBP", "", text, "", *_lines(header, rows)]


def summary(parts):
    """Returns the lines at the top: what agrees, what does not, and why."""
    compared = [(c, *compare(c, parts[c.part])) for c in CLAIMS if c.is_checked]
    off = [row for row in compared if abs(row[3]) > claims.TOLERANCE]
    counts = {}
    for is_derived, suffix in ((False, ""), (True, "_d")):
        of = [row for row in compared if (row[0].grade == "D") == is_derived]
        counts |= {f"checked{suffix}": len(of), f"agree{suffix}": sum(row not in off for row in of)}
    rows = [row for part in parts.values() for row in part["rows"].values()]
    ratios = sorted(r["emulated"]["step_s"] / r["step_s"] for r in rows if r["emulated"])
    emulation = "All are simulated: docs/results/emulated.json has none of these points yet."
    if ratios:
        emulation = (f"{len(ratios)} points are emulated too; their steps take {ratios[0]:.2f} to "
                     f"{ratios[-1]:.2f} times the simulated ones, with a median of "
                     f"{ratios[len(ratios) // 2]:.2f}.")
    caffe, tensorflow = parts["scaling_caffe"], parts["scaling_tensorflow"]
    at = {f"{system}_{nodes}": part["rows"][Point("vgg19_22k", profile, system, nodes, 40).key]["speed_up"]
          for part, profile, nodes in ((caffe, "titan_x", 8), (tensorflow, "titan_x_tf", 32))
          for system in ("poseidon", "poseidon-paper", "wfbp")}
    exceptions = [f"{_name(row[0])}, {_where(row[0])} Gbit/s" for row in off if row[0].system == "poseidon-paper"]
    slower, row = _worst_gain(parts)
    text = claims.SUMMARY.format(
        **caffe | at | counts | caffe["facts"] | tensorflow["facts"], emulation=emulation, slower=slower - 1,
        where=f"{LABELS[row['model']]} on {row['nodes']} {_profile_label(row)} over {row['gbps']:g} Gbit/s",
        exceptions="; ".join(exceptions) or "nowhere",
        differ=_num_different_plans(rows))
    kinds = {}
    for row in compared:
        kind = LABELS[row[0].system] + {"Gb": ", bytes", "Gb, worst": ", bytes",
                                        "nodes": ", break-even"}.get(row[0].unit, "")
        kinds.setdefault(kind, []).append(row in off)
    return [text, "", *_lines(["what", "can be checked", "within 5 %"], [
        [kind, str(len(are_off)), str(are_off.count(False))] for kind, are_off in kinds.items()]),
        "These differ by more; the sections say why:", "",
        *_lines(["what", "nodes at Gbit/s", "paper", "grade", "ours", "differs", "section"], [
            [_name(c), _where(c), said(c), c.grade,
             _show(simulated if emulated is None else emulated, c.unit), f"{difference:+.0%}",
             PARTS[c.part].title.partition(",")[0]]
            for c, emulated, simulated, difference, _ in off])]


def _profile_label(row):
    return {"titan_x": "Titan X", "titan_x_tf": "Titan X", "a100": "A100"}.get(row["profile"], row["profile"])


def _num_different_plans(rows):
    """Returns at how many points our policy and the paper's Algorithm 1 make different plans."""
    plans = {}
    for row in rows:
        if row["schemes"]:
            where = tuple(row[key] for key in ("model", "profile", "nodes", "gbps", "gpus"))
            plans.setdefault(where, set()).add(row["schemes"])
    return sum(len(schemes) > 1 for schemes in plans.values())


def report(parts):
    """Returns the text of paper.md, from the stored parts only."""
    lines = ["# The paper's results beside ours", "", *summary(parts),
             "## How sure the paper's numbers are", "",
             *_lines(["grade", "meaning"], [list(item) for item in claims.GRADES.items()])]
    for name, part in PARTS.items():
        data = parts[name]
        lines += [f"## {part.title}", "", part.about.format(**data["facts"]), ""]
        lines += claims_table(name, data) + curves_table(name, data)
        if name == "scaling_caffe":
            lines += rates_table(data["facts"])
        lines += [f"![{part.title}](paper/{name}.png)", ""]
        if name in ("scaling_caffe", "scaling_tensorflow", "bandwidth"):
            lines += ["x is a number of the paper, + one that is not checked, a circle an emulated one.", ""]
        if name == "beyond":
            lines += ["![Where factors are fewer bytes](paper/break_even.png)", ""]
    return "\n".join(lines)
