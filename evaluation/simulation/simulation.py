"""Simulates a training step of many nodes: computing, links and rebuilding, as events in time.

Bytes, schemes, messages and their order are those of `tf_poseidon.planning`, whose step_time.py is the model that plans
are compared by, thousands of times: one rank, whose link carries one message after the other. This one says what that
leaves out, all nodes with each of their connections, and systems that follow no plan; tests compare the two. The model:

Computing. A node works sequentially: the forward pass (a third of the step's arithmetic, or less if a gradient is
ready sooner), then backpropagation, in which a gradient is ready when its site's `operations` are done.
Rebuilding gradients from factors, with the other nodes' rows, queues for the same device, between two layers.
With a barrier (a `tf.function`; Algorithm 2 of the paper) the next step begins when all gradients have arrived.
Between steps that overlap, each layer of the next forward pass waits for its own gradient, and is reached when the
site says, else at the mirrored time of that gradient. Of steps between two barriers the mean counts. Without any
barrier, some steps are simulated, and the last one counts.

Links. Each pair of nodes has one connection in each direction, like two MPI ranks over TCP. A connection carries
one message after the other, in the order of submission or by priority; a message that has begun is not
interrupted. Connections that are busy at the same time share the links, each node's to the switch and from it,
evenly as TCP flows do: max-min fair, without packets. So a node that sends a site to all others sends to all of
them at once, and sites follow each other. A message arrives its latency after its last byte has left. The switch
has no limit. `message_us` is the time for which a message occupies a link in addition to its bytes (the start-up
time of MG-WFBP), zero by default.

Waiting. In a step partitioned by rows, an exchange that rows are computed from (moments of batch norm, gathered
rows) stalls computing on a node until it has arrived. Consecutive exchanges that no rows wait for are each assumed
to leave when their own arithmetic is done.

Parameter servers. KV pairs are cut as in kernels/communicator/kv_pairs.cc. All pairs of a site leave at once, and a
server sums a pair and sends it back when all its contributions have arrived. The pairs of a site begin at the
server after the last server of the previous site; the runtime takes a hash of the site's name instead. Dedicated
servers are nodes that do not compute; KV pairs are theirs as in kernels/communicator/options.cc.

Symmetry. Nodes that do the same at the same time are of one *kind* and are simulated as one: the work of a step
grows with the square of the kinds, not of the nodes. Where only some servers of a kind have a pair of a site, the
others are assumed to have pairs of other sites: it delays what follows by its share of the connections. For models with
many small tensors, steps are up to 1.6 % shorter so than node by node.

Several jobs. Jobs that run on the same nodes have connections of their own, which share the links. Their work queues up
at the devices as it comes, or they take turns there (turns.py): a turn begins with the first layer that a step
computes, and ends with its last gradient. A job with barriers goes on behind one when it has all gradients.

Left out: packets and their headers, loss and congestion, processor time of the network, reading data.

H. Zhang et al., "Poseidon", USENIX ATC 2017 ("the paper"); S. Shi et al., "MG-WFBP", INFOCOM 2019;
T. Chilimbi et al., "Project Adam", OSDI 2014; A. Sergeev and M. Del Balso, "Horovod", arXiv 1802.05799.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import math

from evaluation.simulation import links
from evaluation.simulation import transfers as transfers_lib
from evaluation.simulation import turns as turns_lib
from tf_poseidon.errors import PoseidonError
from tf_poseidon.planning import step_time

_ROOT = 0  # the kind of the first node, whose values broadcasts send


@dataclasses.dataclass(frozen=True)
class Event:
    """An action of the first node of a kind: its row is "compute", "send", "receive" or "rebuild"."""

    node: int
    row: str
    site: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Result:
    """A simulated step.

    Attributes:
        step_seconds: Time until it is done on all nodes; of steps between two barriers, the mean.
        compute_seconds: Time of one accelerator without others.
        rebuild_seconds: Rebuilding on the node that rebuilds most.
        sent: Bytes that each node sends.
        received: Bytes that each node receives.
        events: `Event`s in the order of their start.
    """

    step_seconds: float
    compute_seconds: float
    rebuild_seconds: float
    sent: tuple[float, ...]
    received: tuple[float, ...]
    events: tuple[Event, ...]

    @property
    def exposed_seconds(self):
        """How much longer a step takes than its computing."""
        return self.step_seconds - self.compute_seconds

    @property
    def node_bytes(self):
        """Bytes that each node sends plus receives, as in table 1 of the paper."""
        return tuple(map(sum, zip(self.sent, self.received, strict=True)))


class _Nodes:
    """What jobs on the same nodes share.

    Attributes:
        kinds: Lists of nodes that do the same at the same time.
        rates: Of a node's link, by kind.
        clock, network: As in links.py.
        devices: By kind.
        turns: The `turns.Turns`, None if jobs take none.
    """

    def __init__(self, machines, kinds, takes_turns=False):
        self.kinds = kinds
        self.rates = [machines.bytes_per_s(nodes[0]) for nodes in kinds]
        self.clock, latency = links.Clock(), machines.latency_us / 1e6
        self.network = links.Network(self.clock, list(map(len, kinds)), self.rates, latency)
        self.devices = [links.Line(self.clock) for _ in kinds]
        computing = [kind for kind, nodes in enumerate(kinds) if nodes[0] < machines.nodes]
        self.turns = turns_lib.Turns(self.clock, computing, latency) if takes_turns else None

    def run(self):
        self.clock.run(self.network)


class _Run:
    """The steps of one job.

    A gradient is (step, index of its transfer); a pair is (round, kind of its servers, how many of these).
    """

    def __init__(self, work, machines, system, moves, nodes, job=0, steps=None):
        self._work, self._machines, self._system, self._moves = work, machines, system, moves
        self._nodes, self._job, self._kinds = nodes, job, nodes.kinds
        kind_of = {node: kind for kind, nodes in enumerate(self._kinds) for node in nodes}
        self._all = range(len(self._kinds))
        self._computing = [kind for kind, nodes in enumerate(self._kinds) if nodes[0] < machines.nodes]
        # Kinds of nodes that compute, which a kind has connections to, and from.
        self._others = [[k for k in self._computing if k != kind or len(nodes) > 1]
                        for kind, nodes in enumerate(self._kinds)]
        self._pairs = [[(number, owner, count) for number, part in enumerate(move.rounds) for owner, count
                        in collections.Counter(kind_of[o] for o in part.owners).items()] for move in moves]
        self._parts = [[self._parts_of(i, kind) for kind in self._all] for i in range(len(moves))]
        self._rates, self._clock, self._device = nodes.rates, nodes.clock, nodes.devices
        self._up, self._down, self._adder = ([links.Line(self._clock) for _ in self._all] for _ in range(3))
        self._between = system.steps or transfers_lib.STEADY  # two barriers
        self._steps = steps or self._between
        self._program = self._make_program()
        self._missing = {}  # key -> how many are missing
        self._done = [set() for _ in self._all]
        self._blocked = [None for _ in self._all]  # (step, index of the program) that waits for gradients
        self._answers = collections.defaultdict(list)  # by step, that wait for all of it
        self._ring, self._ring_last, self._ring_is_busy = [], -math.inf, False
        self._joined = itertools.count()
        self._ends, self._spans = [0.0] * self._steps, {}

    def _parts_of(self, i, kind):
        """Returns how many events complete a gradient on a kind: its own part, and all arrivals."""
        move = self._moves[i]
        return (1 + (move.ring_bytes is not None) + (move.peer_bytes is not None) * len(self._others[kind])
                + (move.root_bytes is not None and kind != _ROOT)
                + sum((kind in self._others[owner]) + (kind == owner) for _, owner, _ in self._pairs[i]))

    def _make_program(self):
        """Returns what a node computes in a step: (name, seconds, transfers to wait for, that are ready).

        Transfers to wait for are (of how many steps before, index).
        """
        forward = self._work.forward_seconds
        actions = [(forward, "forward", (), ())]  # when, and as above
        if self._between > 1:
            actions += [(self._work.seconds_at(message.needed), "forward", ((1, i),), ())
                        for i, message in enumerate(move.message for move in self._moves)
                        if message.needed is not None and not message.is_waited_for]
        for (ready, _), group in itertools.groupby(
                range(len(self._moves)), key=lambda i: (self._moves[i].ready, self._moves[i].message.depth)):
            group = tuple(group)
            name = "forward" if ready < forward else self._moves[group[-1]].message.name
            actions.append((ready, name, (), group))
            actions.append((ready, name, tuple((0, i) for i in group if self._moves[i].message.is_waited_for), ()))
        actions.append((self._work.seconds, "backward", (), ()))
        parts, then = [], 0.0
        for time, name, waits, emits in sorted(actions, key=lambda action: action[0]):
            parts += [(name, time - then, (), emits), *([("", 0.0, waits, ())] if waits else [])]
            then = time
        return parts

    def start(self):
        for kind in self._computing:
            self._begin(kind, 0)

    @property
    def end(self):
        """When all steps were done on all nodes."""
        return self._ends[-1]

    def result(self):
        sent, received = transfers_lib.node_bytes(self._moves, self._machines)
        owned = collections.Counter()
        for move in self._moves:
            owned.update({owner: move.owner_rebuild for part in move.rounds for owner in part.owners})
        events = [Event(self._kinds[kind][0], row, site, begin, end)
                  for (kind, row, site, _), (begin, end) in self._spans.items()]
        step_seconds = self.end / self._steps if self._system.steps else self._ends[-1] - self._ends[-2]
        return Result(step_seconds, self._work.seconds,
                      sum(m.rebuild for m in self._moves) + max(owned.values(), default=0.0),
                      tuple(sent), tuple(received),
                      tuple(sorted(events, key=lambda e: (e.begin, e.node, e.row, e.site))))

    def _count(self, what, needed, then, *arguments):
        """Counts one of `needed` things, and calls `then` when it is the last."""
        missing = self._missing.pop(what, needed) - 1
        if missing:
            self._missing[what] = missing
        else:
            then(*arguments)

    # ---- computing ----

    def _begin(self, kind, step):
        if step < self._steps:
            late = self._machines.late(self._kinds[kind][0])
            self._clock.at(self._clock.now + late, lambda: self._compute(kind, step, 0))

    def _compute(self, kind, step, index, has_turn=False):
        if index == len(self._program):
            if has_turn:
                self._nodes.turns.end(kind)
            if (step + 1) % self._between:
                self._begin(kind, step + 1)
            self._end_part(kind, step)
            return
        name, seconds, waits, emits = self._program[index]
        if any(step >= before and (step - before, i) not in self._done[kind] for before, i in waits):
            self._blocked[kind] = step, index, has_turn
            return
        if seconds and self._nodes.turns and not has_turn:
            self._nodes.turns.begin(self._job, kind, lambda: self._compute(kind, step, index, True))
            return

        def done(begin, end):
            if seconds:
                self._note(kind, "compute", name, step, "", begin, end)
            for i in emits:
                self._up[kind].do(self._moves[i].up_seconds, lambda *_, i=i: self._start(kind, (step, i)))
            self._compute(kind, step, index + 1, has_turn)

        self._device[kind].do(seconds, done)

    def _end_part(self, kind, step):
        """Handles the end of computing, or of one gradient."""
        self._count(("step", kind, step), 1 + len(self._moves), self._end, kind, step)

    def _end(self, kind, step):
        self._ends[step] = self._clock.now  # of the last kind
        after = step // self._between + 1
        self._count(("barrier", kind, after), self._between, self._begin, kind, after * self._between)

    # ---- exchanging ----

    def _start(self, kind, gradient):
        """Hands a kind's own part of a gradient to the network."""
        move = self._moves[gradient[1]]
        self._arrived(kind, gradient)
        if move.ring_bytes is not None:
            self._count(("ring", gradient), len(self._computing), self._join_ring, gradient)
        if move.peer_bytes is not None:
            for to in self._others[kind]:
                self._send(kind, to, move.peer_bytes, 1.0, gradient, "", self._arrived)
        if move.root_bytes is not None and kind == _ROOT:
            for to in self._others[kind]:
                self._send(kind, to, move.root_bytes, 1.0, gradient, "", self._arrived)
        for pair in self._pairs[gradient[1]]:
            number, owner, count = pair
            self._contributed(owner, gradient, pair)
            if kind in self._others[owner]:
                self._send(kind, owner, move.rounds[number].up, count / len(self._kinds[owner]), gradient,
                           "up", functools.partial(self._contributed, pair=pair))

    def _order(self, gradient):
        """Returns the sort key of messages; with equal keys, they are sent in the order of submission."""
        step, i = gradient
        return step_time.order(step, self._moves[i].message) if self._system.order == "priority" else ()

    def _send(self, kind, to, num_bytes, width, gradient, phase, then):
        move, step = self._moves[gradient[1]], gradient[0]

        def done(begin, end):
            self._note(kind, "send", move.message.name, step, phase, begin, end)
            self._note(to, "receive", move.message.name, step, phase, begin, self._clock.now)
            then(to, gradient)

        start = move.message_us * 1e-6 * min(self._rates[kind], self._rates[to])
        piece = step_time.PIECE_BYTES if self._system.order == "priority" else math.inf
        self._nodes.network.send(kind, to, num_bytes + start, width, self._order(gradient), done, piece, self._job)

    def _contributed(self, owner, gradient, pair):
        """Handles a kind's part on the servers: a server's own, or the contribution of the nodes of a kind."""
        self._count((gradient, pair), len(self._computing) + len(self._others[owner]), self._sum, gradient, pair)

    def _sum(self, gradient, pair):
        move, (number, owner, _) = self._moves[gradient[1]], pair

        def rebuilt(begin, end):
            self._note(owner, "rebuild", move.message.name, gradient[0], "", begin, end)
            self._summed(gradient, pair)

        def summed(*_):
            if move.owner_rebuild:
                self._device[owner].do(move.owner_rebuild, rebuilt)
            else:
                self._summed(gradient, pair)

        num_bytes = move.rounds[number].up * self._machines.nodes
        self._adder[owner].do(num_bytes / (self._machines.sum_gbytes_per_s * 1e9), summed)

    def _summed(self, gradient, pair):
        """Answers, or waits until all tensors of the step are summed."""
        step = gradient[0]
        if self._system.exchange != "whole":
            self._answer(gradient, pair)
            return
        self._answers[step].append((gradient, pair))
        if len(self._answers[step]) == sum(map(len, self._pairs)):
            for held in self._answers.pop(step):
                self._answer(*held)

    def _answer(self, gradient, pair):
        number, owner, count = pair
        if owner in self._computing:
            self._arrived(owner, gradient)  # the server's own copy
        down, width = self._moves[gradient[1]].rounds[number].down, count / len(self._kinds[owner])
        for to in self._others[owner]:
            self._send(owner, to, down, width, gradient, "down", self._arrived)

    def _arrived(self, kind, gradient):
        i = gradient[1]
        self._count((kind, gradient), self._parts[i][kind], self._down[kind].do, self._moves[i].down_seconds,
                    lambda *_: self._rebuild(kind, gradient))

    def _rebuild(self, kind, gradient):
        move = self._moves[gradient[1]]

        def done(begin, end):
            if move.rebuild:
                self._note(kind, "rebuild", move.message.name, gradient[0], "", begin, end)
            self._done[kind].add(gradient)
            self._end_part(kind, gradient[0])
            if self._blocked[kind]:
                blocked, self._blocked[kind] = self._blocked[kind], None
                self._compute(kind, *blocked)

        if move.rebuild:
            self._device[kind].do(move.rebuild, done)
        else:
            done(self._clock.now, self._clock.now)

    def _join_ring(self, gradient):
        heapq.heappush(self._ring, (self._order(gradient), next(self._joined), gradient))
        self._poll_ring()

    def _poll_ring(self):
        """Makes the ring look for tensors at the next end of a cycle."""
        if self._ring_is_busy or not self._ring:
            return
        now, cycle = self._clock.now, self._system.cycle_seconds
        if cycle and self._ring_last > -math.inf:
            cycles = max(1, math.ceil((now - self._ring_last) / cycle - 1e-9))
            now = max(now, self._ring_last + cycles * cycle)
        self._ring_is_busy = True
        self._clock.at(now, self._run_ring)

    def _run_ring(self):
        """All-reduces the ready tensors: each node sends 1/P of them to the next node, 2 (P - 1) times."""
        nodes, taken, num_bytes = self._machines.nodes, [], 0.0
        while self._ring:
            more = self._moves[self._ring[0][2][1]].ring_bytes
            if taken and num_bytes + more > self._system.buffer_bytes:
                break
            taken.append(heapq.heappop(self._ring)[2])
            num_bytes += more
        each = (self._machines.latency_us + self._machines.message_us) / 1e6
        each += num_bytes / nodes / min(self._rates)
        begin = self._ring_last = self._clock.now
        end = begin + 2 * (nodes - 1) * each

        def done():
            self._ring_is_busy = False
            for gradient, kind in itertools.product(taken, self._computing):
                for row in ("send", "receive"):
                    self._note(kind, row, self._moves[gradient[1]].message.name, gradient[0], "", begin, end)
                self._arrived(kind, gradient)
            self._poll_ring()

        self._clock.at(end, done)

    def _note(self, kind, row, site, step, phase, begin, end):
        """Records when the last step's events begin and end; messages of one phase of a site count as one."""
        if step == self._steps - 1:
            first, last = self._spans.get((kind, row, site, phase), (begin, end))
            self._spans[kind, row, site, phase] = min(first, begin), max(last, end)


