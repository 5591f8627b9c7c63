// The arithmetic of sufficient factors on NVIDIA GPUs: U^T V, and the update of weights by it
// without writing the gradient to memory. A C interface that includes nothing of CUDA's or
// TensorFlow's, so that it can be called where neither is there, and emulated.

#ifndef POSEIDON_CUDA_OUTER_PRODUCT_H_
#define POSEIDON_CUDA_OUTER_PRODUCT_H_

#include <stdbool.h>
#include <stdint.h>

// Visible in the op library, too, whose kernels are tested by themselves.
#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

// CUDA's cudaStream_t is a pointer to this.
struct CUstream_st;

// Types of elements. Products are always added in float32.
enum PoseidonType {
  POSEIDON_FLOAT32 = 0,
  POSEIDON_BFLOAT16 = 1,
  POSEIDON_HALF = 2,
  // float32 in memory, taken by the tensor cores rounded to 10 bits of the fraction. Of factors.
  POSEIDON_TF32 = 3,
};

// Row-major U [k, m] and V [k, n] on the device, without gaps between rows. Any size may be 0; the
// pointers are aligned to their elements, no more.
struct PoseidonFactors {
  enum PoseidonType type;
  const void* u;
  const void* v;
  int64_t k, m, n;
};

// out = alpha * U^T V + beta * out, with `out` [m, n] of the factors' type or float32. With alpha
// 0, factors are not read; with beta 0, `out` is not. Products are added in an order that only k,
// the types, and whether rows of 16-bit factors begin at multiples of 16 bytes decide: where these are
// equal, equal factors give equal bits on one model of GPU. Starts the work on
// `stream` and returns a cudaError_t: cudaErrorInvalidValue if sizes, types and pointers do not go
// together.
int poseidon_outer_product(struct CUstream_st* stream, const struct PoseidonFactors* factors, float alpha, float beta,
                           void* out, enum PoseidonType out_type);

// Gradient descent on float32 weights [m, n], as keras.optimizers.SGD writes it:
//   step = momentum * velocity - learning_rate * U^T V;  velocity = step
//   weights += nesterov ? momentum * step - learning_rate * U^T V : step
// `velocity` [m, n] may be null if momentum is 0. Returns as poseidon_outer_product.
int poseidon_outer_product_update(struct CUstream_st* stream, const struct PoseidonFactors* factors,
                                  float learning_rate, float momentum, bool nesterov, float* velocity, float* weights);

// Describes what the others have returned.
const char* poseidon_cuda_error(int error);

#ifdef __cplusplus
}  // extern "C"
#endif
#pragma GCC visibility pop

#endif  // POSEIDON_CUDA_OUTER_PRODUCT_H_
