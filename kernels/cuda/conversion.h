// Conversions between bfloat16 and wider types on NVIDIA GPUs. A C interface like that of outer_product.h.

#ifndef POSEIDON_CUDA_CONVERSION_H_
#define POSEIDON_CUDA_CONVERSION_H_

#include <cstdint>

#include "../communicator/sum.h"

struct CUstream_st;

namespace poseidon {

// Starts converting `count` elements of float or double to bfloat16, rounded to nearest, or back. Returns a
// cudaError_t.
int StartConversion(CUstream_st* stream, DataType dtype, DataType out_dtype, const void* from, int64_t count,
                    void* out);

}  // namespace poseidon

#endif  // POSEIDON_CUDA_CONVERSION_H_
