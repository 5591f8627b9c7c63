"""Reports: their figures have the values of plans and timelines, and a browser draws them without a network."""

import dataclasses
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import threading

import numpy as np
from printed_durations import seconds_of
import pytest
from small_plans import dense_site
from small_plans import plan_for

from tf_poseidon import planning
from tf_poseidon.commands import cli
from tf_poseidon.errors import PoseidonError
from tf_poseidon.explanations import plan_page
from tf_poseidon.job.communicator import join_loopback
from tf_poseidon.reports import texts
from tf_poseidon.timelines import recording
from tf_poseidon.timelines import step_table as table_lib
from tf_poseidon.timelines import timeline_page
from tf_poseidon.timelines.recorded_steps import Event
from tf_poseidon.timelines.recorded_steps import Rank
from tf_poseidon.timelines.recorded_steps import SitePlace

SCRIPT = "<script>alert(1)</script>"


def plan(number=3, policy="auto", steps=1, **options):
    """Returns a plan for gradients, a bias with a bad name, rows that the step waits for, and an op that runs whole."""
    sites = [dataclasses.replace(dense_site(512, *((520, 8) if i % 2 else (8, 64)), name=f"{i}/kernel"), needed=1e6 * i,
                                 operations=1e9 - 1e6 * i) for i in range(number)]
    bias = planning.Site(f"1/{SCRIPT}", "float32", 4, (520,), refusal="alone", bias_of="1/kernel", operations=1e9 - 1e6)
    rows = planning.Exchange("rows/x", "gather", "float32", 4, (30, 4), 1e6, 2, is_waited_for=True)
    unknown = planning.Exchange("value/y", "broadcast", "int64", 8, None, 2e6)
    made = plan_for([*sites, bias], policy, 4, operations=1e9, exchanges=(rows, unknown), steps=steps, **options)
    return dataclasses.replace(made, whole=(planning.WholeOp(f"{SCRIPT}sort", "TopKV2", 64),),
                               divided=(planning.DividedWeight(f"{SCRIPT}head", "float32", (512, 40), 1),))


def figures_of(text):
    """Returns the figures of a page as plotly gets them."""
    found = re.findall(r'<script type="application/json" id="figure-\d+-data">(.*?)</script>', text, re.DOTALL)
    return list(map(json.loads, found))


def bars_of(figure):
    """Returns {(name of the row, name of the trace): length of the bar}; no bar is in another's place."""
    names, found = figure["layout"]["yaxis"]["ticktext"], {}
    for trace in figure["data"]:
        for x, y in zip(trace["x"], trace["y"], strict=True):
            key = names[round(y)], trace["name"]
            assert key not in found
            found[key] = x
    return found


def spans_of(figure):
    """Returns [(name of the trace, begin, length)], sorted."""
    return sorted((trace["name"], base, x) for trace in figure["data"] for base, x in zip(trace["base"], trace["x"]))


# ---- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds, text", [
    (None, "unknown"), (0, "0 s"), (1.234e-7, "0.123 µs"), (57.84e-6, "57.8 µs"), (0.00099949, "999 µs"),
    (0.0009996, "1 ms"), (0.0123, "12.3 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (29.9, "29.9 s"), (99.94, "99.9 s"),
    (99.96, "1.67 min"), (600, "10 min"), (123_456, "2,058 min")])
def test_durations_have_three_digits(seconds, text):
    assert texts.duration(seconds) == text
    assert text == "unknown" or seconds_of(text) == pytest.approx(seconds, rel=0.005)


