"""Faults that are planted in the sources, one at a time, to see which tests find them: see find_planted.py.

`was` names the commit that mended a fault that was there once; the others were thought up. A fault is a text that
occurs once in a file, and what takes its place. It is listed with the part of the sources that it is in; each part has
some.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault.

    Attributes:
        name: What is wrong then.
        file: The file, from the root of the sources.
        right: The text that is there.
        wrong: The text that takes its place.
        was: The commit that mended it; "" if it was never there.
    """

    name: str
    file: str
    right: str
    wrong: str
    was: str = ""


_RULES, _PARTITION, _WRITE = "graph_passes/partition/rules", "graph_passes/partition", "graph_passes/write"
_PLANNING, _HOOK, _C = "tf_poseidon/planning", "tf_poseidon/keras_hook", "kernels/communicator"

PLANTED: dict[str, tuple[Planted, ...]] = {
    "rules": (
        Planted("a sum over rows keeps its dimensions' numbers", f"{_RULES}/reductions.py",
                "return dimension if keeps else dimension - sum(axis < dimension for axis in axes)",
                "return dimension"),
        Planted("means of integers are summands", f"{_RULES}/reductions.py",
                "    if case.attr(\"T\").type in graph_lib.HALVES or not case_lib.is_inexact(case.attr(\"T\").type):\n"
                "        return None  # sums",
                "    if case.attr(\"T\").type in graph_lib.HALVES:\n        return None  # sums"),
        Planted("contrast is adjusted by rows inside of images", f"{_RULES}/windows.py",
                "and rank and state.dimension < rank - 3 else None",
                "and rank and state.dimension < rank - 1 else None"),
        Planted("quotients of integer summands are summands", f"{_RULES}/elementwise.py",
                "    linear = case.linear_in(0) if case_lib.is_inexact(case.attr(\"T\").type) else None\n",
                "    linear = case.linear_in(0)\n"),
        Planted("products are linear in two summands at once", f"{_PARTITION}/case.py",
                "        if len(partials) != 1 or partials[0]", "        if not partials or partials[0]"),
        Planted("a product over rows is rows", f"{_RULES}/contractions.py",
                "if label in out else SUM)", "if label in out else Rows(0))"),
        Planted("what each rank adds to a summand counts once per rank", f"{_RULES}/elementwise.py",
                "if all(case.accumulates(i) or case.is_zero(i) for i in others):", "if True:"),
        Planted("a slice has all ranks' rows on each", f"{_RULES}/shapes.py",
                "local={2: state.dimension}, checks={1: (state.dimension, 0)})", "checks={1: (state.dimension, 0)})"),
        Planted("tensors are concatenated along their rows on each rank", f"{_RULES}/shapes.py",
                "lambda d: None if d == axis else d)", "lambda d: d)"),
        Planted("dimensions of size 1 are removed without a name", f"{_RULES}/shapes.py",
                "return case.all({0: state}, Rows(dimension)) if named else None",
                "return case.all({0: state}, Rows(dimension))"),
        Planted("what occurs in rows of two ranks is counted twice", f"{_RULES}/gathering.py",
                "Partial(\"max\") if case.attr(\"binary_output\").b else SUM", "SUM"),
        Planted("sums of halves are cast before they are complete", f"{_RULES}/elementwise.py",
                "_WIDER = {types_pb2.DT_BFLOAT16:", "_WIDER = {types_pb2.DT_HALF: (types_pb2.DT_FLOAT,), "
                "types_pb2.DT_BFLOAT16:", was="76fd285"),
    ),
    "sizes": (
        Planted("limits of integers are not tried with few rows", f"{_PARTITION}/sizes/graph_sizes.py",
                "is_limited = any(_limits_integers(graph, node) for node in graph.graph_def.node)",
                "is_limited = False", was="60693af"),
        Planted("elements of lists that differ have the value of one", f"{_PARTITION}/sizes/list_elements.py",
                "if value is None or value[:1] != _AS_TEXT:", "if value is None:", was="184daaa"),
        Planted("shapes of elements that are guessed are not verified", f"{_PARTITION}/sizes/list_elements.py",
                "        if not wrong:\n            return result\n", "        return result\n"),
        Planted("a negative axis is no dimension of a reduction", f"{_PARTITION}/sizes/inferred_graph.py",
                "reduced = {int(axis) % len(shape) for axis in axes.flatten()} if shape else set()",
                "reduced = {int(axis) for axis in axes.flatten()} if shape else set()"),
    ),
    "cuts": (
        Planted("a flow takes no way back", "tf_poseidon/base/minimum_cut.py",
                "                left[end][begin] += flow\n", ""),
        Planted("sums are taken in half precision where that is fewer bytes", f"{_PARTITION}/propagate/cuts.py",
                "            if not self._is_undone(self._graph.node(tensor)):", "            if False:"),
        Planted("messages cost nothing", f"{_PARTITION}/propagate/cuts.py", "_MESSAGE = 256", "_MESSAGE = 0"),
        Planted("loops have one iteration", f"{_PARTITION}/propagate/cuts.py", "_ITERATIONS = 100", "_ITERATIONS = 1"),
        Planted("the rows of a table count as a sum", f"{_PARTITION}/propagate/cuts.py",
                "return sum(tensor_bytes) / 2 if", "return sum(tensor_bytes) if"),
    ),
    "dividing": (
        Planted("products of several inputs' noise are divided", f"{_PARTITION}/propagate/dividing.py",
                "if len(rows_nodes) > 1:  #", "if len(rows_nodes) > 9:  #"),
        Planted("sums with a size for each row pay", f"{_PARTITION}/propagate/dividing.py",
                "return row_size.is_known(shape) and row_size.product(shape).constant is not None", "return True",
                was="ef5a080"),
        Planted("what is divided in a loop is gathered in each iteration", f"{_PARTITION}/propagate/dividing.py",
                "if state == OWN or self._found.frames[graph_lib.node_of(tensor)] != self._home:", "if state == OWN:"),
    ),
    "loops over rows": (
        Planted("loops over rows of several inputs are taken apart",
                f"{_PARTITION}/row_loops/loop_outcomes.py",
                "if len(rows_nodes) != 1 or not any(", "if not any(", was="184daaa"),
        Planted("a count that begins at any number is one of rows", f"{_PARTITION}/row_loops/loop_reader.py",
                "begin.dtype.kind != \"i\" or begin or added.op", "begin.dtype.kind != \"i\" or added.op"),
    ),
    "planner": (
        Planted("each rank rebuilds its own contribution, too", f"{_PLANNING}/cost.py",
                "return self.operations * (workers - 1)", "return self.operations * workers"),
        Planted("what is rebuilt once is rebuilt by each server", f"{_PLANNING}/cost.py",
                "self.operations * (workers / servers - 1)", "self.operations * (workers - 1)"),
        Planted("a server sends to itself", f"{_PLANNING}/cost.py",
                "return 2 * num_bytes * (p1 + p2 - 2) / p2", "return 2 * num_bytes * (p1 + p2 - 1) / p2"),
        Planted("of equals, the paper's policy takes the parameter server", f"{_PLANNING}/choice/policies.py",
                "return (SFB if sfb <= ps else PS,", "return (SFB if sfb < ps else PS,"),
        Planted("messages wait for those that are computed from them", f"{_PLANNING}/choice/merging.py",
                "                message.depth == last.depth) and (", "                True) and ("),
        Planted("a message arrives without latency", f"{_PLANNING}/step_time.py",
                "self._arrivals.append((self._free + message.cost.latency, name, message))",
                "self._arrivals.append((self._free, name, message))"),
    ),
    "schemes": (
        Planted("slices wait for other messages", f"{_PLANNING}/schemes/slice_broadcasting.py",
                "site.slices.num_bytes, can_wait=False, ", "site.slices.num_bytes, "),
        Planted("a gradient that was cast is planned as it is", f"{_PLANNING}/schemes/parameter_server.py",
                "site.num_bytes, sent_bytes=site.sent_bytes, ", "site.num_bytes, "),
        Planted("a bias from a file follows any layer", f"{_PLANNING}/schemes/factor_broadcasting.py",
                "return leader is not None and site.bias_of == leader.name", "return leader is not None"),
    ),
    "matching": (
        Planted("a mask that differs between ranks is applied to a sum", "graph_passes/match/factors.py",
                "if self._is_rank_independent(factor):\n                    return self.match(", "if True:\n"
                "                    return self.match("),
        Planted("what a variable was assigned from other ranks is the same on all",
                "graph_passes/match/rank_independence.py",
                "            if _is_assignment(node):\n                for reader in readers",
                "            if False:\n                for reader in readers"),
        Planted("a bias takes a factor before it is scaled", "graph_passes/match/biases.py",
                "if all(root and (which == \"v\" or not scale) for root, scale in parts):",
                "if all(root for root, scale in parts):"),
        Planted("a product that is rounded is made of factors", "graph_passes/match/factors.py",
                "if _FLOATS.get(source, 9) > _FLOATS.get(target, 0):", "if _FLOATS.get(source, 9) > 9:"),
    ),
    "writer": (
        Planted("sums of lists become chains in the partitioned graph", f"{_PARTITION}/emit/graph_writer.py",
                " and (\n                node.attr[\"T\"].type != types_pb2.DT_VARIANT)", "", was="ac59d54"),
        Planted("sums of lists become chains in TensorFlow's optimizer", "graph_passes/grappler_bridge.cc",
                "terms.size() < 3 || node.attr().at(\"T\").type() == tensorflow::DT_VARIANT)", "terms.size() < 3)",
                was="77c08e2"),
        Planted("sums are not ordered in graphs that no pass has changed", "graph_passes/grappler_bridge.cc",
                "const bool is_ordered = is_of_one_process && OrderSums(&graph);", "const bool is_ordered = false;"),
        Planted("factors are sent in single precision", f"{_WRITE}/site_writer.py",
                "return wire if wire is not None and dtype not in graph_lib.HALVES else dtype", "return dtype"),
        Planted("a bias is the sum of the other factor's rows", f"{_WRITE}/send_receive.py",
                "index = 0 if bias.factor == \"u\" else 1", "index = 1 if bias.factor == \"u\" else 0"),
        Planted("the dense gradient is computed although factors travel", f"{_WRITE}/send_receive.py",
                "self.waits = dict.fromkeys(self._only_for_dense(own), f\"{leader}/is_dense\")", "self.waits = {}"),
        Planted("a rebuilt gradient does not wait for what the product waited for", f"{_WRITE}/site_writer.py",
                "        if not controls:\n            return total\n", "        return total\n"),
    ),
    "kernels": (
        Planted("TensorFlow's threads add slices to variables in any order", "kernels/scatter_kernels.cc",
                ".TypeConstraint<type>(\"dtype\")", ".Label(\"none\").TypeConstraint<type>(\"dtype\")", was="b9eaf0b"),
        Planted("slices with one index are added in any order", "kernels/slices.cc", "std::stable_sort", "std::sort"),
    ),
    "Keras hook": (
        Planted("batch normalisation is of all rows", f"{_HOOK}/keras_objects/batch_normalization.py",
                "or is_of_all or is_own():", "or True:"),
        Planted("every rank writes files", f"{_HOOK}/coordination/coordinated_callbacks.py",
                "    if communicator.rank != 0:\n        callbacks = [callback for callback",
                "    if False:\n        callbacks = [callback for callback"),
        Planted("weights are never compared during an epoch", f"{_HOOK}/batch_loops/trainer.py",
                "if trains and (number := next(calls)) % comparing.EVERY == 0:", "if False:"),
        Planted("an error that a program catches is nobody's", f"{_HOOK}/batch_loops/trainer.py",
                "        job.errors.note(error, f\"{method}, {held} variables hold summands\")\n", "",
                was="ef8d6eb"),
        Planted("gradients are applied before they are summed", f"{_HOOK}/keras_objects/optimizers.py",
                "    grads = step.synchronize(grads, variables)\n", ""),
    ),
    "resuming": (
        Planted("an epoch that has resumed after its last step has no logs", f"{_HOOK}/checkpoints/resuming.py",
                "fit is not None and fit.model is model and fit.has_resumed and not logs:", "False:", was="af5981e"),
        Planted("a backup has one step too few", f"{_HOOK}/checkpoints/resuming.py",
                "saved[\"batch\"] + 1", "saved[\"batch\"]"),
        Planted("another optimizer takes the backup's state", f"{_HOOK}/checkpoints/resuming.py",
                "            variable.assign(value)\n        _log.warning(\"The backup '%s' was written with another",
                "            pass\n        _log.warning(\"The backup '%s' was written with another", was="a3674ca"),
        Planted("the seeds of random layers begin anew", f"{_HOOK}/checkpoints/resuming.py",
                "    for variable, value in zip(seeds, arrays.get(\"seeds\", ())):\n        variable.assign(value)\n",
                ""),
    ),
    "communicator": (
        Planted("a contribution that comes twice is added twice", f"{_C}/server.cc",
                "if (contribution.state != State::kMissing) return Twice(peer, header, \"its part of\");", ""),
        Planted("a rank that has left is waited for", f"{_C}/protocol.cc",
                "    has_left_[peer] = 1;\n    return FailIfLeftBehind();", "    return;"),
        Planted("heartbeats follow a goodbye", f"{_C}/protocol.cc", "if (!has_left_[rank_]) {", "if (true) {",
                was="7b90897"),
        Planted("a part goes past its node's gateway", f"{_C}/routes.cc",
                "up_.push_back(rank == server ? -1 : rank == gateway ? server : gateway);",
                "up_.push_back(rank == server ? -1 : server);"),
        Planted("factors are not passed on within a node", f"{_C}/routes.cc",
                "if (peer != rank_) others.push_back(peer);", "(void)peer;"),
        Planted("parts from any rank are accepted", f"{_C}/frame_checks.cc", "  if (!is_way) {", "  if (false) {"),
        Planted("a packet's last header may be cut", f"{_C}/packets.cc", "if (left < sizeof(header)) {",
                "if (left < sizeof(header) / 2) {"),
        Planted("the last KV pair of a tensor ends behind it", f"{_C}/kv_pairs.cc",
                "end = std::min(Offset(index + 1), bytes_);", "end = Offset(index + 1);"),
        Planted("plans that differ are not said", f"{_C}/agreement.cc",
                "if (!difference.empty() && strict) {", "if (strict) {"),
        Planted("texts that are no UTF-8 end the job with another error", "tf_poseidon/job/agreement.py",
                "text.encode(errors=\"surrogatepass\")", "text.encode()", was="4bf218c"),
    ),
    "start and end of jobs": (
        Planted("an interrupted rank ends rank 0 before it has said so", "tf_poseidon/job/ending.py",
                "                time.sleep(_WORDS_OF_RANK_0_S)", "                pass", was="0c18328"),
        Planted("a rank ends before mpiexec can see its connection end", "tf_poseidon/job/ending.py",
                "        self._engine.disconnect()\n", "", was="7e97ac3"),
        Planted("mpiexec waits for a host that is gone", "tf_poseidon/job/ending.py",
                "        if self.communicator.has_lost_a_host:\n            self._engine.end_launcher()\n", "",
                was="f0b81ea"),
        Planted("Ctrl-C in compiled code is an error", "tf_poseidon/job/host/interrupts.py",
                "isinstance(error, KeyboardInterrupt) or _noted and isinstance(error, SystemError)",
                "isinstance(error, KeyboardInterrupt)", was="9752d1b"),
        Planted("children of a rank keep the connections that tell of its end", "tf_poseidon/job/host/forks.py",
                "    os.register_at_fork(after_in_child=close)\n", "", was="d745c25"),
        Planted("heartbeats do not count what arrives in bulk", f"{_C}/protocol.cc",
                "  transport_->TellHeard([this](int peer) { heartbeats_.Heard(peer, Clock::now()); });\n", "",
                was="558a3f5"),
        Planted("a file is written in place", "tf_poseidon/base/files.py",
                "    if _is_special(target):\n        yield target",
                "    if True:\n        yield target", was="ca9f7ca"),
        Planted("a text is shortened to the beginning", "tf_poseidon/errors.py",
                "... {text[-half:]}\"", "...\"", was="5c9edb2"),
    ),
    "saved graphs": (
        Planted("inputs of one size each have rows of their own", "graph_passes/saved/inputs.py",
                "if len(sizes) == 1 and sizes != {1}:", "if sizes != {1}:"),
        Planted("callers of a rewritten function stay stateless", "graph_passes/saved/rewritten_steps.py",
                "            _make_stateful(graph_def, body.signature.name)\n", "            pass\n"),
        Planted("an iterator's output may be of any type", "graph_passes/saved/inputs.py",
                "                if dtype not in states.GATHERED:", "                if False:"),
        Planted("verify accepts what is not finite", "tf_poseidon/base/rounding.py",
                "    if not np.array_equal(np.isfinite(value), np.isfinite(wanted)):\n        return np.inf\n", ""),
        Planted("verify accepts other bits on other ranks", "tf_poseidon/saved_graphs/verification.py",
                ",\n            *(f\"ranks have different bits of {kind} '{name}'\" for kind, name in self.differing)",
                ""),
    ),
    "options and messages": (
        Planted("a server may be listed twice", "tf_poseidon/options.py",
                "if len(set(self.servers)) != len(self.servers) or not", "if not"),
        Planted("a plan for another job is taken", "tf_poseidon/options.py",
                "        if self.plan is not None and size > 1:\n", "        if False:\n"),
        Planted("a plan decides silently who updates shards", "tf_poseidon/options.py",
                "        if self.plan is not None and self.shard_update != self.plan.has_shards:\n",
                "        if False:\n"),
        Planted("sums of which ranks get shards are not verified", "tf_poseidon/one_process/rank_graphs.py",
                "if operation.type in (*poseidon_markers.OPS, poseidon_markers.SCATTER)\n",
                "if operation.type in poseidon_markers.OPS\n"),
        Planted("the lines of TensorFlow's nodes are part of a cause", "tf_poseidon/job/failures.py",
                "    text = re.sub(r\"(?m)^\\s*\\[\\[.*\\n?\", \"\", text).strip()\n", "    text = text.strip()\n"),
        Planted("settings of kernels may differ", "tf_poseidon/job/agreement.py",
                "        **kernel_settings.settings(),\n    }", "    }", was="311ff4b"),
    ),
    "data": (
        Planted("ranks' parts overlap where rows do not divide", "tf_poseidon/data/parts.py",
                "(counts[:rank]), counts[rank]", "(counts[:rank]) // 2, counts[rank]"),
        Planted("other data on another rank pass", "tf_poseidon/data/datasets.py",
                "    return fingerprints.with_first_compared(", "    return batch or ("),
        Planted("TensorFlow reads ahead, and steps seem not to wait for data", "tf_poseidon/ops/__init__.py",
                "    options.experimental_optimization.inject_prefetch = False", "    pass"),
    ),
}
