"""Checks that a version can be released, and at the end, that what was built is that version; `make release` calls it.

    python scripts/release.py check 0.2.0     says in one sentence why not, before anything is built
    python scripts/release.py tag 0.2.0       checks dist/, writes dist/SHA256SUMS, and makes the tag

It works on the sources in the current folder. With WHEEL_SERIES="2.21", as for scripts/build_wheel.sh, it rehearses:
the wheel has fewer libraries, so no tag is made.
"""

import email
import hashlib
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile

DIST = pathlib.Path("dist")
SITE = pathlib.Path("build/docs")
NEEDED = ("Summary", "License-Expression", "Requires-Python", "Requires-Dist", "Provides-Extra")  # of the metadata


def refuse(sentence):
    """Ends the program with a sentence."""
    sys.exit(f"release: {sentence}")


def git(*arguments):
    """Returns what git prints, or "" where it fails."""
    done = subprocess.run(["git", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip()


def changes(version):
    """Returns the section of CHANGELOG.md about a version, None if there is none, and what its heading says of when."""
    for section in re.split(r"^## ", pathlib.Path("CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        if heading.partition(" ")[0] == version:
            return text.strip(), heading.removeprefix(version).strip(" ()")
    return None, ""


def check(version):
    """Refuses what must not become a version."""
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        refuse(f"VERSION is '{version}', expected three numbers, or a candidate of them; run make release "
               "VERSION=0.2.0, or 0.2.0rc1.")
    if (branch := git("branch", "--show-current")) != "main":
        refuse(f"the branch is '{branch}', expected 'main'; run git switch main.")
    if changed := git("status", "--porcelain").splitlines():
        refuse(f"{len(changed)} files are not as committed, such as '{changed[0].split(maxsplit=1)[1]}', expected "
               "none; commit or remove them.")
    if commit := git("rev-parse", "--verify", "--quiet", "--short", f"refs/tags/v{version}"):
        refuse(f"the tag 'v{version}' exists ({commit}), expected a new one; a version is released once, so take the "
               "next.")
    if not git("var", "GIT_COMMITTER_IDENT"):
        refuse("git does not know who makes the tag, expected a name and an address; run git config user.name and "
               "user.email.")
    written = re.search(r'^version = "(.*)"$', pathlib.Path("pyproject.toml").read_text(), re.MULTILINE)[1]
    if written != version:
        refuse(f"pyproject.toml has the version '{written}', expected '{version}'; write it there, and commit that.")
    text, when = changes(version)
    if not text or not re.fullmatch(r"\d{4}-\d\d-\d\d", when):
        found = "has no section of it" if text is None else f"says '{when}' of it" if text else "says nothing of it"
        refuse(f"CHANGELOG.md {found}, expected a heading '## {version} (year-month-day)', and what has changed; write "
               "it, and commit that.")


def metadata(path):
    """Returns the metadata of a wheel or a source distribution."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            name, = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return email.message_from_bytes(wheel.read(name))
    with tarfile.open(path) as archive:
        return email.message_from_bytes(archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO").read())


def check_built(version):
    """Returns the wheel and the source distribution; refuses other files, and what indices of packages would refuse."""
    wheels, archives = sorted(DIST.glob("*.whl")), sorted(DIST.glob("tf_poseidon-*.tar.gz"))
    if len(wheels) != 1 or [path.name for path in archives] != [f"tf_poseidon-{version}.tar.gz"]:
        refuse(f"dist/ has {', '.join(path.name for path in [*wheels, *archives]) or 'nothing'}, expected one wheel "
               f"and one source distribution of {version}; run make release again.")
    for path in (wheels[0], archives[0]):
        has = metadata(path)
        for field, wanted in (("Name", "tf_poseidon"), ("Version", version),
                              ("Description-Content-Type", "text/markdown")):
            if has[field] != wanted:
                refuse(f"{path.name} has {field} '{has[field]}', expected '{wanted}'; see pyproject.toml.")
        if missing := [field for field in NEEDED if not has[field]] + ["description"] * (not has.get_payload().strip()):
            refuse(f"the metadata of {path.name} have no {missing[0]}, expected one; see pyproject.toml.")
    supported = runpy.run_path("tf_poseidon/supported.py")
    series = os.environ.get("WHEEL_SERIES", "").split() or supported["TENSORFLOW_SERIES"]
    with zipfile.ZipFile(wheels[0]) as wheel:
        missing = {f"tf_poseidon/ops/{supported['library'](each)}.so" for each in series} - set(wheel.namelist())
    if missing:
        refuse(f"{wheels[0].name} has no {min(missing)}, expected a library for each of TensorFlow "
               f"{', '.join(series)}; run make release again.")
    return wheels[0], archives[0]


def tag(version):
    """Checks and sums what was built, and makes the tag, after which there is nothing that can fail."""
    check(version)  # building has changed nothing
    built = check_built(version)
    if not (SITE / "index.html").exists():
        refuse(f"there is no {SITE}/index.html, expected the site; run make docs.")
    site = DIST / f"site-{version}.tar.gz"
    with tarfile.open(site, "w:gz") as archive:
        archive.add(SITE, arcname=site.name.removesuffix(".tar.gz"))
    for path in DIST.iterdir():
        if path not in (*built, site):
            path.unlink()  # of earlier versions
    (DIST / "SHA256SUMS").write_text("".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
                                             for path in (*built, site)))
    if os.environ.get("WHEEL_SERIES"):
        print(f"release: {version} was rehearsed; no tag, since with WHEEL_SERIES={os.environ['WHEEL_SERIES']} the "
              "wheel is not for all.")
        return
    # --cleanup: lines that begin with # are headings.
    subprocess.run(["git", "tag", "--annotate", "--cleanup=whitespace", "--file=-", f"v{version}"], check=True,
                   text=True, input=f"tf_poseidon {version}\n\n{changes(version)[0]}\n")
    print(f"""release: v{version} is tagged. Next:
  git push origin main v{version}
  twine upload {built[0]} {built[1]}
  gh release create v{version} --verify-tag --notes-from-tag dist/*    # and publish dist/{site.name}
  In pyproject.toml and CHANGELOG.md, the next version begins: {next_version(version)}.""")


def next_version(version):
    """Returns the version after one: the one that a candidate becomes, else the next with new features."""
    major, minor, _ = version.split(".")
    return version.partition("rc")[0] if "rc" in version else f"{major}.{int(minor) + 1}.0"


if __name__ == "__main__":
    steps = {"check": check, "tag": tag}
    if len(sys.argv) != 3 or sys.argv[1] not in steps:
        refuse(f"the arguments are '{' '.join(sys.argv[1:])}', expected check or tag, and a version; run make release "
               "VERSION=0.2.0.")
    steps[sys.argv[1]](sys.argv[2])
