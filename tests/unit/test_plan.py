"""Plans as values: the same on all ranks, as files, and only for the graph that they were made for."""

import dataclasses
import itertools
import json
import random
import re
import resource

import pytest
from small_plans import dense_site
from small_plans import plan_for
from small_plans import SITES

import tf_poseidon as poseidon
from tf_poseidon import grappler
from tf_poseidon import planning
from tf_poseidon.graph_passes import session


@pytest.mark.parametrize("policy", planning.POLICIES)
def test_plans_do_not_depend_on_the_order_of_sites(policy):
    plans = [plan_for(sites, policy, 4, operations=1e9) for sites in itertools.permutations(SITES)]
    assert len({plan.digest for plan in plans}) == 1
    assert len({plan.agreement_text() for plan in plans}) == 1
    assert all(set(plan.decisions) == set(plans[0].decisions) for plan in plans)
    assert plan_for(SITES, policy, 4, operations=1e9) == plans[0]


@pytest.mark.parametrize("exchanges", [(), (
    planning.Exchange("rows/x", "gather", "float32", 4, (3, 4), 1e6, 2, is_waited_for=True),
    planning.Exchange("value/y", "broadcast", "int64", 8, None, depth=None),
    planning.Exchange("kernel", "scatter", "float32", 4, (3, 4), cast_from="bfloat16"))],
    ids=["gradients", "others too"])
@pytest.mark.parametrize("policy", planning.POLICIES)
def test_plans_are_saved_and_loaded(policy, exchanges, tmp_path):
    plan = plan_for(SITES, policy, 4, 2, operations=1e9, merge=True, exchanges=exchanges)
    plan.save(tmp_path / "plan")
    assert planning.Plan.load(tmp_path / "plan") == plan
    lines = (tmp_path / "plan").read_text().splitlines()
    assert sum("512" in line for line in lines) == 2  # one site per line


def test_links_between_gpus_are_saved_where_there_are_any():
    """They change no result, so that any job of the same ranks can follow the plan."""
    plan = plan_for(SITES, "ps", 4)
    assert "gpu" not in plan.to_text()
    linked = dataclasses.replace(plan, cluster=planning.Cluster(4, gpus_per_node=4, gpu_link_gbps=2400.0))
    loaded = planning.Plan.from_text(linked.to_text())
    assert loaded == linked and loaded.digest == plan.digest
    assert planning.Planner(plan.cluster, given=loaded).plan(SITES).agreement_text() == plan.agreement_text()
    assert plan.diff(linked).endswith("1000 GFLOP/s, 4 GPUs to a node linked at 2400 Gbit/s")


def test_digests_say_what_a_plan_does():
    plan = plan_for(SITES, "auto", 4)
    same = [planning.make_plan(SITES, "auto", planning.Cluster(4, 4, 11)),
            plan_for([dataclasses.replace(SITES[0], factors=dataclasses.replace(SITES[0].factors, k=9)),
                      *SITES[1:]], "auto", 4)]  # rows change with the batch
    other = [plan_for(SITES, "ps", 4), plan_for(SITES, "auto", 5), plan_for(SITES[2:], "ps", 4),
             plan_for([dataclasses.replace(SITES[0], dtype="float64"), *SITES[1:]], "auto", 4)]
    assert {p.digest for p in same} == {plan.digest}
    assert plan.digest not in {p.digest for p in other}


def test_diff():
    auto, ps = plan_for(SITES, "auto", 4), plan_for(SITES, "ps", 4)
    assert auto.diff(auto) == ""
    lines = auto.diff(ps).splitlines()
    assert lines[0].startswith("'kernel': sfb, 196,608 bytes, ")
    assert "-> ps, 3,145,728 bytes" in lines[0]
    assert [line.partition(":")[0] for line in lines] == ["'kernel'", "'bias'", "'table'"]
    fewer = plan_for(SITES, "auto", 3).diff(plan_for(SITES[2:], "auto", 4))
    assert fewer.splitlines()[0].startswith("cluster: 3 workers") and "-> missing" in fewer


