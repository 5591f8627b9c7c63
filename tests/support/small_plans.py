"""Sites and plans shared by the tests of planning."""

from tf_poseidon import planning


def dense_site(m, n, k, name="kernel", itemsize=4):
    return planning.Site(name, "float32", itemsize, (m, n), planning.Factors(m, n, k, itemsize))


def plan_for(sites, policy, workers, servers=0, pins=(), merge=False, **graph):
    return planning.Planner(planning.Cluster(workers, servers), policy, pins, merge).plan(sites, **graph)


BIAS = planning.Site("bias", "float32", 4, (512,), refusal="alone", bias_of="kernel")
TABLE = planning.Site("table", "float32", 4, (1000, 10), slices=planning.Slices(20, 44))
SITES = (dense_site(512, 512, 8), BIAS, TABLE,
         planning.Site("odd", "float16", 2, None, refusal="its shape is \"unknown\" – µ"))
