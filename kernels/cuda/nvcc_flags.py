"""What nvcc is told of outer_product.cu.cc, whoever compiles it: setup.py, and scripts/gpu_check.py."""

# Compute capabilities that get machine code: Ampere and Hopper. PTX of the last is for later GPUs, whose
# drivers translate it.
GPUS = ("80", "90")

FLAGS = ["-x", "cu", "-std=c++17", "-O3", "-Xcompiler=-fPIC",
         *(f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in GPUS[:-1]),
         f"-gencode=arch=compute_{GPUS[-1]},code=[sm_{GPUS[-1]},compute_{GPUS[-1]}]"]