def test_a_plan_refuses_what_it_was_not_made_for():
    plan = plan_for(SITES, "auto", 4)
    job = planning.Cluster(4)
    planner = planning.Planner(job, given=plan)
    assert planner.plan(SITES) == plan
    assert planner.plan([dataclasses.replace(SITES[0], factors=dataclasses.replace(
        SITES[0].factors, k=None)), *SITES[1:]]) == plan
    for sites, message in [
            (SITES[1:], "the first difference is 'kernel', which is float32[512, 512], 4 bytes each, "
             "factors with 512 and 512 columns in the plan and missing in the graph"),
            ([*SITES, dense_site(4, 4, 1, "new")], "'new', which is missing in the plan"),
            ([dense_site(512, 511, 8), *SITES[1:]], "float32[512, 511]")]:
        with pytest.raises(poseidon.PoseidonError, match=re.escape(message)):
            planner.plan(sites)
    for cluster, message in [
            (planning.Cluster(3), "for 4 workers, 4 servers, but this job has 3 workers, 3 servers;"),
            (planning.Cluster(4, ranks_per_node=2), "but this job has 4 workers, 4 servers, 2 to a node;")]:
        with pytest.raises(poseidon.PoseidonError, match=re.escape(message)):
            planning.Planner(cluster, given=plan).plan(SITES)


def test_steps_that_overlap_are_saved_and_those_of_a_graph_count():
    sites = [dataclasses.replace(site, operations=1e9, needed=5e8) for site in SITES[:3]]
    plan = plan_for(sites, "auto", 4, operations=1e9, steps=8)
    loaded = planning.Plan.from_text(plan.to_text())
    assert loaded == plan and loaded.steps == 8 and loaded.step_seconds == plan.step_seconds
    single = [dataclasses.replace(site, needed=None) for site in sites]
    followed = planning.Planner(plan.cluster, given=loaded).plan(single, 1e9)
    assert followed.steps == 1 and followed.digest == plan.digest
    assert followed.step_seconds == plan_for(single, "auto", 4, operations=1e9).step_seconds


def test_steps_that_are_left_over_do_not_replace_the_plan_of_several():
    """But those of another step do, and those that do not overlap."""
    graph_pass = grappler.GraphPass(session.RewriteSession(planning.Planner(planning.Cluster(4))))
    functions = [graph_pass.expect(number) for number in range(3)]
    several, single, other = (plan_for(sites, "auto", 4, steps=steps)
                              for sites, steps in ((SITES, 8), (SITES, 1), (SITES[2:], 1)))
    for number, plan, shown in ((0, several, several), (0, single, several), (1, single, several), (2, other, other)):
        graph_pass.note(number, plan)
        functions[number].overlap = str(number)
        assert graph_pass.plan == dataclasses.replace(shown, overlap=graph_pass.plan.overlap)
    assert [function.plan.steps for function in functions] == [8, 1, 1]
    assert graph_pass.plan.overlap == "2"  # that of its own function


