"""Saves a training step of a small MobileNetV2, as the benchmark does: save_mobilenet.py DIRECTORY."""

import sys

import keras

from evaluation.benchmarks import bench_rewrite

if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    bench_rewrite.save_training_step("MobileNetV2", sys.argv[1], (32, 32, 3), alpha=0.35, classes=10)
