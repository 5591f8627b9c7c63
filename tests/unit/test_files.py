"""Files of models, written while the process is ended: without a job."""

import os

import h5py
import keras
import numpy as np
import pytest

from tf_poseidon.errors import JobError
from tf_poseidon.keras_hook import hooks


class Ended(BaseException):
    """Stands for the end of the process: nothing after it runs, but for what removes files."""


@pytest.fixture(autouse=True)
def hooked():
    with hooks.installed(alone=True):
        yield


def net(value=0.0):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile("sgd", "mse")
    model.layers[0].kernel.assign(np.full((2, 1), value))
    return model


def kernel(path):
    model = keras.models.load_model(path) if str(path).endswith(".keras") else net()
    if not str(path).endswith(".keras"):
        model.load_weights(path)
    return float(model.layers[0].kernel.numpy()[0, 0])


SAVES = {"model.keras": keras.Model.save, "m.weights.h5": keras.Model.save_weights}


def end_at(monkeypatch, owner, name):
    """Ends the process when a function has run for the first time."""
    original = getattr(owner, name)

    def ends(*args, **options):
        original(*args, **options)
        raise Ended

    monkeypatch.setattr(owner, name, ends)


@pytest.mark.parametrize("name", SAVES)
def test_file_is_complete_or_as_it_was(name, tmp_path, monkeypatch):
    SAVES[name](net(1), tmp_path / name)
    os.chmod(tmp_path / name, 0o640)
    with monkeypatch.context() as patched:
        end_at(patched, h5py.File, "create_group")  # in the middle
        with pytest.raises(Ended):
            SAVES[name](net(2), tmp_path / name)
    assert kernel(tmp_path / name) == 1
    SAVES[name](net(3), tmp_path / name)
    assert kernel(tmp_path / name) == 3
    assert os.listdir(tmp_path) == [name] and os.stat(tmp_path / name).st_mode & 0o777 == 0o640


def test_what_is_not_one_file_is_written_by_keras(tmp_path):
    net(1).save(tmp_path / "directory", zipped=False)
    assert (tmp_path / "directory" / "config.json").exists()
    for name in ("m.weights.json", "n.weights.h5"):
        net(2).save_weights(tmp_path / name, max_shard_size=1)
        assert kernel(tmp_path / f"{name[0]}.weights.json") == 2


def test_link_stays_a_link(tmp_path):
    (tmp_path / "link.keras").symlink_to(tmp_path / "model.keras")
    net(1).save(tmp_path / "link.keras")
    assert (tmp_path / "link.keras").is_symlink() and kernel(tmp_path / "model.keras") == 1


class Count(keras.callbacks.Callback):
    """Makes the weights those of the epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs = [*getattr(self, "epochs", ()), epoch]

    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[0].kernel.assign(np.full((2, 1), epoch + 1.0))


def fit(directory, **options):
    model, count = net(), Count()
    backup = keras.callbacks.BackupAndRestore(directory, delete_checkpoint=False, **options)
    try:
        model.fit(np.zeros((4, 2)), np.zeros((4, 1)), epochs=4, verbose=0, callbacks=[count, backup])
    except Ended:
        pass
    return model, count.epochs


# What runs just before the process ends, in the second backup.
MOMENTS = {"weights are half written": (h5py.File, "create_group"), "weights are written": (os, "fsync"),
           "they are in place": (os, "replace"), "the epoch is half written": (os, "replace")}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("double", [False, True])
def test_backup_survives_the_end_of_the_process(moment, double, tmp_path, monkeypatch):
    class Second(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                end_at(monkeypatch, *MOMENTS[moment])

    model, count = net(), Count()
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False, double_checkpoint=double)
    with pytest.raises(Ended):
        model.fit(np.zeros((4, 2)), np.zeros((4, 1)), epochs=4, verbose=0, callbacks=[Second(), count, backup])
    monkeypatch.undo()
    if moment == "the epoch is half written":
        (tmp_path / "training_metadata.json").write_text('{"epo')

    class First(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.found = getattr(self, "found", (epoch, float(self.model.layers[0].kernel.numpy()[0, 0])))

    first = First()
    again = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False, double_checkpoint=double)
    net().fit(np.zeros((4, 2)), np.zeros((4, 1)), epochs=4, verbose=0, callbacks=[again, first, Count()])
    epoch, weights = first.found
    assert weights == epoch == (2 if moment in ("they are in place", "the epoch is half written") else 1)


def test_damaged_backup_is_named_and_passed_over(tmp_path, caplog):
    fit(tmp_path, double_checkpoint=True)
    latest = tmp_path / "latest.weights.h5"
    latest.write_bytes(latest.read_bytes()[:500])
    _, epochs = fit(tmp_path, double_checkpoint=True)
    assert epochs == [3]
    assert f"The backup '{latest}' cannot be read" in caplog.text and "the one before it is restored" in caplog.text


@pytest.mark.parametrize("double", [False, True])
def test_damaged_backup_without_another_is_refused(double, tmp_path):
    fit(tmp_path, double_checkpoint=double)
    for path in tmp_path.glob("latest.weights.h5*"):
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(JobError, match=r"latest\.weights\.h5' cannot be read .* and there is none before it; remove"):
        fit(tmp_path, double_checkpoint=double)


@pytest.mark.parametrize("before, now, said", [
    (lambda: keras.optimizers.SGD(0.5), lambda: keras.optimizers.Adam(0.25), "(SGD, 2 variables)"),
    # As many variables, so Keras alone would take the sums of squares for momenta.
    (lambda: keras.optimizers.Adagrad(0.5), lambda: keras.optimizers.SGD(0.25, 0.9), "(Adagrad, 4 variables)"),
    (lambda: keras.optimizers.SGD(0.5, 0.9), lambda: keras.optimizers.SGD(0.25, 0.9), "")])
def test_backup_of_another_optimizer_is_said(before, now, said, tmp_path, caplog):
    for optimizer in (before(), now()):
        model = net()
        model.compile(optimizer, "mse")
        seen = []

        class See(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None, seen=seen, model=model):
                seen.append([variable.numpy() for variable in model.optimizer.variables[1:]])

        caplog.clear()
        model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=2 + len(os.listdir(tmp_path)), verbose=0, callbacks=[
            keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False), See()])
    assert ("was written with another optimizer " + said in caplog.text) == bool(said)
    assert seen[0][0] == (0.25 if said else 0.5)
    assert all(not value.any() for value in seen[0][1:]) == bool(said)
    assert model.layers[0].kernel.numpy().any()


def test_backup_of_plain_keras_is_restored(tmp_path):
    fit(tmp_path)
    with h5py.File(tmp_path / "latest.weights.h5", "r+") as file:
        del file.attrs["training_metadata"]
    (tmp_path / "training_metadata.json").write_text('{"epoch": 3, "batch": 0}')
    assert fit(tmp_path)[1] == [3]
