"""Tables of private names of other libraries, which may change with any of their versions.

Tests: tests/unit/test_compat.py.
"""

import dataclasses
import dis
import functools
import importlib
import inspect
from typing import Any

from packaging import requirements
from packaging import version

from tf_poseidon.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Name:
    """A private name.

    Attributes:
        module: Where it is defined.
        name: Its name there, with its class; may be an attribute that methods of the class assign to its objects.
        why: What we need it for, after "to".
        parameters: For a function: the parameters that it must have, or this version is not one that we know.
        since: The first release series that has it, such as "3.15", and in which we need it; "" for all.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] = ()
    since: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" + (f"({', '.join(self.parameters)})" if self.parameters else "")


@dataclasses.dataclass(frozen=True)
class Table:
    """The private names of a library.

    Attributes:
        library: Its name.
        requirement: The tested versions, in pip's notation.
        remedy: What to install in place of another version.
        names: The `Name`s.
    """

    library: str
    requirement: str
    remedy: str
    names: tuple[Name, ...]

    def __getitem__(self, key: str) -> Any:
        """Returns the object of a name in the table; checks the table before the first one.

        Args:
            key: The last part of the module's name, and the name: "func_graph.FuncGraph".
        """
        return self._found[key]

    @functools.cached_property
    def _found(self) -> dict[str, Any]:
        return self.check()

    def check(self) -> dict[str, Any]:
        """Returns the objects of all names, by their keys.

        Raises:
            PoseidonError: If the installed version does not meet the requirement, or lacks a name.
        """
        requirement = requirements.Requirement(self.requirement)
        if not requirement.specifier.contains(self.version, prereleases=True):
            raise ConfigurationError(f"{self.library} {self.version} is installed, but tf_poseidon works with "
                                     f"'{self.requirement}' only; {self.remedy}.")
        return {f"{name.module.rpartition('.')[2]}.{name.name}": self.resolve(name)[2] for name in self.names
                if self.has(name)}

    def has(self, name: Name) -> bool:
        """Whether the installed version should have a `Name`."""
        return not name.since or version.Version(self.version).release >= version.Version(name.since).release

    @property
    def version(self) -> str:
        """The installed version."""
        return importlib.import_module(requirements.Requirement(self.requirement).name).__version__

    def resolve(self, name: Name) -> tuple[Any, str, Any]:
        """Returns (owner, attribute, value) of a `Name`; the value is None for an attribute of objects.

        Raises:
            PoseidonError: If the installed version does not define it there, or with different parameters.
        """
        *path, attribute = name.name.split(".")
        try:
            owner = importlib.import_module(name.module)
        except ImportError:
            owner = None
        for part in path:
            owner = getattr(owner, part, None)
        is_there = owner is not None and (attribute in vars(owner) or _gives(owner, attribute))
        value = getattr(owner, attribute, None) if is_there else None
        parameters = inspect.signature(value).parameters if name.parameters and callable(value) else ()
        if not is_there or not set(parameters).issuperset(name.parameters):
            raise ConfigurationError(f"{self.library} {self.version} has no {name}, which tf_poseidon needs to "
                                     f"{name.why}; {self.remedy}.")
        return owner, attribute, value


def _gives(owner: object, attribute: str) -> bool:
    """Whether a method of a class assigns an attribute of an object."""
    if not inspect.isclass(owner):
        return False
    codes = [getattr(inspect.unwrap(member), "__code__", None) for member in vars(owner).values()]
    return any(instruction.opname == "STORE_ATTR" and instruction.argval == attribute
               for code in codes if code is not None and attribute in code.co_names
               for instruction in dis.get_instructions(code))
