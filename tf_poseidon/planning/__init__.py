"""Decides how each gradient travels, in pure Python without TensorFlow.

`Site`s describe a training graph, a `Cluster` describes the machines, and a `Plan` holds a `Decision`
per site. All are frozen values. Ranks plan separately and must arrive at the same plan, so planning
depends only on its arguments.
"""

from tf_poseidon.planning.choice.planner import is_worth_dividing
from tf_poseidon.planning.choice.planner import Planner
from tf_poseidon.planning.choice.policies import make_plan
from tf_poseidon.planning.choice.policies import pinned
from tf_poseidon.planning.choice.policies import POLICIES
from tf_poseidon.planning.choice.policies import unmatched_pins
from tf_poseidon.planning.cluster import ACCELERATORS
from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cluster import describe
from tf_poseidon.planning.cluster import NETWORKS
from tf_poseidon.planning.cost import BROADCAST
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.cost import dense_bytes
from tf_poseidon.planning.cost import DIVIDE
from tf_poseidon.planning.cost import GATHER
from tf_poseidon.planning.cost import linked_dense_bytes
from tf_poseidon.planning.cost import RETURN
from tf_poseidon.planning.cost import SCATTER
from tf_poseidon.planning.cost import SHARDS
from tf_poseidon.planning.cost import SUM
from tf_poseidon.planning.decision import Decision
from tf_poseidon.planning.exchange import Exchange
from tf_poseidon.planning.memory import Memory
from tf_poseidon.planning.partition_facts import COLUMNS
from tf_poseidon.planning.partition_facts import DividedWeight
from tf_poseidon.planning.partition_facts import PartitionFacts
from tf_poseidon.planning.partition_facts import WholeOp
from tf_poseidon.planning.plan import Plan
from tf_poseidon.planning.schemes import HFB
from tf_poseidon.planning.schemes import PS
from tf_poseidon.planning.schemes import SCHEMES
from tf_poseidon.planning.schemes import SFB
from tf_poseidon.planning.schemes import SPARSE
from tf_poseidon.planning.schemes.factor_broadcasting import least_saving
from tf_poseidon.planning.site import Factors
from tf_poseidon.planning.site import Site
from tf_poseidon.planning.site import Slices

__all__ = ["ACCELERATORS", "BROADCAST", "COLUMNS", "Cluster", "Cost", "DIVIDE", "Decision", "DividedWeight",
           "Exchange", "Factors", "GATHER", "HFB", "Memory", "NETWORKS", "POLICIES", "PS", "PartitionFacts", "Plan",
           "Planner", "RETURN", "SCATTER", "SCHEMES", "SFB", "SHARDS", "SPARSE", "SUM", "Site", "Slices", "WholeOp",
           "dense_bytes", "describe", "is_worth_dividing", "least_saving", "linked_dense_bytes", "make_plan", "pinned",
           "unmatched_pins"]
