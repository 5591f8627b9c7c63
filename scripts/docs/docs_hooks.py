"""What mkdocs does beside rendering docs/ (mkdocs.yml): files from outside of it, titles, and the command line's help.

A link out of docs/, such as ../CONTRIBUTING.md, leads to a copy of that file in the site's folder repository/. The
first page begins with README.md, and goes on with the table of pages. In docs/commands.md, a block that consists of a
command with --help shows what that prints.
"""

import os
import pathlib
import posixpath
import re
import subprocess
import sys

from mkdocs.structure.files import File

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(\]\()(?!https?://|#)([^)#\s]+)((?:#[^)\s]*)?\))")
_FILE_NAME = re.compile(r"\[(?:\w+/)?\w+\.md\](\(([^)#\s]+\.md)(?:#[^)\s]*)?\))")
_HELP = re.compile(r"```sh\ntf-poseidon ((?:\w+ )?--help)\n```")


def on_files(files, config):
    """Adds the files outside of docs/ that pages link to, and those that these link to."""
    pending = [_repository_path(file.src_uri) for file in files.documentation_pages()]
    pending += [page.removeprefix("repository/") for page in _pages(config["nav"]) if page.startswith("repository/")]
    seen = set(pending)
    for path in pending:  # grows meanwhile
        uri = _uri(path)
        if uri.startswith("repository/"):
            files.append(File.generated(config, uri, abs_src_path=str(_ROOT / path)))
        if path.endswith(".md"):
            found = {target for target in _targets(path) if not target.startswith("docs/")} - seen
            pending += sorted(found)
            seen |= found
    return files


def on_page_markdown(markdown, page, config, files):
    """Lets links lead to where files are in the site, and adds README's introduction and the command line's help."""
    path = _repository_path(page.file.src_uri)
    markdown = _linked(markdown, path, page)
    if path == "docs/index.md":
        introduction, _, _ = (_ROOT / "README.md").read_text(encoding="utf-8").partition("\n## More\n")
        return _linked(introduction, "README.md", page) + "\n## Pages\n" + markdown.partition("\n")[2]
    return _HELP.sub(_help, markdown) if path == "docs/commands.md" else markdown


def _linked(markdown, path, page):
    """Returns a text of a file of the repository with links for a page."""
    here = posixpath.dirname(page.file.src_uri)

    def link(match):
        target = _uri(posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2])))
        return f"{match[1]}{posixpath.relpath(target, here)}{match[3]}"

    return _LINK.sub(link, _with_titles(markdown, path))


def _with_titles(markdown, path):
    """Returns a text in which links that are named after a file have the title of its page."""
    folder = _ROOT / posixpath.dirname(path)

    def title(match):
        heading = re.search(r"^# (.*)$", (folder / match[2]).read_text(encoding="utf-8"), re.MULTILINE)
        return f"[{heading[1]}]{match[1]}" if heading else match[0]

    return _FILE_NAME.sub(title, markdown)


def _help(match):
    done = subprocess.run([sys.executable, "-m", "tf_poseidon", *match[1].split()], check=True, capture_output=True,
                          text=True, env={**os.environ, "COLUMNS": "100"})
    return f"```text\n{done.stdout}```"


def _targets(path):
    """Returns the files that a page links to, relative to the repository."""
    folder = posixpath.dirname(path)
    return [posixpath.normpath(posixpath.join(folder, match[2]))
            for match in _LINK.finditer((_ROOT / path).read_text(encoding="utf-8"))]


def _repository_path(uri):
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def _uri(path):
    """Returns where a file of the repository is in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def _pages(nav):
    """Yields the pages in a part of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(part)
