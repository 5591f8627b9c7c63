"""Repositories that need no download: the wheels that a Python has, and rules that Bazel has."""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    includes = ["include"],
)

filegroup(
    name = "library",
    srcs = ["%s"],
)
"""

def _installed(ctx):
    python = ctx.os.environ.get("PYTHON", "python3")
    for asked in ["setup.py", "tf_poseidon/supported.py"]:
        ctx.path(Label("//:" + asked))  # when it changes, Bazel asks again
    shown = ctx.execute([python, ctx.path(Label("//bazel:installed.py")), ctx.name])
    if shown.return_code:
        fail("PYTHON is %s:\n%s" % (python, shown.stderr))
    found = json.decode(shown.stdout)
    library = found["library"].split("/")[-1]
    ctx.symlink(found["include"], "include")
    ctx.symlink(found["library"], library)
    ctx.file("BUILD", _BUILD % library)
    ctx.file("constants.bzl", "".join(["%s = %r\n" % constant for constant in found["constants"].items()]))

# Named tensorflow or mpi, it has that of the Python in the environment's PYTHON, else of python3.
installed = repository_rule(
    implementation = _installed,
    environ = ["PYTHON", "MPICXX"],
    local = True,
)

_NATIVE = {
    "rules_cc": ["cc_binary", "cc_library", "cc_toolchain", "cc_toolchain_suite"],
    "rules_java": ["java_import", "java_runtime", "java_toolchain"],
}

def _native_rules(ctx):
    package = ctx.name[len("rules_"):]
    ctx.file(package + "/BUILD")
    ctx.file(package + "/defs.bzl", "".join(["%s = native.%s\n" % (rule, rule) for rule in _NATIVE[ctx.name]]))

# Bazel's own BUILD files load rules from rules_cc and rules_java, which it would download: here they are those that it
# has built in.
native_rules = repository_rule(implementation = _native_rules)
