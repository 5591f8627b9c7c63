// One thread adds up a column, of all rows or of those in a list: neighbours read neighbours, and the order is that of
// the CPU. On a GPU, evaluation/gpu/gpu_train.py runs both.
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

template <typename T>
__global__ void RowSumsKernel(const T* values, int64_t columns, RowLists lists, T* output) {
  const int64_t count = lists.count * columns, stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const int64_t list = i / columns, begin = lists.begins[list], end = lists.begins[list + 1];
    const T* const column = values + i % columns;
    if (end - begin == 1) {  // its own bits
      output[i] = column[lists.rows[begin] * columns];
      continue;
    }
    typename Arithmetic<T>::Accumulator sum = 0;
    for (int64_t k = begin; k < end; ++k) sum += Arithmetic<T>::Load(column[lists.rows[k] * columns]);
    output[i] = Arithmetic<T>::Store(sum);
  }
}

constexpr int kThreads = 128;

// The number of blocks for so many sums.
unsigned Blocks(int64_t sums) {
  constexpr int64_t kMostBlocks = 4096;
  return static_cast<unsigned>(std::min((sums + kThreads - 1) / kThreads, kMostBlocks));
}

template <typename T, typename Out>
cudaError_t Start(cudaStream_t stream, const void* v, int64_t k, int64_t n, void* out) {
  if (n == 0) return cudaSuccess;
  RowSumKernel<<<Blocks(n), kThreads, 0, stream>>>(static_cast<const T*>(v), k, n, static_cast<Out*>(out));
  return cudaGetLastError();
}

template <typename T>
cudaError_t StartLists(cudaStream_t stream, const void* values, int64_t columns, const RowLists& lists, void* output) {
  if (lists.count * columns == 0) return cudaSuccess;
  RowSumsKernel<<<Blocks(lists.count * columns), kThreads, 0, stream>>>(static_cast<const T*>(values), columns, lists,
                                                                        static_cast<T*>(output));
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

int StartRowSums(CUstream_st* stream, DataType dtype, const void* values, int64_t columns, const RowLists& lists,
                 void* output) {
  using Starter = cudaError_t (*)(cudaStream_t, const void*, int64_t, const RowLists&, void*);
  constexpr Starter kStarters[] = {StartLists<float>,    StartLists<double>,   StartLists<Float16>,
                                   StartLists<Bfloat16>, StartLists<uint32_t>, StartLists<uint64_t>};  // by DataType
  return kStarters[static_cast<int>(dtype)](stream, values, columns, lists, output);
}

}  // namespace poseidon
