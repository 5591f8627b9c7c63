// One thread converts one element, by the arithmetic of the host. On a GPU, evaluation/gpu/gpu_train.py runs it.
//
// Tests: tests/gpu/test_cuda_kernels.py.

#include "conversion.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "../communicator/arithmetic.h"

namespace poseidon {
namespace {

template <typename From, typename To>
__global__ void ConversionKernel(const From* from, int64_t count, To* to) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    // A double by way of a float, as TensorFlow's own casts do it.
    to[i] = Arithmetic<To>::Store(static_cast<float>(Arithmetic<From>::Load(from[i])));
  }
}

template <typename From, typename To>
cudaError_t Start(cudaStream_t stream, const void* from, int64_t count, void* to) {
  constexpr int kThreads = 256;
  constexpr int64_t kMostBlocks = 4096;
  if (count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMostBlocks));
  ConversionKernel<<<blocks, kThreads, 0, stream>>>(static_cast<const From*>(from), count, static_cast<To*>(to));
  return cudaGetLastError();
}

}  // namespace

int StartConversion(CUstream_st* stream, DataType dtype, DataType out_dtype, const void* from, int64_t count,
                    void* out) {
  if (dtype == DataType::kFloat32) return Start<float, Bfloat16>(stream, from, count, out);
  if (dtype == DataType::kFloat64) return Start<double, Bfloat16>(stream, from, count, out);
  if (out_dtype == DataType::kFloat32) return Start<Bfloat16, float>(stream, from, count, out);
  return Start<Bfloat16, double>(stream, from, count, out);
}

}  // namespace poseidon