@pytest.mark.parametrize("policy", planning.POLICIES)
@pytest.mark.parametrize("steps", [1, 3])
def test_spans_are_the_expected_step(policy, steps):
    """A rank does one thing after another, and so does its link, for as long as the plan says."""
    made = plan(policy=policy, steps=steps)
    assert made.steps == steps
    spans = made.spans()
    rank, link = ([span for span in spans if (span.kind == "transfer") == is_link] for is_link in (False, True))
    assert rank[0].begin == 0 and rank[-1].end / steps == made.step_seconds
    for before, after in zip(rank, rank[1:]):
        assert before.end == after.begin
    for before, after in zip(link, link[1:]):
        assert before.end <= after.begin
    seconds = {}
    for span in link:
        seconds[span.site] = seconds.get(span.site, 0.0) + span.end - span.begin
    costs = {d.site: d.cost for d in made.decisions} | {e.site: e.cost(made.cluster) for e in made.exchanges}
    assert seconds == {site: pytest.approx(steps * cost.transfer) for site, cost in costs.items()
                       if cost is not None and cost.transfer}
    assert sum(span.end - span.begin for span in rank if span.kind == "compute") == pytest.approx(
        steps * made.compute_seconds)


def test_figures_have_the_numbers_of_the_plan():
    made = plan()
    predictions = made.predictions()
    step, times = figures_of(plan_page.html_report({"": made}))
    schemes = {each["name"]: each["scheme"] for each in predictions["variables"] + predictions["exchanges"]}
    assert spans_of(step) == sorted(
        (schemes[span.site] if span.kind == "transfer" else span.kind, 1e3 * span.begin, 1e3 * (span.end - span.begin))
        for span in made.spans())
    expected = {("rows/x", "gather"): 1e3 * predictions["exchanges"][0]["cost"]["seconds"]}
    for variable in predictions["variables"]:
        if not variable["rides_on"] and variable["scheme"] != "columns":  # which sends nothing itself
            expected[variable["name"], variable["scheme"]] = 1e3 * variable["cost"]["seconds"]
        if variable["runner_up"]:
            expected[variable["name"], f"{variable['runner_up']}, not chosen"] = (
                1e3 * variable["runner_up_cost"]["seconds"])
    assert bars_of(times) == expected and {"ps", "sfb", "gather"} < {name for _, name in expected}
    # In the order of backpropagation.
    assert times["layout"]["yaxis"]["ticktext"] == ["rows/x", "2/kernel", "1/kernel", "0/kernel"]


def test_the_rest_of_a_large_model_is_added_up():
    made = plan(number=200)
    _, times = figures_of(plan_page.html_report({"": made}))
    found = bars_of(times)
    names = times["layout"]["yaxis"]["ticktext"]
    rest = [name for name in names if "others" in name]
    assert len(names) == 40 + len(rest) and rest
    chosen = sum(x for (_, trace), x in found.items() if "not chosen" not in trace)
    costs = [d.cost for d in made.decisions] + [e.cost(made.cluster) for e in made.exchanges]
    assert chosen == pytest.approx(1e3 * sum(cost.seconds for cost in costs if cost))
    assert sum(int(name.split()[0]) for name in rest) == 201 - 40


def test_the_page_has_everything_that_is_printed():
    made = plan(steps=2)
    made = dataclasses.replace(made, overlap="Steps overlap.")
    text = plan_page.html_report({"": made})
    for row in made.predictions()["variables"]:
        assert f"<td>{row['name'].replace('<', '&lt;').replace('>', '&gt;')}</td>" in text
        assert f"{row['cost']['bytes']:,.0f}</td>" in text
    for words in ("Steps overlap.", "TopKV2 &#x27;&lt;script&gt;", "later ops need the values of all ranks", "SLOWER",
                  "A step of 2 that overlap is expected to take"):
        assert (words in text) == (words != "SLOWER"), words
    slow = dataclasses.replace(plan(), cluster=planning.Cluster(4, gflops=1e6))
    assert slow.is_slower_than_one_process and "SLOWER than one process" in plan_page.html_report({"": slow})


def test_plans_without_predictions():
    unknown = dataclasses.replace(plan(), operations=None)
    assert "The arithmetic of this step is unknown" in (text := plan_page.html_report({"": unknown}))
    assert len(figures_of(text)) == 1
    refused = planning.Plan("auto", planning.Cluster(2), refusal="it has a <loop>")
    text = plan_page.html_report({"first": refused, "second": plan()})
    assert "gradients travel dense: it has a &lt;loop&gt;" in text and "Step &#x27;second&#x27;" in text


