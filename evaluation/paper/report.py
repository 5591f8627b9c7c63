"""The tables of docs/results/paper.md, from claims.csv and points.csv beside it.

The text of paper.md is written by hand. Its comments say which table stands below each, up to `<!-- end -->`:
`claims PART` has what a part of the paper says, `differing` those claims that differ, `counts` how many agree, and
`points PART FORMAT` our results in a part, with the cell of a system in the format of `str.format`.
"""

import csv
import math
import re

TOLERANCE = 0.05
NOT_CHECKED = ("R?", "M")  # grades
LABELS = {"poseidon": "ours", "poseidon-paper": "Poseidon", "wfbp": "WFBP", "ps": "PS, no overlap",
          "tensorflow": "stock TF", "adam": "Adam", "horovod": "Horovod", "mwms": "MWMS",
          "googlenet": "GoogLeNet", "vgg19": "VGG19",
          "vgg19_22k": "VGG19-22K", "inception_v3": "Inception-V3", "resnet152": "ResNet-152",
          "resnet50": "ResNet-50", "bert_base_head": "BERT-base head"}
_FORMATS = {"speed_up": "{:{digits}}x", "step_ms": "{:,.0f} ms", "waiting": "{:.0%} waiting",
            "gb_mean": "{:{digits}} Gb", "gb_worst": "{:{digits}} Gb, worst node"}
_TABLE = re.compile(r"(<!-- (claims|differing|counts|points) ?(\w*) ?([^\n]*) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def load(path):
    """Returns the rows of a table, with numbers as such, and None for empty fields.

    Raises:
        SystemExit: If it cannot be read.
    """
    try:
        with open(path, newline="") as file:
            return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]
    except OSError as error:
        raise SystemExit(f"The table '{path}' cannot be read ({error.strerror}), expected one of the repository: "
                         "restore it.") from error


def save(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _value(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


def ours(claim):
    """Returns our result beside a claim: the emulated one where there is one."""
    return claim["simulated"] if claim["emulated"] is None else claim["emulated"]


def verdict(claim):
    """Returns "agrees", "differs", or "not checked" for what is recalled with doubt, missing or no number."""
    if claim["quantity"] == "schemes":
        return "agrees" if claim["simulated"] == claim["said"] else "differs"
    if claim["paper"] is None or claim["grade"] in NOT_CHECKED:
        return "not checked"
    return "agrees" if abs(ours(claim) / claim["paper"] - 1) <= TOLERANCE else "differs"


def problems(claims):
    """Returns what is wrong with our results, as sentences."""
    found = []
    for claim in claims:
        value, most = ours(claim), claim["nodes"] * claim["gpus"] * (1 + TOLERANCE)
        name = f"{claim['part']}: {_name(claim)}, {_where(claim)} has {value} {claim['quantity']}"
        if claim["quantity"] != "schemes" and not (
                math.isfinite(value) and 0 <= value <= (most if claim["quantity"] == "speed_up" else math.inf)):
            found.append(f"{name}, expected a number that is not negative, and a speed-up of at most the number of "
                         "accelerators: compute it again.")
        elif verdict(claim) == "differs" and not claim["why"]:
            found.append(f"{name}, expected {_said(claim)} within {TOLERANCE:.0%}: give the claim a reason, or mend "
                         "the number.")
    return found


def report(text, claims, points):
    """Returns the text of paper.md with the tables of these rows."""
    def table(match):
        begin, kind, part, cell = match.groups()
        if kind == "claims":
            lines = _claims([claim for claim in claims if claim["part"] == part])
        elif kind == "differing":
            lines = _claims([claim for claim in claims if verdict(claim) == "differs"])
        elif kind == "counts":
            lines = _counts(claims)
        else:
            lines = _points([point for point in points if point["part"] == part], cell)
        return begin + "\n" + "\n".join(lines) + "\n\n"

    return _TABLE.sub(table, text)


def _lines(header, rows):
    """Returns the lines of a Markdown table."""
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header),
            *("| " + " | ".join(row) + " |" for row in rows)]


def _show(value, quantity, digits=".2f"):
    return "" if value is None else _FORMATS.get(quantity, "{}").format(value, digits=digits)


def _said(claim):
    """Returns what the paper says."""
    number, said = _show(claim["paper"], claim["quantity"], "g"), claim["said"]
    return f"{number} ({said})" if number and said else number or said


def _name(row):
    return f"{LABELS[row['model']]}, {LABELS[row['system']]}"


def _where(row):
    return f"{row['nodes']}" + (f" x {row['gpus']}" if row["gpus"] > 1 else "") + f" at {row['gbps']:g}"


def _claims(claims):
    rows = []
    for claim in claims:
        rows.append([
            _name(claim), _where(claim), _said(claim), ", ".join(filter(None, (claim["grade"], claim["source"]))),
            *(_show(claim[how], claim["quantity"]) for how in ("emulated", "simulated")),
            f"{ours(claim) / claim['paper']:.3f}" if claim["paper"] else "", verdict(claim),
            f"{claim['needs_gbps']:.1f}" if claim["needs_gbps"] else "", claim["why"] or ""])
    return _lines(["what", "nodes at Gbit/s", "paper", "grade", "emulated", "simulated", "ours / paper", "verdict",
                   "needs Gbit/s", "why"], rows)


def _counts(claims):
    kinds = {}
    for claim in claims:
        if verdict(claim) != "not checked":
            what = {"gb_mean": "bytes", "gb_worst": "bytes", "schemes": "schemes"}.get(claim["quantity"], "time")
            for kind in (f"{LABELS[claim['system']]}, {what}", f"all, {what}"):
                kinds.setdefault(kind, []).append(verdict(claim) == "agrees")
    return _lines(["what", "checked", "within 5 %"], [
        [kind, f"{len(agree)}", f"{sum(agree)}"]
        for kind, agree in sorted(kinds.items(), key=lambda item: item[0].startswith("all"))])


def groups(points):
    """Returns points by (model, nodes, gpus, gbps, options), each as rows by system."""
    found = {}
    for point in points:
        where = tuple(point[key] for key in ("model", "nodes", "gpus", "gbps", "options"))
        found.setdefault(where, {})[point["system"]] = point
    return found


def gain(of_systems):
    """Returns the shortest step of all systems but this project's, divided by ours; None without any."""
    others = [point["step_ms"] for system, point in of_systems.items() if not system.startswith("poseidon")]
    return min(others) / of_systems["poseidon"]["step_ms"] if others and "poseidon" in of_systems else None


def _points(points, cell):
    systems = list(dict.fromkeys(point["system"] for point in points))
    rows = []
    for (model, nodes, gpus, gbps, options), found in groups(points).items():
        dense, factors = (found.get(system, {}).get("gb_mean") for system in ("wfbp", "poseidon-paper"))
        rows.append([
            LABELS[model], f"{gbps:g}",
            f"{nodes}" + (f" x {gpus}" if gpus > 1 else "") + (f", {options}" if options else ""),
            *(_cell(found[system], cell) if system in found else "" for system in systems),
            f"{1 - factors / dense:.0%}" if dense and factors and nodes > 1 else "",
            f"{gain(found):.2f}" if gain(found) else ""])
    return _lines(["model", "Gbit/s", "nodes", *(LABELS[system] for system in systems), "saved", "gain"], rows)


def _cell(point, cell):
    emulated = point["emulated_speed_up"]
    return cell.format(**point) + (f" ({emulated:.2f})" if emulated and "speed_up" in cell else "")
