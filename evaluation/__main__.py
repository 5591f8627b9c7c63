"""Runs a module of this package from any directory: `python DIRECTORY/evaluation faults.kills`; or lists them."""

import ast
import pathlib
import runpy
import sys

_FOLDER = pathlib.Path(__file__).resolve().parent


def _commands() -> dict[str, str]:
    """Returns the first line of each module that can be run, by the module's name within the package."""
    sources = {path: path.read_text() for path in sorted(_FOLDER.glob("*/*.py"))}
    return {f"{path.parent.name}.{path.stem}": (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
            for path, source in sources.items() if '__name__ == "__main__"' in source}


def main() -> None:
    """Runs the module that the command line names, with the words that follow."""
    if len(sys.argv) < 2:
        commands = _commands()
        width = max(map(len, commands))
        print("python -m evaluation.MODULE, with --help for its flags:\n")
        print("\n".join(f"  {name:{width}}  {summary}" for name, summary in commands.items()))
        return
    if pathlib.Path(sys.path[0]).resolve() == _FOLDER:  # run by the folder's name
        del sys.path[0]
    sys.path.append(str(_FOLDER.parent))  # at the end: an installed tf_poseidon is used
    del sys.argv[0]
    runpy.run_module(f"evaluation.{sys.argv[0]}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
