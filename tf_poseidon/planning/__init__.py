"""Deciding how each gradient travels: pure Python, without TensorFlow.

A training graph is described by its `Site`s, and a `Plan` holds a `Decision` for each of them. Both
are frozen values. Ranks plan apart from each other and must come to the same plan, so planning
depends on its arguments alone.
"""

from tf_poseidon.planning.plan import Decision
from tf_poseidon.planning.plan import Plan
from tf_poseidon.planning.policies import POLICIES
from tf_poseidon.planning.policies import make_plan
from tf_poseidon.planning.site import Factors
from tf_poseidon.planning.site import Site
from tf_poseidon.planning.site import Slices

__all__ = ["Decision", "Factors", "POLICIES", "Plan", "Site", "Slices", "make_plan"]