def test_names_are_text():
    text = plan_page.html_report({SCRIPT: plan(), "b": plan()})
    assert SCRIPT not in text and text.count("&lt;script&gt;alert(1)") >= 3
    host = timeline_page.html_report([dataclasses.replace(rank, host=SCRIPT) for rank in ranks()], 0)
    assert SCRIPT not in host
    assert "rank 0 on &lt;script&gt;alert(…" in figures_of(host)[0]["layout"]["yaxis"]["ticktext"] or any(
        "&lt;script&gt;" in each for each in figures_of(host)[0]["data"][0]["hovertext"])


# ---- timelines -----------------------------------------------------------------------------------


def ranks(number=2):
    """Ranks with a step of two gradients, one sent as factors, that the second step repeats; the last rank is late."""
    def events(late):
        return tuple(event for begin in (0, 12, 24) for event in (
            Event("sfb", "b", begin + 3, begin + 9, 8), Event("ps", "a", begin + 7 + late, begin + 11, 4),
            Event("rebuild", "b", begin + 9, begin + 10), Event("rebuild", "bias", begin + 10.5, begin + 12),
            Event("calls", "x", begin + 1, begin + 2)))
    return [Rank("host", 0.0, tuple(sorted(events(2 * (i == number - 1)), key=lambda event: event.begin)))
            for i in range(number)]


def test_figures_have_the_numbers_of_the_timeline():
    recorded, made = ranks(), plan_for([dense_site(8, 8, 1024, name="a"), dense_site(512, 512, 8, name="b")], "auto", 2)
    text = timeline_page.html_report(recorded, 0, made)
    of_ranks, step, exchanges, predictions = figures_of(text)
    assert bars_of(of_ranks) == {(f"rank {i} on host", kind): 1e3 * seconds for i in range(2)
                                 for kind, seconds in table_lib.parts(recorded[i]).items() if seconds}
    assert "Rank 1 on host computes longest: 9 s, 2 s more than the median rank" in text
    # All steps take 12 s.
    expected = []
    for rank in recorded:
        each = rank.steps[1]
        expected += [(part.kind, 1e3 * (part.begin - 12), 1e3 * (part.end - part.begin)) for part in each.segments]
        expected += [(event.row, 1e3 * (event.begin - 12), 1e3 * (event.end - event.begin)) for event in rank.events
                     if 12 <= event.begin < 24]
    assert spans_of(step) == sorted(expected)
    assert step["layout"]["yaxis"]["ticktext"] == [
        "rank 0: compute", "ps", "sfb", "calls", "rebuild", "rank 1: compute", "ps", "sfb", "calls", "rebuild"]
    found = table_lib.summary(recorded, 0, made)
    assert bars_of(exchanges) == {(row.site, kind): 1e3 * seconds for row in found.rows for kind, seconds in (
        ("hidden", row.hidden), ("exposed", row.exposed), ("rebuild", row.rebuild)) if seconds}
    assert bars_of(predictions) == {(row.site, kind): 1e3 * seconds for row in found.rows if row.predicted
                                    for kind, seconds in (("predicted", row.predicted), ("measured", row.measured))}
    assert len(bars_of(predictions)) == 4
    assert table_lib.table(recorded, 1, made).splitlines()[2] in text


def test_the_rank_whose_data_come_late_is_named():
    late = [dataclasses.replace(rank, events=tuple(sorted(
        [*rank.events, *(Event("data", "", begin, begin + (2 if number else 0.5)) for begin in (0, 12, 24))],
        key=lambda event: event.begin))) for number, rank in enumerate(ranks())]
    text = timeline_page.html_report(late, 0)
    of_ranks, step, _ = figures_of(text)
    assert bars_of(of_ranks)["rank 0 on host", "wait for data"] == 500
    assert spans_of(step).count(("wait for data", 0, 500)) == spans_of(step).count(("data", 0, 500)) == 1
    for words in ("Rank 1 on host waits longest for data: 2 s, 1.5 s more than the median rank",
                  "A step of rank 0 takes 12 s: 500 ms of waiting for data, 6.5 s for computing",
                  "waiting for data, 4.2\N{NO-BREAK SPACE}% of the step"):
        assert words in text, words