def _kinds(machines, system, moves, is_each_by_itself=False):
    """Returns lists of nodes that do the same at the same time; servers that own whole tensors never do."""
    alone = {owner for move in moves if system.exchange == "whole" or move.owner_rebuild
             for part in move.rounds for owner in part.owners}
    if any(move.root_bytes is not None for move in moves):
        alone.add(0)
    kinds = collections.defaultdict(list)
    for node in range(machines.all_nodes):
        is_computing = node < machines.nodes
        kinds[machines.bytes_per_s(node), machines.late(node) if is_computing else None, node < machines.serving_nodes,
              node if is_each_by_itself or node in alone else None].append(node)
    return list(kinds.values())


def simulate(work, machines, system, plan=None, is_each_by_itself=False):
    """Simulates a step.

    Args:
        work: The `inputs.Work` of each accelerator.
        machines: The `inputs.Machines`.
        system: The `inputs.System`, such as one of inputs.SYSTEMS.
        plan: The `planning.Plan` to follow; by default the system's policy makes one.
        is_each_by_itself: Simulates every node separately, also those of one kind: slow, with the same result.

    Returns:
        A `Result`.

    Raises:
        PoseidonError: If the plan is for other nodes, or its bytes are not known.
    """
    plan = plan or transfers_lib.make_plan(work, machines, system)
    moves = transfers_lib.transfers(work, machines, system, plan)
    nodes = _Nodes(machines, _kinds(machines, system, moves, is_each_by_itself))
    run = _Run(work, machines, system, moves, nodes)
    run.start()
    nodes.run()
    return run.result()


