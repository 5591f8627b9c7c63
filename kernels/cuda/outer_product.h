// The arithmetic of sufficient factors on NVIDIA GPUs: U^T V, and the update of weights by it without
// writing the gradient to memory. A C interface of plain CUDA, so that it can be tried without TensorFlow.

#ifndef POSEIDON_CUDA_OUTER_PRODUCT_H_
#define POSEIDON_CUDA_OUTER_PRODUCT_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Types of elements. Products are always added in float32.
enum PoseidonType {
  POSEIDON_FLOAT32 = 0,
  POSEIDON_BFLOAT16 = 1,
  POSEIDON_HALF = 2,
  // float32 in memory, of which the tensor cores read 10 bits of the fraction. For factors only.
  POSEIDON_TF32 = 3,
};

// Row-major U [k, m] and V [k, n] on the device, without gaps between rows. Any size may be 0; the pointers
// are aligned to their elements, no more.
struct PoseidonFactors {
  enum PoseidonType type;
  const void* u;
  const void* v;
  int64_t k, m, n;
};

// out = alpha * U^T V + beta * out, with `out` [m, n] of the factors' type or float32. With beta 0, `out` is
// not read. Products are added in an order that the sizes decide, so equal factors give equal bits on one model
// of GPU. Starts the work on `stream` and returns; cudaErrorInvalidValue if sizes or types do not go together.
cudaError_t poseidon_outer_product(cudaStream_t stream, const struct PoseidonFactors* factors,
                                   float alpha, float beta, void* out, enum PoseidonType out_type);

// Gradient descent on float32 weights [m, n], as keras.optimizers.SGD writes it:
//   step = momentum * velocity - learning_rate * U^T V;  velocity = step
//   weights += nesterov ? momentum * step - learning_rate * U^T V : step
// `velocity` [m, n] may be null if momentum is 0. Returns as poseidon_outer_product.
cudaError_t poseidon_outer_product_update(cudaStream_t stream, const struct PoseidonFactors* factors,
                                          float learning_rate, float momentum, bool nesterov,
                                          float* velocity, float* weights);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // POSEIDON_CUDA_OUTER_PRODUCT_H_
