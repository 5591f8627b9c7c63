"""What a release refuses, and what it makes, in a small repository; and that all files name the same version."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tf_poseidon import supported

ROOT = pathlib.Path(__file__).resolve().parents[2]
METADATA = """Metadata-Version: 2.4
Name: tf_poseidon
Version: 0.2.0
Summary: small
License-Expression: Apache-2.0
Requires-Python: >=3.10
Requires-Dist: numpy
Provides-Extra: cpu
Description-Content-Type: text/markdown

# tf_poseidon
"""
LIBRARIES = [f"tf_poseidon/ops/{supported.library(series)}.so" for series in supported.TENSORFLOW_SERIES]
NOBODY = {f"GIT_{who}_{what}": "nobody" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
OWN = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "WHEEL_SERIES": "", **NOBODY}


def git(folder, *arguments):
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True,
                          env=os.environ | OWN).stdout


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """A repository in which 0.2.0 can be released."""
    folder = tmp_path_factory.mktemp("release") / "committed"
    (folder / "tf_poseidon").mkdir(parents=True)
    shutil.copy(ROOT / "tf_poseidon" / "supported.py", folder / "tf_poseidon")
    (folder / "pyproject.toml").write_text('[project]\nname = "tf_poseidon"\nversion = "0.2.0"\n')
    (folder / "CHANGELOG.md").write_text("# Changes\n\n## 0.2.0 (2026-12-01)\n\n### Added\n\n* More.\n\n"
                                         "## 0.1.0 (2026-11-01)\n\n* All.\n")
    (folder / ".gitignore").write_text("/build/\n/dist/\n")
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=all")
    return folder


@pytest.fixture
def repository(committed, tmp_path):
    return pathlib.Path(shutil.copytree(committed, tmp_path / "repository"))


def release(folder, step, version="0.2.0", **environment):
    return subprocess.run([sys.executable, "-S", ROOT / "scripts" / "release.py", step, version], cwd=folder, text=True,
                          capture_output=True, env=os.environ | OWN | environment)


def write(name, old, new):
    """Returns a function that replaces a text in a file of a repository, and commits that."""
    def change(folder):
        path = folder / name
        path.write_text(path.read_text().replace(old, new))
        git(folder, "commit", "--quiet", "--all", "--message=changed")
    return change


@pytest.mark.parametrize("change, version, message", [
    (lambda folder: None, "", "VERSION is '', expected three numbers"),
    (lambda folder: None, "v0.2.0", "VERSION is 'v0.2.0', expected three numbers"),
    (lambda folder: git(folder, "switch", "--quiet", "--create", "other"), "0.2.0",
     "the branch is 'other', expected 'main'"),
    (lambda folder: git(folder, "switch", "--quiet", "--detach"), "0.2.0", "the branch is '', expected 'main'"),
    (lambda folder: (folder / "setup.py").touch(), "0.2.0", "1 files are not as committed, such as 'setup.py'"),
    (lambda folder: (folder / "pyproject.toml").write_text(""), "0.2.0", "such as 'pyproject.toml', expected none"),
    (lambda folder: git(folder, "tag", "v0.2.0"), "0.2.0", "the tag 'v0.2.0' exists ("),
    (lambda folder: None, "0.2.1", "pyproject.toml has the version '0.2.0', expected '0.2.1'"),
    (write("CHANGELOG.md", "## 0.2.0", "## 0.2"), "0.2.0",
     "CHANGELOG.md has no section of it, expected a heading '## 0.2.0 ("),
    (write("CHANGELOG.md", "0 (2026-12-01", "0 (not released yet"), "0.2.0",
     "CHANGELOG.md says 'not released yet' of it"),
    (write("CHANGELOG.md", "\n### Added\n\n* More.\n", ""), "0.2.0", "CHANGELOG.md says nothing of it, expected"),
])
def test_what_cannot_be_released_is_refused(repository, change, version, message):
    change(repository)
    done = release(repository, "check", version)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"release: {message}") or message in done.stderr
    assert done.stderr.count("\n") == 1


def build(folder, metadata=METADATA, libraries=LIBRARIES):
    """Makes what `make docs wheel` does, but small."""
    (folder / "build" / "docs").mkdir(parents=True)
    (folder / "build" / "docs" / "index.html").write_text("site")
    (folder / "dist").mkdir()
    with zipfile.ZipFile(folder / "dist" / "tf_poseidon-0.2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tf_poseidon-0.2.0.dist-info/METADATA", metadata)
        for library in libraries:
            wheel.writestr(library, "")
    (folder / "PKG-INFO").write_text(metadata)
    with tarfile.open(folder / "dist" / "tf_poseidon-0.2.0.tar.gz", "w:gz") as archive:
        archive.add(folder / "PKG-INFO", "tf_poseidon-0.2.0/PKG-INFO")
    (folder / "PKG-INFO").unlink()


def test_the_tag_comes_last_and_has_the_changes(repository):
    build(repository)
    (repository / "dist" / "site-0.1.0.tar.gz").touch()
    assert release(repository, "check").returncode == 0
    done = release(repository, "tag")
    assert done.returncode == 0, done.stderr
    assert git(repository, "for-each-ref", "--format=%(objecttype) %(contents)", "refs/tags/v0.2.0") == (
        "tag tf_poseidon 0.2.0\n\n### Added\n\n* More.\n\n")
    names = ["tf_poseidon-0.2.0-py3-none-any.whl", "tf_poseidon-0.2.0.tar.gz", "site-0.2.0.tar.gz"]
    assert sorted(path.name for path in (repository / "dist").iterdir()) == sorted([*names, "SHA256SUMS"])
    assert re.findall(r"^\w{64}  (.*)$", (repository / "dist" / "SHA256SUMS").read_text(), re.MULTILINE) == names
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=repository / "dist", check=True)
    assert "git push origin main v0.2.0\n" in done.stdout and "the next version begins: 0.3.0." in done.stdout
    assert "the tag 'v0.2.0' exists" in release(repository, "tag").stderr


@pytest.mark.parametrize("built, message", [
    (dict(metadata=METADATA.replace("Version: 0", "Version: 1")), "py3-none-any.whl has Version '1.2.0', expected"),
    (dict(metadata=METADATA.replace("Requires-Python: >=3.10\n", "")), "have no Requires-Python, expected one"),
    (dict(metadata=METADATA.partition("# tf")[0]), "have no description, expected one"),
    (dict(libraries=LIBRARIES[1:]), f"has no {LIBRARIES[0]}, expected a library for each of TensorFlow"),
])
def test_what_was_built_otherwise_is_not_tagged(repository, built, message):
    build(repository, **built)
    done = release(repository, "tag")
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1
    assert git(repository, "tag") == ""


def test_a_rehearsal_makes_no_tag(repository):
    build(repository, libraries=LIBRARIES[-1:])
    done = release(repository, "tag", WHEEL_SERIES=supported.TENSORFLOW_SERIES[-1])
    assert done.returncode == 0 and "0.2.0 was rehearsed; no tag" in done.stdout, done.stderr
    assert git(repository, "tag") == "" and (repository / "dist" / "SHA256SUMS").exists()


def test_files_name_the_same_version():
    """The package's is the first of CHANGELOG.md, and that of the wheels in the documentation."""
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version
    documented = [found for page in (ROOT / "docs").glob("*.md")
                  for found in re.findall(r"tf_poseidon-([\w.]+)-py3", page.read_text())]
    assert set(documented) == {version}