def test_steps_that_overlap_are_shown_together():
    events = (Event("ps", "upper", 2, 6), Event("ps", "lower", 3, 5),
              Event("ps", "upper", 7.5, 11.5, step=1), Event("ps", "lower", 8.5, 10.5, step=1))
    rank = Rank("host", 0.0, events, places={"lower": SitePlace(3, 0), "upper": SitePlace(2, 0.5)})
    text = timeline_page.html_report([rank], 0)
    _, step, exchanges = figures_of(text)
    assert "Steps 1 to 2, which overlap, of 2." in text
    assert spans_of(step) == sorted(
        [(part.kind, 1e3 * part.begin, 1e3 * (part.end - part.begin)) for each in rank.steps for part in each.segments]
        + [("ps", 1e3 * event.begin, 1e3 * (event.end - event.begin)) for event in events])
    assert bars_of(exchanges)["upper", "hidden next"] == 250  # as in the table of test_timeline.py


def test_exchanges_at_the_same_time_do_not_cover_each_other():
    _, step, _ = figures_of(timeline_page.html_report([Rank("host", 0.0, (
        Event("ps", "a", 1, 4), Event("ps", "b", 2, 3), Event("ps", "c", 3, 5)))], 0))
    trace, = (trace for trace in step["data"] if trace["name"] == "ps")
    a, b, c = trace["y"]
    assert b == c and b - a > max(trace["width"]) > 0


def test_many_ranks_and_none():
    text = timeline_page.html_report(ranks(20), 0)
    of_ranks, step, *_ = figures_of(text)
    assert len(of_ranks["layout"]["yaxis"]["ticktext"]) == 20 and "8 of 20 ranks are shown." in text
    assert [name for name in step["layout"]["yaxis"]["ticktext"] if "rank" in name][-1] == "rank 19: compute"
    assert "No step was recorded" in timeline_page.html_report([Rank("host", 0.0, ())], 0)


def test_the_rest_of_many_exchanges_is_a_mean():
    """The step waits for 50 exchanges, one second for each, and as long again for the last ten."""
    events = tuple(Event("ps", f"{i:02}", 1 + i / 64, 100 + i + max(0, i - 39)) for i in range(50))
    *_, exchanges = figures_of(timeline_page.html_report([Rank("host", 0.0, events)], 0))
    found = bars_of(exchanges)
    names = exchanges["layout"]["yaxis"]["ticktext"]
    assert len(names) == 41 and names[-1] == "10 others, mean" and set(names[:-1]) > {f"{i}" for i in range(40, 50)}
    assert found["49", "exposed"] == 2000 and found["10 others, mean", "exposed"] == 1000


@pytest.fixture(scope="module")
def timeline(tmp_path_factory):
    """The page of a timeline that two ranks have recorded."""
    path = tmp_path_factory.mktemp("timeline") / "new" / "timeline.html"

    def train(rank):
        with recording.record(rank, path, lambda: None):
            for _ in range(3):
                for site in ("first", SCRIPT):
                    rank.submit(site, np.ones(3, np.float32), is_gradient=True)()

    job = join_loopback(2)
    threads = [threading.Thread(target=train, args=(rank,)) for rank in job]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank in job:
        rank.leave()
    return path


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture
def without_plotly(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)


NO_PLOTLY = r"is drawn by plotly, but there is no module 'plotly'; run pip install \"tf_poseidon\[report\]\"\."


def test_without_plotly_nothing_begins(without_plotly, tmp_path, capsys):
    made, path = plan(), tmp_path / "new.html"
    assert "0/kernel" in str(made)
    with pytest.raises(PoseidonError, match=f"^The report '.*new.html' {NO_PLOTLY}$"):
        made.save_html(path)
    alone, = join_loopback(1)
    with pytest.raises(PoseidonError, match=NO_PLOTLY):
        with recording.record(alone, path, lambda: None):
            raise AssertionError("recorded")
    with recording.record(alone, tmp_path / "trace.json", lambda: None):
        alone.submit("a", np.ones(3, np.float32), is_gradient=True)()
    alone.leave()
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain", "/no/model.keras", "--workers=2", "--batch_size=1", f"--html={path}"])
    assert ended.value.code == cli.Status.REFUSED and re.search(NO_PLOTLY, capsys.readouterr().err)
    assert os.listdir(tmp_path) == ["trace.json"]


