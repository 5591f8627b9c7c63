"""Programs of TensorFlow 1, rewritten: each call fetches what one process fetches."""

import pickle

import launch
import numpy as np
import pytest
import saved_programs

import tf_poseidon as poseidon

RANKS = {2: "sfb", 3: "ps"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns, for each number of ranks, (reports, results) of all programs."""
    found, folder = {}, tmp_path_factory.mktemp("programs")
    originals = {}
    for name in saved_programs.PROGRAMS:
        (folder / name).mkdir()
        originals[name] = saved_programs.save(name, folder / name)
    for ranks, policy in RANKS.items():
        reports, cases = {}, []
        for name, program in saved_programs.PROGRAMS.items():
            target = folder / name / f"for_{ranks}.meta"
            reports[name] = poseidon.rewrite_meta_graph(
                originals[name], target, program.train_op, workers=ranks, batch_size=3, policy=policy,
                inputs=program.inputs)
            cases.append((name, originals[name], str(target)))
        (folder / "cases").write_bytes(pickle.dumps(cases))
        launch.run_ok(["saved_programs.py", folder / "cases", folder / "out"], ranks, timeout_s=200)
        found[ranks] = reports, pickle.loads((folder / "out").read_bytes())
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", saved_programs.PROGRAMS)
def test_fetches_what_one_process_does(trained, name, ranks):
    reports, results = trained[ranks]
    (fetched, variables), bits, (wanted, expected) = results[name]
    assert bits == 1
    for value, want in zip(fetched, wanted, strict=True):
        np.testing.assert_allclose(value, want, rtol=2e-5, atol=1e-6)
    for variable, value in variables.items():
        np.testing.assert_allclose(value, expected[variable], rtol=2e-5, atol=2e-6, err_msg=variable)
    step, = reports[name].steps.values()
    assert {whole.op for whole in step.exchanges.whole} == set(saved_programs.PROGRAMS[name].whole)