def simulate_together(jobs, machines, takes_turns):
    """Simulates jobs that begin at the same time on the same nodes.

    Args:
        jobs: (`inputs.Work`, `inputs.System`, number of steps, a multiple of the system's) of each.
        machines: The `inputs.Machines`.
        takes_turns: Whether they take turns on the accelerators.

    Returns:
        When each is done, in seconds.

    Raises:
        PoseidonError: If a system follows no plan: a ring shares no links here. Or for other numbers of steps.
    """
    for _, system, steps in jobs:
        if system.exchange != "plan":
            raise PoseidonError(f"exchange='{system.exchange}', expected 'plan' for jobs on the same nodes: simulate "
                                "others alone.")
        if not system.steps or steps % system.steps:
            raise PoseidonError(f"A job has {steps} steps, expected a multiple of {system.steps or 1}, those between "
                                "two barriers: give as many to both.")
    moves = [transfers_lib.transfers(work, machines, system, transfers_lib.make_plan(work, machines, system))
             for work, system, _ in jobs]
    nodes = _Nodes(machines, _kinds(machines, jobs[0][1], sum(moves, start=type(moves[0])())), takes_turns)
    runs = [_Run(work, machines, system, own, nodes, number, steps)
            for number, ((work, system, steps), own) in enumerate(zip(jobs, moves, strict=True))]
    for run in runs:
        run.start()
    nodes.run()
    return [run.end for run in runs]