def test_files_that_cannot_be_written(tmp_path, capsys):
    with pytest.raises(PoseidonError, match="The report '.*' cannot be written: Is a directory; name a file in"):
        plan().save_html(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["explain", "/no/model.keras", "--workers=2", "--batch_size=1", f"--html={tmp_path}/no/plan.html"])
    assert "plan.html cannot be written: No such file or directory; name" in capsys.readouterr().err


def test_a_file_is_replaced_by_the_same(tmp_path):
    path = tmp_path / "plan.html"
    plan(2).save_html(path)
    other = path.read_bytes()
    for _ in range(2):
        plan().save_html(path)
        assert path.read_text() == plan_page.html_report({"": plan()})
    assert path.read_bytes() != other and os.listdir(tmp_path) == ["plan.html"]


# ---- in a browser --------------------------------------------------------------------------------


class Drawn(html.parser.HTMLParser):
    """Counts what is drawn in each figure of a page, and keeps the cells of its table."""

    VOID = ("meta", "br", "link", "input", "img", "hr", "base")

    def __init__(self, text):
        super().__init__()
        self.bars, self.rows, self._open = {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag in self.VOID:
            return
        found = dict(attributes)
        self._open.append((tag, found))
        figure = next((each["id"] for _, each in self._open if "figure" in (each.get("class") or "").split()), None)
        if tag == "path" and self._open[-2][1].get("class") == "point" and found["d"]:
            self.bars[figure] = self.bars.get(figure, 0) + 1
        elif tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1][0] == "td":
            self.rows[-1].append(data)


def opened(path, tmp_path):
    """Returns (what a browser has drawn of a page, its messages about errors)."""
    browser = shutil.which("chromium")
    if not browser:
        (pytest.fail if "CI" in os.environ else pytest.skip)("there is no chromium")
    done = subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,2000",
         "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-extensions",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 0, done.stderr
    return Drawn(done.stdout), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def expected_bars(path):
    """Returns {id of a figure: number of its bars}."""
    text = path.read_text()
    names = re.findall(r'<div class="figure" id="(.*?)"', text)
    return {name: sum(len(trace["x"]) for trace in figure["data"])
            for name, figure in zip(names, figures_of(text), strict=True)}


def test_a_browser_draws_the_plan_and_sorts_its_table(tmp_path):
    path = tmp_path / "plan.html"
    plan(number=60).save_html(path)
    click = "<script>document.querySelectorAll('th button')[3].click()</script>"
    path.write_text(path.read_text().replace("</body>", f"{click}</body>"))
    drawn, messages = opened(path, tmp_path)
    assert messages == []
    assert drawn.bars == expected_bars(path) and len(drawn.bars) == 2
    sizes = [int(row[3].replace(",", "")) for row in drawn.rows if row and row[3] != "unknown"]
    assert sizes == sorted(sizes) and len(sizes) == 63


def test_a_browser_draws_the_timeline(timeline, tmp_path):
    drawn, messages = opened(timeline, tmp_path)
    assert messages == []
    assert drawn.bars == expected_bars(timeline) and len(drawn.bars) == 3


def test_what_a_browser_does_not_draw_is_noticed(timeline, tmp_path):
    """A figure without its place; and a request, which the page forbids."""
    path = tmp_path / "broken.html"
    path.write_text(timeline.read_text().replace('id="figure-', 'id="other-', 1).replace(
        "</body>", "<script>fetch('https://example.org/')</script></body>"))
    drawn, messages = opened(path, tmp_path)
    assert drawn.bars != expected_bars(timeline)
    assert any("Uncaught" in line for line in messages) and any("Content Security Policy" in line for line in messages)
