"""What nvcc is told of outer_product.cu.cc, whoever compiles it: setup.py, and evaluation/gpu/gpu_check.py."""

# Compute capabilities that get machine code: Ampere and Ada (8.x), Hopper with the instructions that no other GPU has,
# and Blackwell of data centres (10.x).
GPUS = ("80", "90a", "100")

# PTX for other GPUs, whose drivers translate it.
PTX = "90"

FLAGS = ["-x", "cu", "-std=c++17", "-O3", "-Xcompiler=-fPIC", "-DPOSEIDON_HAS_SM_90A",
         *(f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in GPUS),
         f"-gencode=arch=compute_{PTX},code=compute_{PTX}"]
