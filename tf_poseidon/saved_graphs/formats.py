"""Reads and writes the files that hold training graphs: SavedModel, MetaGraphDef and GraphDef.

A file or directory is written whole or not at all: under a temporary name, and then renamed. Links in the directory of
a SavedModel are followed: the copy holds what they refer to, and can be moved.

Tests: tests/saved/test_saved_damage.py, tests/saved/test_saved_programs.py.
"""

import abc
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import glob
import os
import shutil
import stat
from typing import TypeVar

from google.protobuf import message
from google.protobuf import text_format
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.core.protobuf import saved_model_pb2

from tf_poseidon.base import files
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.saved_graphs import contexts

M = TypeVar("M", bound=message.Message)


def read(path: str | os.PathLike[str]) -> "Saved":
    """Returns the graph in a file or directory, a `SavedModel`, `MetaGraph` or `GraphDef`.

    Raises:
        PoseidonError: If there is none, or it cannot be read.
    """
    path = os.fspath(path).rstrip("/")
    if os.path.isdir(path):
        return SavedModel(path)
    if not os.path.exists(path):
        raise GraphError(f"There is no file {files.quoted(path)}; give a SavedModel's directory, a MetaGraph (.meta) "
                         "or a GraphDef (.pb, .pbtxt).")
    for suffixes, kind in (((".meta",), MetaGraph), ((".pb", ".pbtxt"), GraphDef)):
        if path.endswith(suffixes):
            return kind(path)
    raise GraphError(f"'{path}' does not end in .meta (MetaGraph), .pb or .pbtxt (GraphDef), and is not the directory "
                     "of a SavedModel; give it the suffix of its format.")


