"""Trains on one GPU, alone and as two ranks that share it, and checks and measures what came out.

    python scripts/gpu_train.py --out DIRECTORY
    python scripts/gpu_train.py --out DIRECTORY --rehearse

It runs where the package and TensorFlow for GPUs are installed; for a machine without network, pack_gpu.sh makes all
that it needs. It takes less than 8 minutes: each part has its own limit, and is a process of its own, so that one that
hangs or dies leaves the others' results. DIRECTORY/gpu_train.json is written, and a table printed, as it goes on.

    kernels      the op library's kernels against their bounds and the host's bits, and the rates of copies
    alone        one process: in the scope of a strategy as in plain Keras
    ps.float32   two ranks, by policy and numbers: as one process, within the effect of rounding; with the same bits
    and so on    as where TensorFlow copies whole tensors to the host; where nodes ran, and what was copied
    rates        two ranks of wide layers: the rate of copies, how much of them backpropagation hides, times of steps
    .apart       the same through the host, as ranks of several nodes exchange; otherwise between the ranks' GPUs

--rehearse runs the same on a CPU, where an emulated GPU copies and multiplies: small models, and no rates that say
anything. It needs the tree as `make setup` builds it: wheels have no emulated GPU.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import time

from evaluation import modules

# Of each part: its script and flags, its number of ranks, and its limit in seconds.
PARTS = {
    "kernels": (["gpu.gpu_kernels"], 1, 60),
    "alone": (["gpu.gpu_alone"], 1, 120),
    "ps.float32": (["gpu.gpu_rank", "--policy=ps"], 2, 60),
    "sfb.float32": (["gpu.gpu_rank", "--policy=sfb"], 2, 60),
    "auto.float32": (["gpu.gpu_rank", "--policy=auto"], 2, 60),
    "sfb.tf32": (["gpu.gpu_rank", "--policy=sfb", "--numbers=tf32"], 2, 60),
    "auto.mixed": (["gpu.gpu_rank", "--policy=auto", "--numbers=mixed"], 2, 60),
    "ps.float32.apart": (["gpu.gpu_rank", "--policy=ps", "--apart"], 2, 60),
    "rates": (["gpu.gpu_rates"], 2, 60),
    "rates.apart": (["gpu.gpu_rates", "--apart"], 2, 60)}
WHOLE_S = 8 * 60
# The rehearsal has two cores for everything.
SLOWER, SMALL_UNIT = 4, 4


def launcher(ranks):
    """Returns the words that start a number of ranks."""
    return [] if ranks == 1 else [str(pathlib.Path(sysconfig.get_path("scripts"), "mpiexec")), "-n", str(ranks)]


def run(name, arguments, left_s):
    """Runs a part.

    Args:
        name: Of the part.
        arguments: Those of the command line.
        left_s: Seconds that are left for all parts.

    Returns:
        What the part has found, with its seconds, and an error if it has failed.
    """
    (script, *flags), ranks, limit_s = PARTS[name]
    limit_s, out = min(limit_s * (SLOWER if arguments.rehearse else 1), left_s), arguments.out
    command = [*launcher(ranks), *modules.command(script), f"--out={out}", f"--models={arguments.models}",
               *flags, *(["--rehearse", f"--unit={SMALL_UNIT}"] if arguments.rehearse else [])]
    begin = time.perf_counter()
    log, error = out / f"{name}.log", None
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT,
                                                 start_new_session=True) as process:
        try:
            status = process.wait(timeout=limit_s)
            if status:
                error = f"status {status}"
        except subprocess.TimeoutExpired:
            error = f"took longer than {limit_s:.0f} s"
        finally:  # ranks, too: they share the launcher's session
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    result = out / f"{name}.json"
    found = json.loads(result.read_text()) if result.exists() else {}
    seconds = round(time.perf_counter() - begin, 1)
    error = error or "; ".join(wrong(name, found, arguments.rehearse))
    return {"seconds": seconds, "found": found} | ({"error": error, "log": log.read_text()[-3000:]} if error else {})


def wrong(name, found, rehearse):
    """Yields what is wrong with the results of a part."""
    if name == "alone":
        yield from (f"{model} differs from plain Keras" for model, each in found.items() if not each["error"] <= 1)
    elif name.split(".")[0] in ("kernels", "rates"):
        return  # the first ends where a kernel is wrong
    else:
        for model, each in found.items():
            if not each["error"] <= 1:
                yield f"{model} differs from one process"
            if not each["is_equal_to_whole"]:
                yield f"{model} has other bits where TensorFlow copies whole tensors"
            if not (rehearse or any(node.endswith(" GPU") for node in each["places"])):
                yield f"{model} exchanges nothing of the GPU's memory"
            # In the rehearsal, tensors are so small that some models exchange none between GPUs.
            way = "down" if name.endswith(".apart") or rehearse else "across"
            if not each["copied"][f"{way}_bytes"]:
                yield f"{model} has copied nothing in pieces, {way}"


def lines_of(name, result):
    """Returns the lines of the table about a part."""
    found, error = result["found"], result.get("error")
    rows = [(name, "failed", error)] if error else []
    if name == "kernels" and found:
        rows.append((name, f"{found['cases']} cases", "largest error {:.2f} of its bound".format(
            max(found["worst"].values()))))
        rows += [(name, f"copies {what}", f"{1e-9 * rate:.1f} GB/s")
                 for what, rate in found.get("copied_bytes_per_s", {}).items()]
    elif name == "alone":
        rows += [(name, model, "the bits of plain Keras" if each["is_equal"] else
                  f"{each['error']:.2f} of the bound from plain Keras") for model, each in found.items()]
    elif name.startswith("rates") and found:
        for way in ("alone_step_s", "step_s", "whole_step_s"):
            rows.append((name, way.removesuffix("_s").replace("_", " "), f"{1e3 * found[way]:.1f} ms"))
        for row, each in found["copies"].items():
            rows.append((name, f"copies {row}", "{:.1f} GB/s, {:.0%} hidden; {:.2f} ms after the last gradient, a "
                         "piece takes {:.2f} ms".format(1e-9 * each["bytes_per_s"], each["hidden"],
                                                        1e3 * each["exposed_s"], 1e3 * each["piece_s"])))
    else:
        for model, each in found.items():
            schemes = ", ".join(f"{count} {scheme}" for scheme, count in sorted(each["schemes"].items()))
            rows.append((name, f"{model}: {schemes}", "{:.2f} of the bound from one process; {} whole copies".format(
                each["error"], "the bits of" if each["is_equal_to_whole"] else "NOT the bits of")))
    return [*rows, (name, "seconds", str(result["seconds"]))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory for results and logs")
    parser.add_argument("--rehearse", action="store_true", help="let the CPU play the GPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="names of parts, with commas between them")
    parser.add_argument("--models", default="", help="names of models, likewise; all by default")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 << 30))  # TensorFlow's kernels, which drivers translate once
    results, file = {}, arguments.out / "gpu_train.json"
    begin = time.perf_counter()
    for name in arguments.parts.split(","):
        (arguments.out / f"{name}.json").unlink(missing_ok=True)
        left_s = WHOLE_S * (SLOWER if arguments.rehearse else 1) - (time.perf_counter() - begin)
        results[name] = run(name, arguments, max(left_s, 1.0))
        file.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "is_rehearsal": arguments.rehearse,
                                    "parts": results}, indent=1) + "\n")
        for row in lines_of(name, results[name]):
            print("| {} | {} | {} |".format(*row), flush=True)
    failed = [name for name, result in results.items() if "error" in result]
    print(f"gpu_train: {len(results) - len(failed)} of {len(results)} parts in {time.perf_counter() - begin:.0f} s, in "
          f"{file}" + (f"; failed: {', '.join(failed)}, see their logs" if failed else ""))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
