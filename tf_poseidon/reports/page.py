"""The page of a report: one HTML file that loads nothing else, with plotly.js and the figures' data inside.

plotly, an optional package, is imported when a report is asked for.

Tests: tests/unit/test_reports.py.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import html
import json
import os
import typing

from tf_poseidon.base import files
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.reports.figures import Figure

SUFFIX = ".html"

# A number is a pair: the text, and the value by which its column is sorted.
Cell = str | tuple[str, float]


def check(path: str | os.PathLike[str]) -> None:
    """Checks that a report can be made.

    Args:
        path: Its file, for the message.

    Raises:
        PoseidonError: If plotly is not installed.
    """
    try:
        import plotly.graph_objects
        import plotly.offline  # noqa: F401
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        raise ConfigurationError(f"The report {files.quoted(path)} is drawn by plotly, but there is no module "
                                 f"'{missing}'; run pip install \"tf_poseidon[report]\".") from error


def page(title: str, parts: Iterable[str | Figure]) -> str:
    """Returns a page as text.

    Args:
        title: Its title, as plain text.
        parts: What is on it, from top to bottom: HTML of the functions below, and figures.
    """
    import plotly.offline
    body = [part if isinstance(part, str) else _figure(number, part) for number, part in enumerate(parts)]
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', f"<title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style>", "</head>", "<body>", "<main>", *body, "</main>",
        f"<script>{plotly.offline.get_plotlyjs()}</script>", f'<script>"use strict";\nconst THEMES = '
        f"{json.dumps(_THEMES)};\n{_SCRIPT}</script>", "</body>", "</html>", ""])


def element(name: str, text: str, style: str = "") -> str:
    """Returns an element that holds plain text.

    Args:
        name: Name of the element, such as "h2".
        text: The text.
        style: A class of the style sheet: "verdict", "warning" or "note".
    """
    chosen = f' class="{style}"' if style else ""
    return f"<{name}{chosen}>{html.escape(text)}</{name}>"


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Returns the most important numbers, side by side: pairs of a value and what it is."""
    return "\n".join(['<dl class="tiles">', *(f"<div>{element('dt', what)}{element('dd', value)}</div>"
                                              for value, what in values), "</dl>"])


def bullets(items: Iterable[str]) -> str:
    """Returns a list of plain texts."""
    return "\n".join(["<ul>", *(element("li", item) for item in items), "</ul>"])


