// One thread adds up a column: neighbours read neighbours, and the order is that of the CPU. On a GPU, the factors of
// scripts/gpu_train.py run it.
//
// Tests: tests/graphs/test_placement.py.

#include "row_sum.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "../communicator/arithmetic.h"

namespace poseidon {
namespace {

template <typename T, typename Out>
__global__ void RowSumKernel(const T* v, int64_t k, int64_t n, Out* out) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; column < n; column += stride) {
    typename Arithmetic<T>::Accumulator sum = 0;
    for (int64_t row = 0; row < k; ++row) sum += Arithmetic<T>::Load(v[row * n + column]);
    out[column] = Arithmetic<Out>::Store(sum);
  }
}

template <typename T, typename Out>
cudaError_t Start(cudaStream_t stream, const void* v, int64_t k, int64_t n, void* out) {
  constexpr int kThreads = 128;
  constexpr int64_t kMostBlocks = 4096;
  if (n == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min((n + kThreads - 1) / kThreads, kMostBlocks));
  RowSumKernel<<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(v), k, n, static_cast<Out*>(out));
  return cudaGetLastError();
}

}  // namespace

int StartRowSum(CUstream_st* stream, DataType dtype, DataType out_dtype, const void* v, int64_t k, int64_t n,
                void* out) {
  const bool is_float = out_dtype == DataType::kFloat32;
  switch (dtype) {
    case DataType::kFloat32:
      return Start<float, float>(stream, v, k, n, out);
    case DataType::kFloat16:
      return is_float ? Start<Float16, float>(stream, v, k, n, out) : Start<Float16, Float16>(stream, v, k, n, out);
    case DataType::kBfloat16:
      return is_float ? Start<Bfloat16, float>(stream, v, k, n, out) : Start<Bfloat16, Bfloat16>(stream, v, k, n, out);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace poseidon
