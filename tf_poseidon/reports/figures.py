"""The figures of a report as data for plotly: bars of a row each, and spans of time in lanes.

All texts that a figure is given are plain; plotly would take some of their characters for markup.

Tests: tests/unit/test_reports.py.
"""

from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import html
import itertools
import textwrap
import typing

# Of what a rank does, and of how gradients travel, in the order in which bars are stacked.
_COLOURS = {
    "wait for data": "#ff9da7", "compute": "#4e79a7", "forward": "#a0cbe8", "backward": "#4e79a7", "wait": "#e15759",
    "hidden": "#a0cbe8", "hidden next": "#4e79a7", "exposed": "#e15759", "rebuild": "#b07aa1",
    "ps": "#59a14f", "sfb": "#f28e2b", "hfb": "#e15759", "sparse": "#edc948", "gather": "#499894",
    "broadcast": "#9d7660", "scatter": "#8cd17d", "shards": "#86bcb6", "return": "#f1ce63", "data": "#ff9da7",
    "calls": "#a5a5a5", "turn": "#4a4a4a", "down": "#9c755f", "up": "#d7b5a6", "across": "#79706e",
    "predicted": "#a5a5a5", "measured": "#4e79a7"}
_OTHER = "#bab0ac"

_NAME = 28  # characters of a label, which have half of a phone's screen
_ROW, _DOUBLE_ROW, _LANE, _SUBLANE, _GAP = 24, 32, 24, 8, 5  # pixels
_MOST_SUBLANES = 30  # from which on they become narrower
_ABOVE, _BELOW = 52, 48  # pixels of the legend, and of the axis
_LABELS = 1.2  # length of an axis with the labels of bars


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure for plotly: its traces, and its layout with a "height" in pixels."""

    traces: list[dict[str, typing.Any]]
    layout: dict[str, typing.Any]


class Bar(typing.NamedTuple):
    """A bar.

    Attributes:
        row: Number of its row.
        kind: What it is, in the legend; bars of a kind have the same colour.
        seconds: Its length.
        hover: Lines of text that appear when it is pointed at.
        label: Text at its end.
        is_second: Whether it is below another one of its row.
    """

    row: int
    kind: str
    seconds: float
    hover: Sequence[str]
    label: str = ""
    is_second: bool = False


class Span(typing.NamedTuple):
    """A span of time: `lane` is a key of the figure's lanes, `kind` and `hover` are the same as in `Bar`."""

    lane: Hashable
    kind: str
    begin: float
    end: float
    hover: Sequence[str]


def bars(rows: Sequence[str], all_bars: Iterable[Bar], axis: str, second: str = "", is_stacked: bool = False) -> Figure:
    """Returns a figure of horizontal bars.

    Args:
        rows: The names of its rows, from top to bottom.
        all_bars: The bars; where they are stacked, those of a row have different kinds.
        axis: What is measured, in milliseconds.
        second: What bars that are second are, if they have the same kinds as others, which are then stronger.
        is_stacked: Whether the bars of a row are stacked.
    """
    all_bars = list(all_bars)
    doubled = {bar.row for bar in all_bars if bar.is_second}
    traces = []
    for is_second, kind in itertools.product((False, True), _kinds(all_bars)):
        some = [bar for bar in all_bars if (bar.is_second, bar.kind) == (is_second, kind)]
        if not some:
            continue
        is_faint = is_second and bool(second)
        trace = _trace(f"{kind}, {second}" if is_faint else kind, kind, some) | {
            "x": [1e3 * bar.seconds for bar in some], "width": [0.4 if bar.row in doubled else 0.7 for bar in some],
            "y": [bar.row + 0.21 * ((bar.row in doubled) and (1 if is_second else -1)) for bar in some]}
        if is_faint:
            red, green, blue = bytes.fromhex(trace["marker"]["color"][1:])
            trace["marker"] = {"color": f"rgba({red},{green},{blue},0.45)"}
        if not is_stacked:
            trace |= {"text": [_shown(bar.label) for bar in some], "textposition": "outside", "textfont": {"size": 11},
                      "constraintext": "none", "cliponaxis": False}
        traces.append(trace)
    height = (_DOUBLE_ROW if doubled else _ROW) * len(rows)
    layout = _layout(axis, {row: name for row, name in enumerate(rows)}, height)
    layout["yaxis"] |= {"range": [len(rows) - 0.5, -0.5]}
    layout["xaxis"] |= {"fixedrange": True}
    if not is_stacked:  # room for labels at the ends
        longest = max((x for trace in traces for x in trace["x"]), default=0.0)
        layout["xaxis"] |= {"range": [0, _LABELS * longest or 1]}
    return Figure(traces, layout | {"barmode": "stack" if is_stacked else "overlay", "dragmode": False})