def details(summary: str, text: str) -> str:
    """Returns a text in columns that is shown when its summary is clicked."""
    return f"<details>{element('summary', summary)}{element('pre', text)}</details>"


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Returns a table that is sorted by the column whose header is clicked."""
    heads = "".join(f'<th><button type="button">{html.escape(name)}</button></th>' for name in header)
    lines = ["".join(f"<td>{html.escape(cell)}</td>" if isinstance(cell, str) else
                     f'<td class="number" data-value="{cell[1]!r}">{html.escape(cell[0])}</td>' for cell in row)
             for row in rows]
    return "\n".join(['<div class="wide"><table>', f"<thead><tr>{heads}</tr></thead>", "<tbody>",
                      *(f"<tr>{line}</tr>" for line in lines), "</tbody>", "</table></div>"])


def _figure(number: int, figure: Figure) -> str:
    import plotly.graph_objects
    # Checks the names and values of all attributes.
    checked = plotly.graph_objects.Figure(figure.traces, {**figure.layout, "template": _THEMES["light"]})
    # As in JSON, "<" may be written by its number, so that no text ends the script.
    data = typing.cast(str, checked.to_json()).replace("<", "\\u003c")
    name = f"figure-{number}"
    return (f'<div class="figure" id="{name}" style="height: {figure.layout["height"]}px"></div>\n'
            f'<script type="application/json" id="{name}-data">{data}</script>')


# The page may run what is written in it, and load nothing, whatever plotly.js may try. It saves figures by data: and
# blob: URLs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def _theme(text: str, line: str, background: str) -> dict[str, typing.Any]:
    axis = {"gridcolor": line, "linecolor": line, "zerolinecolor": line}
    return {"layout": {"font": {"color": text}, "paper_bgcolor": background, "plot_bgcolor": background,
                       "hoverlabel": {"bgcolor": background, "bordercolor": line, "font": {"color": text}},
                       "xaxis": axis, "yaxis": axis, "legend": {"bgcolor": "rgba(0,0,0,0)"}}}


# The same colours as in the style sheet.
_THEMES = {"light": _theme("#1f2933", "#dde3ea", "#ffffff"), "dark": _theme("#dfe5ec", "#3a4552", "#1b222b")}

_STYLE = """
:root { color-scheme: light dark; --text: #1f2933; --faint: #5b6875; --line: #dde3ea; --card: #ffffff;
  --page: #f3f5f8; --warning: #b42318; --warning-card: #fdecea; }
@media (prefers-color-scheme: dark) {
  :root { --text: #dfe5ec; --faint: #9aa7b5; --line: #3a4552; --card: #1b222b; --page: #12171d;
    --warning: #ff9d92; --warning-card: #3a1d1b; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 60rem; }
.verdict { font-size: 1.15rem; }
.warning { padding: .7rem 1rem; border-left: 4px solid var(--warning); border-radius: 4px; color: var(--warning);
  background: var(--warning-card); max-width: none; }
.note { color: var(--faint); font-size: .9rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .7rem; margin: 1rem 0; }
.tiles > div, .figure, .wide, details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tiles > div { display: flex; flex-direction: column-reverse; justify-content: flex-end; padding: .7rem 1rem; }
dt { color: var(--faint); font-size: .85rem; }
dd { margin: 0; font-size: 1.5rem; font-weight: 600; }
.figure { margin: .8rem 0; overflow: hidden; }
.wide { overflow: auto; max-height: 40rem; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; background: var(--card); text-align: left; box-shadow: inset 0 -1px var(--line); }
th button { all: unset; cursor: pointer; font-weight: 600; padding: .45rem .7rem; white-space: nowrap; }
th button:focus-visible { outline: 2px solid; outline-offset: -2px; }
th[aria-sort=ascending] button::after { content: " ▲"; }
th[aria-sort=descending] button::after { content: " ▼"; }
td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 30rem; }
td.number { text-align: right; }
details { margin: .6rem 0; padding: .5rem 1rem; }
summary { cursor: pointer; }
pre { overflow: auto; max-height: 40rem; font: .8rem/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
"""

# Figures follow the colours that the reader prefers, also when these change.
_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const figures = Array.from(document.querySelectorAll(".figure"));
const theme = () => THEMES[dark.matches ? "dark" : "light"];
for (const figure of figures) {
  const {data, layout} = JSON.parse(document.getElementById(figure.id + "-data").textContent);
  Plotly.newPlot(figure, data, {...layout, template: theme()},
    {responsive: true, displaylogo: false, displayModeBar: innerWidth < 640 ? false : "hover",
     modeBarButtons: [["toImage", ...(layout.dragmode ? ["zoom2d", "pan2d", "resetScale2d"] : [])]]});
}
dark.addEventListener("change", () => figures.forEach(figure => Plotly.relayout(figure, {template: theme()})));

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0], column = head.cellIndex;
    const sign = head.ariaSort === "ascending" ? -1 : 1;
    const value = row => row.cells[column].dataset.value, text = row => row.cells[column].textContent;
    const compare = (a, b) => value(a) === undefined || value(b) === undefined
      ? text(a).localeCompare(text(b)) : value(a) - value(b);
    for (const other of head.parentElement.cells) other.ariaSort = null;
    head.ariaSort = sign === 1 ? "ascending" : "descending";
    body.append(...Array.from(body.rows).sort((a, b) => sign * compare(a, b)));
  });
}
"""