class Saved(abc.ABC):
    """A saved graph.

    Attributes:
        path: Where it was read from.
    """

    kind = ""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    @abc.abstractmethod
    def graph_def(self) -> graph_pb2.GraphDef:
        """The GraphDef, which may be changed in place."""

    @property
    def has_functions(self) -> bool:
        """Whether signatures call functions (TensorFlow 2), which programs load too; else the main graph has them."""
        return False

    def steps(self, signature: str | Sequence[str] | None = None,
              train_op: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        """Returns the tensors, or nodes, that make each step, by name of the step.

        Args:
            signature: Name of a signature, or several; None for the usual one, if it exists.
            train_op: Names of update ops to use instead.

        Raises:
            PoseidonError: If the graph does not have them.
        """
        if train_op:
            return {"train_op": tuple(train_op)}
        if signature is None and "train" not in self._signatures() and (train_ops := self._train_ops()):
            return {"train_op": train_ops}
        signature = "train" if signature is None else signature
        names = (signature,) if isinstance(signature, str) else signature
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
            raise GraphError(f"signature={signature!r}, expected the name of a signature, or a list of names.")
        return {name: self._outputs(name) for name in names}

    def targets(self, signature: str | Sequence[str] | None = None, train_op: Sequence[str] = ()) -> tuple[str, ...]:
        """Returns the names of the tensors, or nodes, that make a training step; arguments as in `steps`."""
        return tuple(dict.fromkeys(target for targets in self.steps(signature, train_op).values()
                                   for target in targets))

    def _outputs(self, name: str) -> tuple[str, ...]:
        """Returns the tensors of a signature."""
        signatures = self._signatures()
        if name not in signatures:
            there = ", ".join(sorted(n for n in signatures if not n.startswith("__")))
            hint = (f"it has {there}" if there else "it has none") + "; name one with --signature"
            if self.kind != "SavedModel":
                hint += ", or its update ops with --train_op"
            raise GraphError(f"'{self.path}' has no signature '{name}': {hint}.")
        outputs = [info.name for info in signatures[name].outputs.values()]
        if not outputs:
            raise GraphError(f"Signature '{name}' of '{self.path}' returns nothing, so nothing says what runs "
                             "when it is called; make it return the loss.")
        return tuple(sorted(outputs))

    def checkpoint(self) -> tuple[str, str, str] | None:
        """Returns (op that restores, tensor that takes the path, path) of TensorFlow 1's checkpoint, or None."""
        return None

    def _signatures(self) -> Mapping[str, meta_graph_pb2.SignatureDef]:
        return {}

    def _train_ops(self) -> tuple[str, ...]:
        return ()

    def check_target(self, target: str | os.PathLike[str]) -> None:
        """Refuses what `write` would refuse, before anything takes long.

        Raises:
            PoseidonError: If the path exists, or cannot be written, or a file that belongs to the graph cannot be read.
        """
        for path in self._written(os.fspath(target)):
            _check_new(path)

    def _written(self, target: str) -> list[str]:
        """Returns the paths that `write` makes; refuses a path that does not fit the format."""
        return [target.rstrip("/")]

    @abc.abstractmethod
    def write(self, target: str | os.PathLike[str]) -> None:
        """Writes the graph to another path, with the files that belong to it.

        Raises:
            PoseidonError: As `check_target`.
        """


class SavedModel(Saved):
    """The directory of a SavedModel, of TensorFlow 1 or 2."""

    kind = "SavedModel"
    _PROTO, _TEXT, _FINGERPRINT = "saved_model.pb", "saved_model.pbtxt", "fingerprint.pb"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        files = [name for name in (self._PROTO, self._TEXT) if os.path.exists(os.path.join(path, name))]
        if not files:
            raise GraphError(f"The directory '{path}' has no {self._PROTO}, so it is not a SavedModel.")
        self._file = files[0]
        self._proto = _parse(os.path.join(path, self._file), saved_model_pb2.SavedModel)
        if len(self._proto.meta_graphs) != 1:
            raise GraphError(f"The SavedModel '{path}' holds {len(self._proto.meta_graphs)} graphs, expected one.")

    @property
    def graph_def(self) -> graph_pb2.GraphDef:
        return self._proto.meta_graphs[0].graph_def

    @property
    def has_functions(self) -> bool:
        return bool(self._proto.meta_graphs[0].object_graph_def.nodes)

    @property
    def tags(self) -> Sequence[str]:
        """The tags of its graph, by which TensorFlow 1 loads it."""
        return self._proto.meta_graphs[0].meta_info_def.tags

    def _signatures(self) -> Mapping[str, meta_graph_pb2.SignatureDef]:
        return self._proto.meta_graphs[0].signature_def

    def _train_ops(self) -> tuple[str, ...]:
        return _collected(self._proto.meta_graphs[0])

    def check_target(self, target: str | os.PathLike[str]) -> None:
        super().check_target(target)
        self._others(os.fspath(target))

    def _others(self, target: str) -> list[str]:
        """Returns the files and directories besides the graph, relative to `path`; a directory before what it holds."""
        own = (self._PROTO, self._TEXT, self._FINGERPRINT)
        source, parent = (os.path.realpath(path) for path in (self.path, os.path.dirname(target.rstrip("/"))))
        if os.path.commonpath([source, parent]) == source:
            raise GraphError(f"'{target}' is inside of '{self.path}', which is copied; name a path outside of it.")
        return [path for path in _inside(self.path) if path not in own]

    def write(self, target: str | os.PathLike[str]) -> None:
        target = os.fspath(target).rstrip("/")
        others = self._others(target)
        with _whole(target) as directory:
            for path in ("", *others):
                source, copy = os.path.join(self.path, path), os.path.join(directory, path)
                if os.path.isdir(source):  # which may be write-protected
                    os.mkdir(copy, stat.S_IMODE(os.stat(source).st_mode) | stat.S_IRWXU)
                else:
                    shutil.copy2(source, copy)
            contexts.forget_removed(self._proto.meta_graphs[0])
            _serialize(self._proto, os.path.join(directory, self._file))
            if os.path.exists(os.path.join(self.path, self._FINGERPRINT)):
                with open(os.path.join(directory, self._FINGERPRINT), "wb") as file:
                    file.write(tf_compat.fingerprint(directory))


class MetaGraph(Saved):
    """The file of a MetaGraphDef, and the checkpoint of the same name."""

    kind = "MetaGraph"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._proto = _parse(path, meta_graph_pb2.MetaGraphDef)

    @property
    def graph_def(self) -> graph_pb2.GraphDef:
        return self._proto.graph_def

    def _signatures(self) -> Mapping[str, meta_graph_pb2.SignatureDef]:
        return self._proto.signature_def

    def _train_ops(self) -> tuple[str, ...]:
        return _collected(self._proto)

    def _written(self, target: str) -> list[str]:
        if not target.endswith(".meta"):
            raise GraphError(f"'{target}' does not end in .meta, as the file of a MetaGraph does; rename it.")
        prefix, own = target.removesuffix(".meta"), self.path.removesuffix(".meta")
        return [target, *(prefix + file.removeprefix(own) for file in self._checkpoint_files())]

    def _checkpoint_files(self) -> list[str]:
        own = glob.escape(self.path.removesuffix(".meta"))
        paths = sorted(glob.glob(f"{own}.index") + glob.glob(f"{own}.data-?????-of-?????"))
        for file in paths:
            _check_copied(file)
        return paths

    def write(self, target: str | os.PathLike[str]) -> None:
        target = os.fspath(target)
        with contextlib.ExitStack() as stack:
            # The graph is renamed last: when it exists, so does its checkpoint.
            meta, *copies = (stack.enter_context(_whole(path)) for path in self._written(target))
            contexts.forget_removed(self._proto)
            _serialize(self._proto, meta)
            for file, copy in zip(self._checkpoint_files(), copies, strict=True):
                shutil.copyfile(file, copy)

    def checkpoint(self) -> tuple[str, str, str] | None:
        saver, prefix = self._proto.saver_def, self.path.removesuffix(".meta")
        if not saver.restore_op_name or not os.path.exists(f"{prefix}.index"):
            return None
        return saver.restore_op_name, saver.filename_tensor_name, prefix


class GraphDef(Saved):
    """The file of a GraphDef, as text if its name ends in .pbtxt."""

    kind = "GraphDef"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._proto = _parse(path, graph_pb2.GraphDef)

    @property
    def graph_def(self) -> graph_pb2.GraphDef:
        return self._proto

    def _written(self, target: str) -> list[str]:
        if not target.endswith((".pb", ".pbtxt")):
            raise GraphError(f"'{target}' ends neither in .pb nor in .pbtxt, as the file of a GraphDef does; "
                             "rename it.")
        return [target]

    def write(self, target: str | os.PathLike[str]) -> None:
        target, = self._written(os.fspath(target))
        with _whole(target) as file:
            _serialize(self._proto, file, is_text=target.endswith(".pbtxt"))


def _collected(meta_graph: meta_graph_pb2.MetaGraphDef) -> tuple[str, ...]:
    """Returns the names in TensorFlow 1's collection of training ops."""
    return tuple(meta_graph.collection_def["train_op"].node_list.value
                 if "train_op" in meta_graph.collection_def else ())


def _inside(path: str, within: str = "", is_linked: bool = False) -> list[str]:
    """Returns what is in a directory, relative to it: a directory before what it holds.

    Args:
        path: The directory.
        within: A directory in it, relative to it, to begin with.
        is_linked: Whether a link leads there.

    Raises:
        PoseidonError: If something is there that cannot be copied.
    """
    here, paths = os.path.join(path, within), []
    try:
        names = sorted(os.listdir(here))
    except OSError as error:
        raise GraphError(f"'{here}' cannot be read: {files.reason(error)}; it belongs to the SavedModel.") from error
    for name in names:
        relative, full = os.path.join(within, name), os.path.join(here, name)
        paths.append(relative)
        if not os.path.isdir(full):
            _check_copied(full)
            continue
        is_link = os.path.islink(full)
        if is_link:
            real, holds = os.path.realpath(full), os.path.realpath(here)
            # Few links in what links refer to could make the copy as large as one likes.
            why = "which holds it" if os.path.commonpath([real, holds]) == real else "from inside of such a link"
            if is_linked or why == "which holds it":
                raise GraphError(f"'{full}' is a link to the directory '{os.readlink(full)}', {why}; it cannot be "
                                 "copied: remove it.")
        paths += _inside(path, relative, is_linked or is_link)
    return paths


def _check_copied(path: str) -> None:
    """Refuses what is not a file that can be read, or a link to one."""
    if os.path.islink(path) and not os.path.exists(path):
        raise GraphError(f"'{path}' is a link to '{os.readlink(path)}', which does not exist; it cannot be copied: "
                         "remove it, or bring back what it refers to.")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise GraphError(f"'{path}' is neither a file nor a directory (but a pipe, a socket or a device); it "
                             "cannot be copied: remove it.")
        open(path, "rb").close()
    except OSError as error:
        raise GraphError(f"'{path}' cannot be read: {files.reason(error)}; it belongs to the saved graph.") from error


def _parse(path: str, kind: type[M]) -> M:
    """Returns the protocol buffer in a file."""
    proto = kind()
    try:
        with open(path, "rb") as file:
            data = file.read()
        if path.endswith(".pbtxt"):
            text_format.Parse(data.decode(), proto)
        else:
            proto.ParseFromString(data)
    except (message.DecodeError, text_format.ParseError, ValueError, OSError, RecursionError) as error:
        text = files.reason(error).strip()
        raise GraphError(f"'{path}' cannot be read as a {kind.DESCRIPTOR.name}: {text}; it is damaged, or "
                         "another kind of file.") from error
    return proto


def _serialize(proto: message.Message, path: str, is_text: bool | None = None) -> None:
    if path.endswith(".pbtxt") if is_text is None else is_text:
        data = text_format.MessageToString(proto).encode()
    else:
        try:
            data = proto.SerializeToString(deterministic=True)
        except message.EncodeError as error:
            raise GraphError(f"'{path}' cannot be written: its graph takes 2 GiB or more, which no protocol buffer may "
                             "take; keep large constants in variables, or in a checkpoint.") from error
    with open(path, "wb") as file:
        file.write(data)


@contextlib.contextmanager
def _whole(target: str) -> Iterator[str]:
    """A context with a path to write to, which becomes `target` at the end; nothing remains after a failure."""
    _check_new(target)
    directory, name = os.path.split(target)
    temporary = os.path.join(directory, f".{name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.rename(temporary, target)
    except OSError as error:
        raise GraphError(f"'{target}' cannot be written: {files.reason(error)}; nothing remains of it.") from error
    finally:
        if os.path.isdir(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
        elif os.path.lexists(temporary):
            os.remove(temporary)


def _check_new(target: str) -> None:
    """Refuses a path that exists, or cannot be written."""
    if os.path.lexists(target):
        raise GraphError(f"'{target}' exists already; remove it, or name another.")
    directory, name = os.path.split(target)
    try:
        if not name or not os.path.isdir(directory or "."):
            raise GraphError(f"{files.quoted(target)} cannot be written: there is no directory "
                             f"{files.quoted(directory)}; name a path in one that exists.")
        files.check(target)
    except (OSError, ValueError) as error:
        raise GraphError(f"{files.quoted(target)} cannot be written: {files.reason(error)}; name a path in a "
                         "directory that may be written, with room for it.") from error