def spans(lanes: Mapping[Hashable, str], all_spans: Iterable[Span], axis: str) -> Figure:
    """Returns a figure of spans of time. Those of a lane that overlap are drawn below one another.

    Args:
        lanes: {key: name} of its lanes, from top to bottom; one without a name is a gap.
        all_spans: The spans.
        axis: What is measured, in milliseconds.
    """
    all_spans = list(all_spans)
    sublanes = _sublanes(all_spans)
    numbers: dict[Hashable, int] = {}
    for span, sublane in zip(all_spans, sublanes):
        numbers[span.lane] = max(numbers.get(span.lane, 0), sublane + 1)
    tops, heights, end = {}, {}, 0.0
    for lane, name in lanes.items():
        number = numbers.get(lane, 1)
        tops[lane] = end
        heights[lane] = max(_LANE, _SUBLANE * min(number, _MOST_SUBLANES)) if name else _GAP
        end += heights[lane] + _GAP
    traces = []
    for kind in _kinds(all_spans):
        group = [i for i, span in enumerate(all_spans) if span.kind == kind]
        some = [all_spans[i] for i in group]
        widths = [heights[span.lane] / numbers[span.lane] for span in some]
        traces.append(_trace(kind, kind, some) | {
            "base": [1e3 * span.begin for span in some], "x": [1e3 * (span.end - span.begin) for span in some],
            "y": [tops[span.lane] + (sublanes[i] + 0.5) * width for i, span, width in zip(group, some, widths)],
            "width": [0.9 * width for width in widths]})
    layout = _layout(axis, {tops[lane] + heights[lane] / 2: name for lane, name in lanes.items() if name}, end)
    layout["yaxis"] |= {"range": [end, 0], "fixedrange": True}
    return Figure(traces, layout | {"barmode": "overlay", "dragmode": "zoom"})


def _kinds(marks: Iterable[Bar | Span]) -> list[str]:
    """Returns the kinds in the order of the colours, which is that of legends."""
    order = {kind: number for number, kind in enumerate(_COLOURS)}
    return sorted({span.kind for span in marks}, key=lambda kind: (order.get(kind, len(order)), kind))


def _sublanes(spans_of_lane: Sequence[Span]) -> list[int]:
    """Returns for each span the first row of its lane that is free when it begins."""
    free: dict[Hashable, list[float]] = {}  # by lane: when its rows are
    result = [0] * len(spans_of_lane)
    for i in sorted(range(len(spans_of_lane)), key=lambda i: spans_of_lane[i].begin):
        ends = free.setdefault(spans_of_lane[i].lane, [])
        result[i] = next((row for row, end in enumerate(ends) if end <= spans_of_lane[i].begin), len(ends))
        ends[result[i]:result[i] + 1] = [spans_of_lane[i].end]
    return result


def _trace(name: str, kind: str, some: Sequence[Bar | Span]) -> dict[str, typing.Any]:
    return {"type": "bar", "orientation": "h", "name": name, "marker": {"color": _COLOURS.get(kind, _OTHER)},
            "hovertext": ["<br>".join(map(_shown, _wrapped(span.hover))) for span in some], "hoverinfo": "text"}


def _layout(axis: str, ticks: Mapping[float, str], height: float) -> dict[str, typing.Any]:
    return {"height": round(_ABOVE + height + _BELOW),
            "margin": {"l": 12, "r": 20, "t": _ABOVE, "b": _BELOW},
            "font": {"size": 12}, "hoverlabel": {"align": "left"}, "showlegend": True,
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom",
                       "traceorder": "normal"},
            "xaxis": {"title": {"text": f"{axis}, ms", "standoff": 8}},
            "yaxis": {"tickvals": list(ticks), "ticktext": [_shown(_shortened(name)) for name in ticks.values()],
                      "automargin": True, "ticks": "outside", "ticklen": 6, "tickcolor": "rgba(0,0,0,0)",
                      "showgrid": False, "zeroline": False, "fixedrange": True}}


def _shown(text: str) -> str:
    """Returns plain text as plotly's markup, which knows no quotes."""
    return html.escape(text, quote=False)


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME else f"…{name[1 - _NAME:]}"


def _wrapped(lines: Iterable[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, 70)]
