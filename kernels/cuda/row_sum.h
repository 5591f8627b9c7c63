// Sums of the rows of a matrix on NVIDIA GPUs: the gradient of a bias, from the factors of its layer, and slices.
// A C interface like that of outer_product.h.

#ifndef POSEIDON_CUDA_ROW_SUM_H_
#define POSEIDON_CUDA_ROW_SUM_H_

#include <cstdint>

#include "../communicator/sum.h"

struct CUstream_st;

namespace poseidon {

// Starts writing the sum over the k rows of V [k, n] to out [n], in the order of the rows, with the bits of SumRows in
// ../outer_product.h. Takes the types that GPUs multiply: no double. Returns a cudaError_t.
int StartRowSum(CUstream_st* stream, DataType dtype, DataType out_dtype, const void* v, int64_t k, int64_t n,
                void* out);

// Starts SumRows of ../communicator/sum.h, on values and lists in the GPU's memory. Returns a cudaError_t.
int StartRowSums(CUstream_st* stream, DataType dtype, const void* values, int64_t columns, const RowLists& lists,
                 void* output);

}  // namespace poseidon

#endif  // POSEIDON_CUDA_ROW_SUM_H_