@pytest.mark.parametrize("change, message", [
    (lambda text: text.replace('"scheme": "sfb"', '"scheme": "ps"', 1), "was changed after it was saved"),
    (lambda text: text.replace('"tf_poseidon_plan": 1', '"tf_poseidon_plan": 2'), "has version 2"),
    (lambda text: text[:len(text) // 2], "not a plan"),
    (lambda text: "[]", "not a plan"),
    (lambda text: text.replace('"dtype"', '"type"', 1), "is damaged"),
])
def test_files_that_are_no_plans_are_refused(change, message, tmp_path):
    path = tmp_path / "plan"
    plan_for(SITES, "sfb", 4).save(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(poseidon.PoseidonError, match=f"{path}.*{message}"):
        planning.Plan.load(path)


DIVIDED = (planning.DividedWeight("net/head/kernel", "float32", (512, 40), 1),
           planning.DividedWeight("net/head/bias", "float32", (40,), 0))
FULL = dataclasses.replace(
    plan_for(SITES, "auto", 4, 2, operations=1e9, merge=True, exchanges=(
        planning.Exchange("rows/x", "gather", "float32", 4, (3, 4), 1e6, 2, is_waited_for=True),)),
    whole=(planning.WholeOp("node", "Op", 4),), divided=DIVIDED)


def without_digest(text):
    return "\n".join(line for line in text.splitlines() if '"digest"' not in line)


@pytest.mark.parametrize("change, message", [
    (lambda text: text.replace('"workers": 4', '"workers": 1e400'), r"workers=inf, expected a whole number"),
    (lambda text: text.replace('"workers": 4', f'"workers": {"9" * 5000}'), r"is damaged \(ValueError\('Exceeds"),
    (lambda text: text.replace('"workers": 4', f'"workers": {1 << 40}'), r"expected at most 2147483647"),
    (lambda text: text.replace('"gflops": 1000.0', f'"gflops": {"9" * 400}'), r"gflops=9+\.\.\., expected a positive"),
    (lambda text: text.replace('"gflops": 1000.0', '"gflops": NaN'), r"gflops=nan, expected a positive number"),
    (lambda text: text.replace('"gflops"', '"gpus_per_node": 3, "gflops"'), r"gpus_per_node=3 with workers=4"),
    (lambda text: text.replace('"num_bytes": 0', '"num_bytes": NaN'), r"is damaged .*its 'num_bytes' is nan"),
    (lambda text: text.replace('"num_bytes": 0', '"num_bytes": -Infinity'), r"its 'num_bytes' is -inf"),
    (lambda text: text.replace('"num_bytes": 0', '"num_bytes": [0]'), r"its 'num_bytes' is \[0\]"),
    (lambda text: text.replace("[512, 512]", f"[{1 << 62}, 512]"), r"its 'shape' is \(4611686018427387904, 512\)"),
    (lambda text: text.replace("[512, 512]", "[512, 512.5]"), r"its 'shape' is 512.5"),
    (lambda text: text.replace("[512, 512]", "512"), r"its 'shape' is 512"),
    (lambda text: text.replace('"scheme": "gather"', '"scheme": "ps"'), r"its 'scheme' is 'ps'"),
    (lambda text: text.replace('"dtype": "float32"', '"dtype": "\\ud800"', 1), r"its 'dtype' is '\\+ud800'"),
    (lambda text: text.replace('"dimension": 1', '"dimension": 2'), r"its 'dimension' is 2 of \(512, 40\)"),
    (lambda text: text.replace('"shape": [40]', '"shape": []'), r"its 'dimension' is 0 of \(\)"),
    (lambda text: text.replace('"policy"', '"steps": 0, "policy"'), r"its 'steps' is 0"),
    (lambda text: text.replace('"policy"', f'"steps": {1 << 40}, "policy"'), r"its 'steps' is 1099511627776"),
    (lambda text: text.replace('"policy"', '"policy": "ps", "policy"'), r"'policy' occurs twice in an object"),
    (lambda text: text.replace('"tf_poseidon_plan": 1', '"tf_poseidon_plan": [1]'), r"The plan has version \[1\]"),
    (lambda text: '{"a":' * 100000, r"is damaged \(RecursionError"),
    (lambda text: "[" * 100000, r"is damaged \(RecursionError"),
    (lambda text: "null", "is not a plan"),
    (lambda text: "", "is not a plan"),
])
def test_values_that_no_plan_has_are_refused(change, message):
    text = without_digest(FULL.to_text())
    assert planning.Plan.from_text(text) == FULL and change(text) != text
    with pytest.raises(poseidon.PoseidonError, match=message) as caught:
        planning.Plan.from_text(change(text))
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 300


def parts(value):
    """Returns (list or object, key) of everything inside a value of JSON."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [found for key in keys for found in ((value, key), *parts(value[key]))]


STRANGE = (None, True, -1, 10**400, -10**400, float("nan"), float("inf"), "", "x", "kernel", "\ud800", [], {}, [[]],
           {"a": 1}, 0, 1.5, 1 << 63, 1e308, [1 << 62] * 300)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_plans_give_our_errors_only(seed):
    """Plans with another value somewhere, and with other bytes; what is accepted can be used."""
    random_, text = random.Random(seed), without_digest(FULL.to_text())
    count = 0
    for case in range(250):
        if case % 2:
            fields = json.loads(text)
            owner, key = random_.choice(parts(fields))
            owner[key] = random_.choice(STRANGE)
            damaged = json.dumps(fields)
        else:
            data = bytearray(FULL.to_text().encode() if case % 4 else text.encode())
            for _ in range(random_.randint(1, 3)):
                begin = random_.randrange(len(data))
                data[begin:begin + random_.choice((0, 1, 5))] = random_.choice(
                    (b"", b"9", b"-", b"\"", b"[", b"}", b",", random_.randbytes(2), b"e99", b"9" * 5000))
            damaged = data.decode(errors="replace")
        try:
            plan = planning.Plan.from_text(damaged)
            assert str(plan) and json.dumps(plan.predictions()) and plan.diff(FULL) is not None
            assert planning.Plan.from_text(plan.to_text()) == plan
            planning.Planner(plan.cluster, given=plan).plan(plan.sites)
        except poseidon.PoseidonError as error:
            count += 1
            assert len(str(error).splitlines()) == 1 and str(error).endswith(".") and len(str(error)) < 400
    assert count > 150


@pytest.mark.parametrize("content, message", [
    (b"\xff\xfe{}", "cannot be read: 'utf-8' codec can't decode"), (None, "cannot be read: No such file"),
    ("directory", "cannot be read: Is a directory"), ("loop", "cannot be read: Too many levels of symbolic links"),
    ("\0", r"The plan '.*plan\\x00' cannot be read: embedded null byte"), (3, "The plan '3' cannot be read")])
def test_files_that_cannot_be_read_are_named(content, message, tmp_path):
    path = tmp_path / "plan"
    if content == "directory":
        path.mkdir()
    elif content == "loop":
        path.symlink_to(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(poseidon.PoseidonError, match=message) as caught:
        planning.Plan.load(f"{path}\0" if content == "\0" else content if isinstance(content, int) else path)
    assert len(str(caught.value).splitlines()) == 1


def test_an_editor_may_mark_a_plan_as_utf_8(tmp_path):
    (tmp_path / "plan").write_bytes(b"\xef\xbb\xbf" + FULL.to_text().encode())
    assert planning.Plan.load(tmp_path / "plan") == FULL


@pytest.mark.parametrize("path, message", [
    ("/dev/full", "No space left on device"), ("/proc/plan", r"No such file|Permission denied"),
    (".", "Is a directory"), ("nowhere/plan", "No such file or directory"), ("plan\0", "embedded null byte"),
    (f"{'x' * 300}", "File name too long")])
def test_plans_that_cannot_be_saved_are_named(path, message, tmp_path):
    with pytest.raises(poseidon.PoseidonError, match=f"^The plan .* cannot be written: .*{message}; name a file"):
        FULL.save(f"{tmp_path}/{path}" if path[0] != "/" else path)
    assert not list(tmp_path.iterdir())


def test_a_plan_is_as_it_was_when_the_disk_is_full(tmp_path):
    path = tmp_path / "plan"
    other = plan_for(SITES, "ps", 4)
    other.save(path)
    path.chmod(0o640)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(poseidon.PoseidonError, match="cannot be written: File too large"):
            FULL.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert planning.Plan.load(path) == other and list(tmp_path.iterdir()) == [path]
    FULL.save(path)
    assert planning.Plan.load(path) == FULL and path.stat().st_mode & 0o777 == 0o640
    (tmp_path / "link").symlink_to(path)
    other.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and planning.Plan.load(path) == other


def changed(path, *changes):
    """Writes a plan to a file, changed in all lines as a person would."""
    plan_for(SITES, "auto", 4).save(path)
    lines = [line for line in path.read_text().splitlines() if '"digest"' not in line]
    for old, new in changes:
        assert any(old in line for line in lines)
        lines = [line.replace(old, new) for line in lines]
    path.write_text("\n".join(lines))
    return planning.Plan.load(path)


def test_a_plan_that_was_changed_on_purpose(tmp_path):
    plan = changed(tmp_path / "plan", ('"scheme": "sfb"', '"scheme": "ps"'),
                   (', "rides_on": "kernel"', ""))
    assert {d.scheme for d in plan.decisions} == {"ps", "sparse"}


@pytest.mark.parametrize("change, message", [
    (('"scheme": "ps"', '"scheme": "foo"'), "The plan lets 'odd' travel by 'foo', which is not"),
    (('"scheme": "ps"', '"scheme": "sparse"'), "'odd' travel by 'sparse'"),
    (('"scheme": "ps"', '"scheme": "sfb"'), "'odd' travel by 'sfb'"),
    ((', "rides_on": "kernel"', ""), "'bias' travel by 'sfb'"),
    (('"rides_on": "kernel"', '"rides_on": "table"'), "'bias' travel by 'sfb' with 'table'"),
    (('"site": "odd"', '"site": "even"'), "'odd' travel by 'ps'"),
    (('"odd"', '"table"'), "is damaged"),
    (('"policy": "auto"', '"policy": 7'), "is damaged"),
    (('"num_bytes": 0', '"num_bytes": "x"'), "is damaged"),
    (('"operations": null', '"operations": "many"'), "is damaged"),
])
def test_changes_that_nobody_could_follow_are_refused(change, message, tmp_path):
    with pytest.raises(poseidon.PoseidonError, match=message):
        changed(tmp_path / "plan", change)


def test_a_bias_rides_on_its_own_layer(tmp_path):
    path = tmp_path / "plan"
    plan_for([*SITES, dataclasses.replace(SITES[0], name="other")], "auto", 4).save(path)
    lines = [line for line in path.read_text().splitlines() if '"digest"' not in line]
    path.write_text("\n".join(lines).replace('"rides_on": "kernel"', '"rides_on": "other"'))
    with pytest.raises(poseidon.PoseidonError, match="'bias' travel by 'sfb' with 'other'"):
        planning.Plan.load(path)


@pytest.mark.parametrize("given, names, followed", [
    (("dense/kernel", "dense/bias"), ("net/dense/kernel", "net/dense/bias"), True),
    (("net/dense/kernel", "net/dense/bias"), ("dense/kernel", "dense/bias"), True),
    (("dense/kernel", "dense/bias"), ("dense/kernel", "net/dense/bias"), True),
    (("dense/kernel", "dense/bias"), ("a/dense/kernel", "b/dense/kernel"), False),
    (("dense/kernel", "dense/bias"), ("net/dense2/kernel", "net/dense2/bias"), False)])
def test_names_may_have_more_leading_parts(given, names, followed):
    def sites(kernel, bias):
        return (dense_site(512, 512, 8, kernel), dataclasses.replace(SITES[1], name=bias, bias_of=kernel))

    plan = plan_for(sites(*given), "sfb", 4)
    planner = planning.Planner(planning.Cluster(4), given=plan)
    if followed:
        assert planner.plan(sites(*names)).agreement_text() == plan_for(sites(*names), "sfb", 4).agreement_text()
    else:
        with pytest.raises(poseidon.PoseidonError, match="made for another training graph"):
            planner.plan(sites(*names))


# ---- weights that ranks divide -------------------------------------------------------------------


def test_weights_that_are_divided_are_variables_of_the_plan():
    plan = plan_for(SITES, "ps", 4)
    divided = dataclasses.replace(plan, divided=DIVIDED)
    assert divided.digest != plan.digest == dataclasses.replace(divided, divided=()).digest
    assert divided.digest != dataclasses.replace(divided, divided=(
        dataclasses.replace(DIVIDED[0], dimension=0), DIVIDED[1])).digest
    assert divided.total_bytes == plan.total_bytes
    assert '"divided"' not in plan.to_text()
    line, = (line for line in str(divided).splitlines() if line.startswith("net/head/kernel"))
    assert line.split(maxsplit=5) == [
        "net/head/kernel", "512x40", "columns", "0", "0",
        DIVIDED[0].reason(plan.cluster)]
    assert [(each["name"], each["scheme"], each["cost"]) for each in divided.predictions()["variables"][-2:]] == [
        (weight.path, "columns", {"bytes": 0, "seconds": 0}) for weight in DIVIDED]
    assert plan.diff(divided).splitlines()[0] == (
        "'net/head/kernel': missing -> columns, float32[512, 40], divided along dimension 1")


@pytest.mark.parametrize("shape, dimension, cluster, expected", [
    ((512, 40), 0, planning.Cluster(4), "each of 4 ranks computes with up to 128 of 512 rows"),
    ((30522,), 0, planning.Cluster(8), "each of 8 ranks computes with up to 3,824 of 30,522 elements"),
    ((512, 10), 1, planning.Cluster(4), "each of 4 ranks computes with up to 10 of 10 columns"),
    ((512, 40), 1, planning.Cluster(4, 2), "each of 2 ranks computes with up to 32 of 40 columns"),
    ((512, 40), 1, planning.Cluster(4, dedicated_servers=1), "each of 4 ranks computes with up to 16 of 40 columns")])
def test_a_plan_says_how_much_a_rank_has_of_a_weight(shape, dimension, cluster, expected):
    assert planning.DividedWeight("w", "float32", shape, dimension).reason(cluster).startswith(f"{expected}, and")


def test_the_partitioner_hands_over_what_the_plan_says():
    for facts in planning.PartitionFacts(), planning.PartitionFacts(FULL.whole), planning.PartitionFacts((), DIVIDED):
        assert planning.PartitionFacts.from_text(facts.to_text()) == facts


PATHS = ("net/head/kernel", "net/head/bias", "net/body/kernel")


@pytest.mark.parametrize("planner, paths, expected", [
    (planning.Planner(planning.Cluster(4)), PATHS, {}),
    (planning.Planner(planning.Cluster(4), pins=(("*/kernel", "ps"), ("*", "columns"))), PATHS, {PATHS[1]: None}),
    (planning.Planner(planning.Cluster(4), given=FULL), PATHS, {PATHS[0]: 1, PATHS[1]: 0}),
    (planning.Planner(planning.Cluster(4), given=FULL), ("head/kernel", "head/bias"),
     {"head/kernel": 1, "head/bias": 0})],
    ids=["by policy", "pins", "a plan", "a plan for other names"])
def test_planners_say_which_weights_are_divided(planner, paths, expected):
    assert planner.divided_among(paths) == expected
    assert planner.divides_weights == bool(expected)


def test_pins_to_columns_are_told_like_others():
    plan = dataclasses.replace(plan_for(SITES, "ps", 4), divided=DIVIDED)
    assert planning.unmatched_pins((("*/head/kernel", "columns"), ("kernel", "columns")), plan) == ""
    assert planning.unmatched_pins((("*/heat/kernel", "columns"),), plan).startswith(
        "The pin of '*/heat/kernel' matches no variable of this step; the nearest is 'net/head/kernel'.")
    decision = plan_for(SITES, "ps", 4, pins=(("kernel", "columns"),)).decisions[0]
    assert decision.scheme == "ps"
    assert decision.reason == "the policy is 'ps'; pinned to 'columns', which is not possible in this step"
